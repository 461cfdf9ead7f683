"""Learning curves, continued: made curves are found again, within their intervals."""

import numpy as np
import pytest

from outrider.eval.forecast.measure import Steps
from outrider.eval.forecast.result import KEPT, NUM_DRAWS, continued, resampled

LABELS = [4_000, 8_000, 16_000]


def made(curve, *, prompts: int = 40, noise: float = 0.1, seed: int = 0) -> list[list[Steps]]:
    """Return answers of 100 steps each, at the tokens per step of a curve; a prompt is as hard in all parts."""
    hard = np.random.default_rng(seed).normal(0, noise, prompts)
    return [[Steps(tokens=round(100 * (curve(labels) + h)), steps=100) for h in hard] for labels in LABELS]


@pytest.mark.parametrize("kept", [KEPT - 0.1, KEPT, KEPT + 0.1])
def test_a_curve_whose_gains_shrink_is_found_again(kept):
    def curve(labels: float) -> float:
        doublings = np.log2(labels / LABELS[0])
        return float(1.4 + 0.1 * (1 - kept**doublings) / (1 - kept))

    at = [32_000.0, 128_000.0]
    draws = continued(LABELS, made(curve), at, seed=0)
    for size, drawn in zip(at, draws, strict=True):
        low, value, high = np.quantile(drawn, (0.05, 0.5, 0.95))
        assert low < curve(size) < high
        assert value == pytest.approx(curve(size), rel=0.06)


def test_intervals_widen_with_the_distance():
    draws = continued(LABELS, made(lambda labels: 1 + 0.1 * np.log2(labels / 1000)), [16_000.0, 32_000.0, 256_000.0], seed=0)
    widths = [float(np.quantile(drawn, 0.95) - np.quantile(drawn, 0.05)) for drawn in draws]
    assert widths[0] < widths[1] < widths[2]


def test_a_size_within_the_parts_is_on_their_line():
    draws = continued(LABELS, made(lambda labels: 1 + 0.1 * np.log2(labels / 1000), noise=0.0), [8_000.0, 16_000.0], seed=0)
    assert np.median(draws, axis=1) == pytest.approx([1.3, 1.4], abs=0.01)


def test_a_curve_that_falls_is_taken_as_flat_and_never_below_plain_decoding():
    draws = continued(LABELS, made(lambda labels: 1.02 - labels / 1e6, noise=0.0), [1e6], seed=0)
    assert np.allclose(draws[0], draws[0][0])
    assert draws.min() >= 1.0


def test_resampling_draws_the_same_prompts_in_all_parts():
    by_part = made(lambda labels: 1 + labels / 16_000)
    drawn = resampled(by_part, seed=0)
    assert drawn.shape == (3, NUM_DRAWS)
    assert np.allclose(drawn[2] - drawn[0], 0.75, atol=0.01)
    assert drawn[0].std() > 0.005
    # Answers of one token have no steps.
    assert np.allclose(resampled([[Steps(tokens=0, steps=0)]], seed=0), 0.0)


@pytest.mark.parametrize("prompts", [6, 8, 16])
def test_intervals_of_few_prompts_hold_what_they_promise(prompts):
    """Prompts of a skewed distribution, as tokens per step are; plain resampling held 80 % with eight of them."""
    held, numbers = 0, np.random.default_rng(3)
    for seed in range(400):
        steps = [Steps(tokens=round(100 * value), steps=100) for value in 1 + numbers.gamma(4.0, 0.2, prompts)]
        low, high = np.quantile(resampled([steps], seed=seed)[0], (0.05, 0.95))
        held += low <= 1.8 <= high
    assert 0.86 < held / 400 < 0.94
