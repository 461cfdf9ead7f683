"""Layout of a batch's texts in rows: one per row, or packed to save padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped

ATTENTION_COLUMNS = 4096
"""Row length at which attention costs as much as the rest of a model: about six times its hidden
size.

Packing weighs this cost: attention with a block mask is mostly computed across the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Positions of texts: text n starts at row `rows[n]`, column `columns[n]`.

    Padding follows the last text of a row.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the batch."""
        ends = [column + length for column, length in zip(self.columns, self.lengths, strict=True)]
        return max(self.rows) + 1, max(ends)

    def place(
        self, texts: Sequence[Shaped[torch.Tensor, "_ *rest"]], padding: int | float
    ) -> Shaped[torch.Tensor, "batch seq *rest"]:
        """Return one tensor with the values of all texts, token by token."""
        placed = texts[0].new_full((*self.shape, *texts[0].shape[1:]), padding)
        for row, column, text in zip(self.rows, self.columns, texts, strict=True):
            placed[row, column : column + len(text)] = text
        return placed

    def index(self) -> Int[torch.Tensor, " token"]:
        """Return the index of each text's tokens, text after text, among all batch x seq tokens."""
        width = self.shape[1]
        places = zip(self.rows, self.columns, self.lengths, strict=True)
        return torch.cat([row * width + column + torch.arange(length) for row, column, length in places])

    def starts(self) -> Int[torch.Tensor, "batch seq"]:
        """Return the start column of each token's text; padding counts as one more text."""
        num_rows, _ = self.shape
        used = torch.zeros(num_rows, dtype=torch.long)
        used.index_add_(0, torch.tensor(self.rows), torch.tensor(self.lengths))
        starts = used[:, None].repeat(1, self.shape[1])
        for row, column, length in zip(self.rows, self.columns, self.lengths, strict=True):
            starts[row, column : column + length] = column
        return starts


def padded(lengths: Sequence[int]) -> Layout:
    """Return the layout with one text per row, in order."""
    return Layout(lengths=tuple(lengths), rows=tuple(range(len(lengths))), columns=(0,) * len(lengths))


def packed(lengths: Sequence[int]) -> Layout:
    """Return the packed layout of least cost.

    Each text, the longest first, goes to the row that is shortest so far.

    Example: lengths 300, 2000, 500, 1500 -> two rows, of 2000 + 300 and of 1500 + 500.
    """
    layouts = [_balanced(lengths, num_rows) for num_rows in range(len(lengths), 0, -1)]
    return min(layouts, key=_cost)


def _balanced(lengths: Sequence[int], num_rows: int) -> Layout:
    used = [0] * num_rows
    rows, columns = [0] * len(lengths), [0] * len(lengths)
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        row = used.index(min(used))
        rows[text], columns[text] = row, used[row]
        used[row] += lengths[text]
    return Layout(lengths=tuple(lengths), rows=tuple(rows), columns=tuple(columns))


def _cost(layout: Layout) -> int:
    num_rows, width = layout.shape
    return num_rows * width * (ATTENTION_COLUMNS + width)
