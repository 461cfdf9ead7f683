"""Random numbers that are hashes of a key and an index."""

import pytest
import torch
from scipy import stats

from outrider.models.decoding.sampling import _mixed, exponential, stream_keys, uniform

ALPHA = 1e-4
FULL = 2**64
KEYS = [8777449547987942575, -7386982551912400204]
FIRST_NUMBERS = [[2446516076454351, 4449531782869692], [2185386056538447, 3086859289586616]]
"""Of the first version; a change of them changes every sampled text."""


def mixed_in_python(bits: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ bits >> 33) * factor % FULL
    return bits ^ bits >> 33


def signed(bits: int) -> int:
    return bits - FULL if bits >= FULL // 2 else bits


@pytest.mark.parametrize("bits", [0, 1, 2**33, 2**63, FULL - 1, 0x0123456789ABCDEF])
def test_the_hash_is_the_one_of_unsigned_integers(bits: int) -> None:
    """A shift of a negative number fills up with ones, and a device may do something else."""
    assert _mixed(torch.tensor([signed(bits)])).tolist() == [signed(mixed_in_python(bits))]


def test_the_numbers_of_a_seed_never_change() -> None:
    """Texts that were sampled with a seed could not be sampled again."""
    keys = stream_keys(torch.tensor([0, 7]), torch.tensor([0, 3]))
    assert keys.tolist() == KEYS
    assert (uniform(keys, 2) * 2**52).long().tolist() == FIRST_NUMBERS


def test_a_stream_depends_on_its_key_and_a_number_on_its_index_alone() -> None:
    keys = stream_keys(torch.arange(5)[:, None], torch.arange(3))
    numbers = uniform(keys, 40)
    assert torch.equal(uniform(keys[2:, :1], 7), numbers[2:, :1, :7])
    assert len(numbers.unique()) == numbers.numel()


def test_numbers_are_uniform_and_independent_of_neighbours_in_every_direction() -> None:
    numbers = uniform(stream_keys(torch.arange(60)[:, None], torch.arange(50)), 100)
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > ALPHA
    cells = (numbers * 8).long()
    for dim in range(3):
        size = numbers.shape[dim] - 1
        pairs = cells.narrow(dim, 0, size) * 8 + cells.narrow(dim, 1, size)
        assert stats.chisquare(pairs.flatten().bincount(minlength=64).numpy()).pvalue > ALPHA


def test_numbers_are_never_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of 0 would always ring first, and a coin of probability 1 could fail."""
    for bits in (0, -1):
        monkeypatch.setattr("outrider.models.decoding.sampling._mixed", lambda x, bits=bits: torch.full_like(x, bits))
        numbers = uniform(torch.zeros(1, dtype=torch.long), 3)
        assert bool(((numbers > 0) & (numbers < 1)).all())
        assert bool((exponential(torch.zeros(1, dtype=torch.long), 3).float() > 0).all())
