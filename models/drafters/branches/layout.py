"""Layout of branches: the target's continuation after each labelled position of a text.

    text      a b c d e        after b:  c x y     after d:  e z w

Text and branches are read together. An entry of a branch sees the text before it and its branch up
to itself. So all positions and depths are trained in parallel, on exactly the inputs that the
drafter has in decoding.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch.nn.functional import pad

from ....data.types import DrafterBatch


@dataclass(frozen=True, kw_only=True)
class Branches:
    """The branches of a batch, by row, padded to the row with the most branches.

    `columns` is where each branch begins in its row. `starts` is where its text begins, and
    `text_starts` where each token's text begins; both are None if each row holds one text. Entries of
    depths 0..D-1 are ordered by depth: branch n at depth d is entry d * branches + n.
    """

    columns: Int[torch.Tensor, "batch branch"]
    starts: Int[torch.Tensor, "batch branch"] | None
    index: Int[torch.Tensor, " position"]
    """Index of each position's branch among all batch x branch, padding included."""
    tokens: Int[torch.Tensor, " position"]
    """Index of each position's token among all batch x seq tokens."""
    text_starts: Int[torch.Tensor, "batch seq"] | None
    num_columns: int
    """Columns of the texts."""

    @classmethod
    def of(cls, batch: DrafterBatch) -> "Branches":
        """Return a branch for each of the batch's positions, in their order."""
        tensors = batch.label_indexes.bundle.tensors()
        return cls(
            columns=tensors["columns"],
            starts=tensors.get("starts"),
            index=tensors["branch_index"],
            tokens=tensors["positions"],
            text_starts=batch.starts,
            num_columns=batch.input_ids.shape[1],
        )

    @property
    def positions(self) -> Int[torch.Tensor, "batch branch"]:
        """Position in its text at which each branch begins, from 0."""
        return self.columns if self.starts is None else self.columns - self.starts

    def spread(self, values: Shaped[torch.Tensor, "position *rest"]) -> Shaped[torch.Tensor, "batch branch *rest"]:
        """Move values of each position to its branch; zeros at the padding."""
        result = values.new_zeros(self.columns.numel(), *values.shape[1:]).index_copy(0, self.index, values)
        return result.unflatten(0, self.columns.shape)

    def collect(self, values: Shaped[torch.Tensor, "batch branch *rest"]) -> Shaped[torch.Tensor, "position *rest"]:
        """Return the values of all branches by position: the inverse of `spread`."""
        return values.flatten(0, 1).index_select(0, self.index)

    def at_tokens(self, values: Shaped[torch.Tensor, "batch seq *rest"]) -> Shaped[torch.Tensor, "position *rest"]:
        """Return the values of the tokens at which the branches leave their texts."""
        return values.flatten(0, 1).index_select(0, self.tokens)

    def text_mask(self, *, with_own_column: bool) -> Bool[torch.Tensor, "batch 1 branch seq"]:
        """Mark the columns of its text that a branch sees: those before its column.

        With `with_own_column` it also sees its column.
        """
        last = self.columns[:, :, None] + int(with_own_column)
        column = torch.arange(self.num_columns, device=last.device)
        before = column < last
        return (before if self.starts is None else before & (column >= self.starts[:, :, None]))[:, None]

    def whole_mask(self, num_depths: int, *, with_own_column: bool) -> Bool[torch.Tensor, "batch 1 query query"]:
        """Mark what each token sees if text and branches are read in one pass.

        The order is: each text, causally, then the branches' entries by depth.
        """
        size = self.num_columns + num_depths * self.columns.shape[1]
        causal = torch.ones(self.num_columns, self.num_columns, dtype=torch.bool, device=self.columns.device).tril()
        text = causal[None]  # [rows, column, column]
        if self.text_starts is not None:
            text = text & (self.text_starts[:, :, None] == self.text_starts[:, None])
        rows = [text[:, None].expand(len(self.columns), 1, -1, -1)]
        text_columns = self.text_mask(with_own_column=with_own_column)
        itself = torch.eye(self.columns.shape[1], dtype=torch.bool, device=causal.device).expand(len(text_columns), 1, -1, -1)
        rows += [torch.cat([text_columns, itself.repeat(1, 1, 1, depth + 1)], dim=3) for depth in range(num_depths)]
        return torch.cat([pad(row, (0, size - row.shape[-1])) for row in rows], dim=2)
