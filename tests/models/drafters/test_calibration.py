"""Calibration: recent text counts most, and scores become probabilities."""

import random
from statistics import mean

import pytest

from outrider.models.drafters.calibration import MAX_PRIOR, MAX_TOTAL, ScoreCalibration, source_key, start_of_text, teach


def test_earlier_texts_weigh_no_more_than_a_text_can_correct():
    key, rare = source_key(0, 1), source_key(1, 2)
    earlier = {key: (900.0, 1000.0), rare: (1.0, 2.0)}
    counts = start_of_text(earlier)
    hits, total = counts[key]
    assert total == MAX_PRIOR
    assert hits / total == pytest.approx(0.9)
    assert counts[rare] == (1.0, 2.0)
    for _ in range(200):
        teach(counts, [key], False)
    hits, total = counts[key]
    assert hits / total < 0.1
    assert total <= MAX_TOTAL + 1
    assert earlier[key] == (900.0, 1000.0), "the text has counts of its own"


def taught(gamma: float, count: int = 4000, depths: tuple[int, ...] = (1, 2)) -> ScoreCalibration:
    """Teach a calibration of a drafter whose score is the probability of acceptance ** gamma."""
    rng, calibration = random.Random(0), ScoreCalibration()
    for _ in range(count):
        acceptance = rng.random()
        calibration.add(rng.choice(depths), acceptance**gamma, rng.random() < acceptance)
    return calibration


@pytest.mark.parametrize("gamma", [1 / 3, 1.0, 3.0])
def test_scores_become_probabilities_of_acceptance(gamma):
    calibration = taught(gamma)
    acceptances = [number / 100 for number in range(5, 100)]
    for depth in (1, 2, 9):
        errors = [calibration.estimate(depth, acceptance**gamma) - acceptance for acceptance in acceptances]
        assert abs(mean(errors)) < 0.02
        assert mean(map(abs, errors)) < 0.07, "the scores themselves are wrong by 0.23 where gamma isn't 1"


def test_scores_are_taken_as_they_are_at_first_and_never_as_certain():
    calibration = ScoreCalibration()
    assert calibration.estimate(1, 0.3) == pytest.approx(0.3)
    assert calibration.estimate(1, 0.0) == 0.0
    assert calibration.estimate(3, 1.0) < 1.0
    for _ in range(100):
        calibration.add(1, 0.95, True)
    assert calibration.estimate(1, 0.95) < 1.0


def test_the_first_depth_has_counts_of_its_own():
    calibration = ScoreCalibration()
    for _ in range(100):
        calibration.add(1, 0.5, False)
        calibration.add(5, 0.5, True)
    assert calibration.estimate(1, 0.5) < 0.1
    assert calibration.estimate(2, 0.5) > 0.9


def test_the_latest_text_counts_most():
    calibration = ScoreCalibration()
    for was_hit in [False] * 2000 + [True] * 1000:
        calibration.add(2, 0.5, was_hit)
    assert calibration.estimate(2, 0.5) > 0.8
