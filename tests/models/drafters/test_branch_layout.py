"""Attention masks of the entries of branches."""

import torch

from outrider.data.types import UNKNOWN, DrafterBatch
from outrider.models.drafters.branches import Branches
from outrider.models.drafters.labels import Labels


def test_branches_see_the_text_before_them_and_themselves():
    positions = torch.tensor([[True, False, True, False], [False, True, False, False]])
    batch = DrafterBatch(
        input_ids=torch.zeros(2, 4, dtype=torch.long),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        positions=positions,
        continuations=torch.full((2, 4, 3), UNKNOWN),
    )
    branches = Branches.of(batch, Labels.of(batch).positions)
    assert branches.columns.tolist() == [[0, 2], [1, 0]]
    assert branches.index.tolist() == [0, 1, 2], "the last branch of the second row is padding"
    values = torch.tensor([[5.0], [6.0], [7.0]])
    assert branches.spread(values)[..., 0].tolist() == [[5.0, 6.0], [7.0, 0.0]]
    assert torch.equal(branches.collect(branches.spread(values)), values)
    assert branches.text_mask(with_own_column=True).int().tolist() == [
        [[[1, 0, 0, 0], [1, 1, 1, 0]]],
        [[[1, 1, 0, 0], [1, 0, 0, 0]]],
    ]
    assert branches.text_mask(with_own_column=False).int().tolist() == [
        [[[0, 0, 0, 0], [1, 1, 0, 0]]],
        [[[1, 0, 0, 0], [0, 0, 0, 0]]],
    ]
    # Columns a b c d, then the entries of depth 0 of both branches, then those of depth 1.
    assert branches.whole_mask(2)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 1],
    ]


def test_branches_see_nothing_of_another_text_in_their_row():
    starts = torch.tensor([[0, 0, 2, 2, 4]])
    batch = DrafterBatch(
        input_ids=torch.zeros(1, 5, dtype=torch.long),
        attention_mask=torch.tensor([[True] * 4 + [False]]),
        positions=torch.tensor([[False, True, True, True, False]]),
        continuations=torch.full((1, 5, 3), UNKNOWN),
        starts=starts,
    )
    branches = Branches.of(batch, Labels.of(batch).positions)
    assert branches.positions.tolist() == [[1, 0, 1]]
    assert branches.text_mask(with_own_column=True)[0, 0].int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]
    assert branches.whole_mask(1)[0, 0, 3].int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
