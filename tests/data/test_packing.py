"""Positions of texts in the rows of a batch."""

from collections import Counter

import pytest
import torch

from outrider.data.packing import Layout, packed, padded


def padding(layout: Layout) -> float:
    rows, width = layout.shape
    return 1 - sum(layout.lengths) / (rows * width)


def test_each_text_has_a_row_of_its_own_unless_packed() -> None:
    layout = padded([3, 1, 2])
    placed = layout.place([torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])], 0)
    assert placed.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]


def test_packed_rows_by_eye() -> None:
    """The longest text comes first, and each goes into the row that is shortest so far.

    Two rows cost less than one, since attention in a longer row is more expensive.
    """
    layout = packed([300, 2000, 500, 1500])
    assert layout.shape == (2, 2300)
    assert layout.rows == (0, 0, 1, 1)
    assert layout.columns == (2000, 0, 1500, 0)
    assert padding(layout) < 0.07 < 0.4 < padding(padded([300, 2000, 500, 1500]))


def test_values_keep_their_shape_and_starts_separate_texts_and_padding() -> None:
    layout = Layout(lengths=(2, 1, 2), rows=(0, 0, 1), columns=(0, 2, 0))
    values = [torch.full((length, 2), float(length + index)) for index, length in enumerate(layout.lengths)]
    assert layout.place(values, -1.0)[..., 1].tolist() == [[2, 2, 2], [4, 4, -1]]
    assert layout.starts().tolist() == [[0, 0, 2], [0, 0, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_no_text_is_lost_and_none_overlaps_another(seed: int) -> None:
    lengths = torch.randint(1, 3000, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    layout = packed(lengths)
    taken = Counter(
        (row, column + offset)
        for row, column, length in zip(layout.rows, layout.columns, lengths, strict=True)
        for offset in range(length)
    )
    assert len(taken) == sum(lengths)
    assert set(taken.values()) == {1}
    assert padding(layout) <= padding(padded(lengths))


def test_texts_of_one_length_stay_in_rows_of_their_own() -> None:
    """In one row they would only make attention more expensive."""
    assert packed([512] * 16).shape == (16, 512)
