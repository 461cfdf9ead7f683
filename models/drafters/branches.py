"""Attention of branches in training: an entry sees its text, and its branch up to itself.

One mask over all entries would compare each entry with all other branches, without need. With a
branch at every position, that would be most of the work. Here attention to the text and to the
branch are computed separately, and merged by their log-sum-exp.

Branches are the target's continuations after the labelled positions of a text:

    text      a b c d e        after b:  c x y     after d:  e z w

Text and branches are read together. An entry of a branch sees the text before it and its branch up
to itself. So all positions and depths are trained in parallel, on exactly the inputs that the
drafter has in decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch.nn.functional import pad, scaled_dot_product_attention

from ...data.types import DrafterBatch
from ..llm.split_attention import attention, attention_gradient, has_kernel, prepare_mask
from ..llm.tree_attention import attend_folded, hidden_score


@dataclass(frozen=True, kw_only=True)
class Branches:
    """The branches of a batch, by row, padded to the row with the most branches.

    `columns` is the column of the token that each branch follows. `starts` is the column where the
    branch's text begins, and `text_starts` the column where each token's text begins; both are None
    if each row holds one text. Columns and starts of the padding are 0. Entries of depths 0..D-1 are
    ordered by depth: branch n at depth d is entry d * branches + n.
    """

    columns: Int[torch.Tensor, "batch branch"]
    starts: Int[torch.Tensor, "batch branch"] | None
    index: Int[torch.Tensor, " position"]
    """Index of each position's branch among all batch x branch, padding included."""
    text_starts: Int[torch.Tensor, "batch seq"] | None
    num_columns: int
    """Columns of the texts."""

    @classmethod
    def of(cls, batch: DrafterBatch, positions: Int[torch.Tensor, " position"]) -> "Branches":
        """Return a branch at each of `positions`, in their order, which ascends.

        They are indexes among all batch x seq tokens: see `Labels.positions`. The host waits for the
        largest number of branches in a row.
        """
        # 1. Where the positions are, and how many each row has.
        num_rows, seq = batch.input_ids.shape
        row, column = positions // seq, positions % seq
        count = (row == torch.arange(num_rows, device=row.device)[:, None]).sum(1)
        num_branches = int(count.max())
        # 2. The branches of each row, the padding after them.
        in_rows_before = (count.cumsum(0) - count)[row]
        index = row * num_branches + torch.arange(len(row), device=row.device) - in_rows_before

        def padded(values: Int[torch.Tensor, " position"]) -> Int[torch.Tensor, "batch branch"]:
            return values.new_zeros(num_rows * num_branches).index_copy(0, index, values).view(num_rows, num_branches)

        return cls(
            columns=padded(column),
            starts=None if batch.starts is None else padded(batch.starts[row, column]),
            index=index,
            text_starts=batch.starts,
            num_columns=seq,
        )

    @property
    def positions(self) -> Int[torch.Tensor, "batch branch"]:
        """Position in its text of the token that each branch follows, from 0."""
        return self.columns if self.starts is None else self.columns - self.starts

    def spread(self, values: Shaped[torch.Tensor, "position *rest"]) -> Shaped[torch.Tensor, "batch branch *rest"]:
        """Move values of each position to its branch; zeros at the padding."""
        result = values.new_zeros(self.columns.numel(), *values.shape[1:]).index_copy(0, self.index, values)
        return result.unflatten(0, self.columns.shape)

    def collect(self, values: Shaped[torch.Tensor, "batch branch *rest"]) -> Shaped[torch.Tensor, "position *rest"]:
        """Return the values of all branches by position: the inverse of `spread`."""
        return values.flatten(0, 1).index_select(0, self.index)

    def text_mask(self, *, with_own_column: bool) -> Bool[torch.Tensor, "batch 1 branch seq"]:
        """Mark the columns of its text that a branch sees: those before its column.

        With `with_own_column` it also sees its column.
        """
        last = self.columns[:, :, None] + int(with_own_column)
        column = torch.arange(self.num_columns, device=last.device)
        before = column < last
        return (before if self.starts is None else before & (column >= self.starts[:, :, None]))[:, None]

    def whole_mask(self, num_depths: int) -> Bool[torch.Tensor, "batch 1 query query"]:
        """Mark what each token sees if text and branches are read in one pass.

        The order is: each text, causally, then the branches' entries by depth. A branch sees its own
        column.
        """
        size = self.num_columns + num_depths * self.columns.shape[1]
        causal = torch.ones(self.num_columns, self.num_columns, dtype=torch.bool, device=self.columns.device).tril()
        text = causal[None]  # [rows, column, column]
        if self.text_starts is not None:
            text = text & (self.text_starts[:, :, None] == self.text_starts[:, None])
        rows = [text[:, None].expand(len(self.columns), 1, -1, -1)]
        text_columns = self.text_mask(with_own_column=True)
        itself = torch.eye(self.columns.shape[1], dtype=torch.bool, device=causal.device).expand(len(text_columns), 1, -1, -1)
        rows += [torch.cat([text_columns, itself.repeat(1, 1, 1, depth + 1)], dim=3) for depth in range(num_depths)]
        return torch.cat([pad(row, (0, size - row.shape[-1])) for row in rows], dim=2)


Query = Float[torch.Tensor, "batch head branch head_dim"]
Text = Float[torch.Tensor, "batch kv_head seq head_dim"]
Visible = Bool[torch.Tensor, "batch 1 branch seq"]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]
Masks = dict[tuple[Any, ...], torch.Tensor]
"""Masks as a kernel reads them, by type and numbers of heads."""


class Entries:
    """Keys and values of texts, and of branches by depth; replaces a cache in training."""

    def __init__(self, text: KeysAndValues, branches: Sequence[KeysAndValues] = (), masks: Masks | None = None) -> None:
        """`masks` keeps the mask in the kernel's form, for all `Entries` with the same `visible`."""
        self.text = text
        self.branches = list(branches)
        self.masks = {} if masks is None else masks

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysAndValues:
        """Append the keys and values of one more depth (transformers' interface of a cache)."""
        self.branches.append((key_states, value_states))
        return key_states, value_states

    def attend(self, query: Query, visible: Visible, scale: float) -> Query:
        """Attend from the last depth's entries to their branch and to the `visible` text."""
        if not has_kernel(query, self.text[1]):
            return attend_densely(query, self.text, self.branches, visible, scale)
        keys, values = zip(*self.branches, strict=True)
        return self._attend_in_two_parts(query, visible, scale, keys, values)

    def _attend_in_two_parts(
        self, query: Query, visible: Visible, scale: float, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> Query:
        mask = self._prepared(visible, query)
        output: torch.Tensor = _SplitAttention.apply(query, *self.text, mask, scale, len(keys), *keys, *values)
        return output

    def _prepared(self, visible: Visible, query: Query) -> torch.Tensor:
        heads = query.shape[1], self.text[0].shape[1]
        key = (query.dtype, *heads)
        if key not in self.masks:
            # A finite score, not minus infinity: a branch may see nothing of the text.
            scores = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, hidden_score(query.dtype))
            self.masks[key] = prepare_mask(scores, *heads)
        return self.masks[key]


class Slots(Entries):
    """Keys and values of texts, and of branches whose entries are all read in one pass.

    An entry sees all entries of its branch, also those after it: the slots of a block. Entry n of
    slot k is query k * branches + n.
    """

    def __init__(self, text: KeysAndValues, num_slots: int, masks: Masks | None = None) -> None:
        super().__init__(text, masks=masks)
        self.num_slots = num_slots

    def attend(self, query: Query, visible: Visible, scale: float) -> Query:
        """Attend from all slots to the slots of their branch and to the `visible` text."""
        ((keys, values),) = self.branches
        if not has_kernel(query, self.text[1]):
            return attend_densely(query, self.text, self.branches, visible, scale, num_slots=self.num_slots)
        slots = (entries.chunk(self.num_slots, dim=2) for entries in (keys, values))
        return self._attend_in_two_parts(query, visible, scale, *slots)


def attend_densely(
    query: Query,
    text: KeysAndValues,
    branches: Sequence[KeysAndValues],
    visible: Visible,
    scale: float,
    *,
    num_slots: int = 1,
) -> Query:
    """Compute `Entries.attend` with one mask over the text and all branches.

    With `num_slots`, compute `Slots.attend`.
    """
    keys, values = (torch.cat(tensors, dim=2) for tensors in zip(text, *branches, strict=True))
    num_branches = query.shape[2] // num_slots
    same_branch = torch.eye(num_branches, dtype=torch.bool, device=query.device)
    same_branch = same_branch.repeat(num_slots, len(branches) * num_slots)
    mask = torch.cat([visible, same_branch.expand(len(query), 1, -1, -1)], dim=3)
    if query.shape[1] == keys.shape[1]:
        return scaled_dot_product_attention(query, keys, values, mask, scale=scale)
    return attend_folded(query, keys, values, mask, scale).transpose(1, 2)


class _SplitAttention(torch.autograd.Function):
    """Attention to the text by a fused kernel, and to the branch by plain operations.

    The kernel's backward pass assumes a softmax over exactly the keys that it gets. But it only
    reads the output and the log-sum-exp of each query. With those of text and branch together, it
    returns the text's part of the gradient.

    `own` are the keys of a branch's entries, and then their values. A query sees all of them. There
    may be several queries for each branch: query k * branches + n is one of branch n.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Query, key: Text, value: Text, mask: torch.Tensor, scale: float, num_own: int, *own: torch.Tensor
    ) -> Query:
        # 1. The text, by the kernel.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        text_output, lse = attention(query, key, value, mask, scale)
        # 2. The branch: one score per entry, and the softmax over them and the text's log-sum-exp.
        of_branch = partial(_of_branches, num_kv_heads=key.shape[1], num_branches=own[0].shape[2])
        grouped = of_branch(query)
        scores = [_dot(grouped, keys) * scale for keys in _stacked(own[:num_own], grouped)]
        every = torch.cat([of_branch(lse)[None], *scores])  # [1 + own, batch, kv_head, group, slot, branch]
        log_weights = every.log_softmax(0)
        # The log-sum-exp of all, from an entry that every query sees.
        total = every[-1] - log_weights[-1]
        # 3. The weighted sum of all outputs.
        weights = log_weights.exp().to(query.dtype)[..., None]
        output = of_branch(text_output) * weights[0]
        for weight, values in zip(weights[1:], own[num_own:], strict=True):
            output = torch.addcmul(output, weight, values[:, :, None, None])
        output = output.view_as(query)
        ctx.save_for_backward(query, key, value, mask, output, total.view_as(lse), weights, *own)
        ctx.scale, ctx.num_own, ctx.of_branch = scale, num_own, of_branch
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # 1. The text's part, by the kernel's backward pass with the joint log-sum-exp.
        query, key, value, mask, output, total, weights, *own = ctx.saved_tensors
        grad = grads[0].contiguous()
        query_grad, key_grad, value_grad = attention_gradient(grad, query, key, value, mask, output, total, ctx.scale)
        # 2. The gradient of the branch's scores, by the gradient of softmax.
        grouped, grouped_grad = ctx.of_branch(query), ctx.of_branch(grad)
        probs = weights[1:]  # [own, batch, kv_head, group, slot, branch, 1]
        delta = _dot(grad, output)
        stacked = _stacked(own[ctx.num_own :], grouped)
        by_value = [_dot(grouped_grad, values) for values in stacked]
        from_values = by_value[0] if len(by_value) == 1 else torch.cat(by_value)
        score_grads = (probs[..., 0] * (from_values - ctx.of_branch(delta)) * ctx.scale).to(query.dtype)[..., None]
        # 3. The branch's part.
        query_grad = ctx.of_branch(query_grad)
        for score_grad, keys in zip(score_grads, own[: ctx.num_own], strict=True):
            query_grad = torch.addcmul(query_grad, score_grad, keys[:, :, None, None])
        sizes = [len(values) for values in stacked]
        own_grads = [
            part
            for factors, of_query in ((score_grads, grouped), (probs, grouped_grad))
            for factor in factors.split(sizes)
            for part in (factor * of_query).sum((3, 4))
        ]
        return query_grad.reshape(query.shape), key_grad, value_grad, None, None, None, *own_grads


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the inner products of the last dimension, at least in float32: scores are exponents."""
    return (left * right).sum(-1, dtype=torch.promote_types(left.dtype, torch.float32))


def _of_branches(values: torch.Tensor, *, num_kv_heads: int, num_branches: int) -> torch.Tensor:
    """Divide heads by the key that they share, and queries by their branch.

    [batch, head, query, ...] becomes [batch, kv_head, group, slot, branch, ...].
    """
    return values.unflatten(2, (-1, num_branches)).unflatten(1, (num_kv_heads, -1))


def _stacked(own: Sequence[torch.Tensor], grouped: torch.Tensor) -> list[torch.Tensor]:
    """Stack entries of branches, to multiply many of them with `grouped` queries at a time.

    Each result is [own, batch, kv_head, 1, 1, branch, head_dim]. A product of all queries with all
    slots of a block would be large, so with several queries for each branch fewer are stacked.
    """
    size = max(1, len(own) // grouped.shape[3])
    parts = [own[start : start + size] for start in range(0, len(own), size)]
    stacks = [part[0][None] if len(part) == 1 else torch.stack(list(part)) for part in parts]
    return [stack[:, :, :, None, None] for stack in stacks]
