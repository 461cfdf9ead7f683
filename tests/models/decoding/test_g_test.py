"""The G-test: its rate of false alarms is as stated, and it detects small shifts."""

import numpy as np
import pytest
import torch

from ...g_tests import g_test

UNEVEN = torch.tensor([0.5**rank for rank in range(1, 28)], dtype=torch.float64)
DISTRIBUTIONS = {
    "even": torch.full((27,), 1 / 27, dtype=torch.float64),
    "uneven": UNEVEN / UNEVEN.sum(),
    "many cells": (2 * torch.randn(243, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).softmax(0),
    "two cells": torch.tensor([0.01, 0.99], dtype=torch.float64),
}
NUM_SAMPLES, NUM_SOUND = 3000, 10_000


def multinomial(probs: torch.Tensor, num_samples: int, times: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).multinomial(num_samples, probs.numpy(), size=times))


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_false_alarms_are_as_rare_as_stated(name):
    probs = DISTRIBUTIONS[name]
    values = torch.tensor([g_test(counts, probs) for counts in multinomial(probs, NUM_SAMPLES, NUM_SOUND)])
    for rate in (0.5, 0.1, 0.01, 0.001):
        share, deviation = float((values < rate).double().mean()), (rate * (1 - rate) / NUM_SOUND) ** 0.5
        assert share < 1.1 * rate + 4 * deviation
        # Two cells have so few outcomes that p-values lie far apart.
        assert share > 0.9 * rate - 4 * deviation or name == "two cells"


def test_small_shifts_are_detected():
    """1.5% of all probability in the wrong cells is always detected, and 0.5% hardly ever: not in these 50 draws.

    This holds for 100,000 samples of 27 even cells at a false-alarm rate of 1e-6.
    """
    detected = {}
    for shift in (0.005, 0.015):
        shifted = DISTRIBUTIONS["even"].clone()
        shifted[:9] += shift / 9
        shifted[9:18] -= shift / 9
        detected[shift] = [g_test(counts, DISTRIBUTIONS["even"]) < 1e-6 for counts in multinomial(shifted, 100_000, 50, seed=1)]
    assert all(detected[0.015])
    assert not any(detected[0.005])


def test_an_impossible_count_has_p_value_zero():
    assert g_test(torch.tensor([999, 1]), torch.tensor([1.0, 0.0], dtype=torch.float64)) == 0.0


def test_a_distribution_of_one_cell_has_nothing_to_test():
    assert g_test(torch.tensor([10, 0]), torch.tensor([1.0, 0.0], dtype=torch.float64)) == 1.0


def test_rare_cells_are_judged_together():
    probs = torch.tensor([0.9, *[0.001] * 100], dtype=torch.float64)
    counts = torch.tensor([900, 100, *[0] * 99])  # one is expected in each of the rare cells
    assert g_test(counts, probs) == pytest.approx(1.0)
