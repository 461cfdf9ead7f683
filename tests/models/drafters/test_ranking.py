"""The selection of the largest values, against torch's `topk`."""

import pytest
import torch

from outrider.models.drafters.beams import BLOCK_SIZE, MIN_VALUES, largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_values", [1, 63, MIN_VALUES - 1, MIN_VALUES, MIN_VALUES + 1, 3 * MIN_VALUES - 5])
def test_the_largest_values_are_those_of_topk(num_values: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(num_values)
    rows = [torch.randperm(num_values, generator=generator) for _ in range(6)]  # no two are equal
    values = torch.stack(rows).unflatten(0, (2, 3)).to(dtype)
    for count in {min(count, num_values) for count in (1, 4, 70, MIN_VALUES // BLOCK_SIZE, MIN_VALUES)}:
        top, index = largest(values, count)
        expected = values.topk(count, dim=-1)
        assert torch.equal(top, expected.values)
        assert torch.equal(index, expected.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [0, 7, -1])
def test_values_that_share_a_block_are_all_found(block: int, dtype: torch.dtype):
    num_blocks = -(-(MIN_VALUES + 10) // BLOCK_SIZE)
    values = torch.full((1, MIN_VALUES + 10), -1.0, dtype=dtype)
    places = block % num_blocks + num_blocks * torch.arange(BLOCK_SIZE - 6, BLOCK_SIZE - 1)
    values[0, places] = torch.arange(1.0, 6.0, dtype=dtype)
    assert largest(values, len(places))[1].tolist() == [places.flip(0).tolist()]


def test_padding_of_the_last_block_is_never_chosen():
    values = torch.full((1, MIN_VALUES + 1), -1e30)
    top, index = largest(values, 5)
    assert (top == -1e30).all()
    assert index.max() <= MIN_VALUES


def test_equal_values_give_different_indexes():
    index = largest(torch.zeros(1, 2 * MIN_VALUES), 100)[1]
    assert len(index.unique()) == 100
