"""Calibration: its files, what is wrong with damaged ones, and scores that become probabilities."""

import json
import random
from dataclasses import replace
from statistics import mean

import pytest

from outrider.models.drafters.calibration import (
    CALIBRATION_FILE,
    MAX_PRIOR,
    MAX_TOTAL,
    Agreement,
    CalibrationCell,
    Prior,
    ScoreCalibration,
    agreement_key,
    read_prior,
    source_key,
    teach,
    write_prior,
)

from ...tiny_models import IDENTITY

NAMES = ["redrafter", "suffix", "recycling"]
COUNTS = {
    source_key(0, 1) + 5: (3.0, 8.0),
    source_key(2, 9) + 63: (1.0, 2.0),
    agreement_key(0b101, 0b111, 0.9): (20.0, 21.0),
}


def test_a_written_prior_is_read_again(tmp_path):
    write_prior(tmp_path, IDENTITY, Prior.of(COUNTS, NAMES))
    prior = read_prior(tmp_path, replace(IDENTITY, name="the same weights elsewhere"))
    assert prior is not None
    assert prior.counts(NAMES) == COUNTS


def test_a_prior_follows_the_names_of_the_sources():
    """Sources in another order, or some of them, take the same cells along."""
    prior = Prior.of(COUNTS, NAMES)
    counts = prior.counts(["recycling", "suffix", "other", "redrafter"])
    assert counts == {
        source_key(3, 1) + 5: (3.0, 8.0),
        source_key(0, 9) + 63: (1.0, 2.0),
        agreement_key(0b1001, 0b1011, 0.9): (20.0, 21.0),
    }
    assert prior.counts(["suffix", "redrafter"]) == {source_key(1, 1) + 5: (3.0, 8.0)}
    assert Prior.of({}, NAMES).counts(NAMES) == {}


def test_a_prior_weighs_no_more_than_a_text_can_correct():
    counts = Prior.of({source_key(0, 1): (900.0, 1000.0)}, NAMES).counts(NAMES)
    hits, total = counts[source_key(0, 1)]
    assert total == MAX_PRIOR
    assert hits / total == pytest.approx(0.9)
    for _ in range(200):
        teach(counts, [source_key(0, 1)], False)
    hits, total = counts[source_key(0, 1)]
    assert hits / total < 0.1
    assert total <= MAX_TOTAL + 1


def test_new_cells_replace_those_of_the_same_sources():
    cells = [CalibrationCell(depth=1, bin=0, hits=1.0, total=2.0)]
    old = Prior(
        sources={"suffix": cells, "redrafter": cells},
        agreements=[Agreement(proposed_by=["suffix"], present=["suffix", "redrafter"], bin=1, hits=1.0, total=2.0)],
    )
    new = Prior(sources={"suffix": [CalibrationCell(depth=2, bin=3, hits=5.0, total=9.0)]}, agreements=[])
    both = old.updated(new)
    assert both.sources == {"suffix": new.sources["suffix"], "redrafter": old.sources["redrafter"]}
    assert both.agreements == old.agreements
    assert old.updated(replace(new, sources=old.sources)).agreements == []


def test_a_prior_of_another_target_is_an_error_that_names_both(tmp_path):
    write_prior(tmp_path, IDENTITY, Prior.of(COUNTS, NAMES))
    other = replace(IDENTITY, name="another-target", weights_sha256="77")
    with pytest.raises(ValueError, match="its own target only") as error:
        read_prior(tmp_path, other)
    for word in (str(tmp_path / CALIBRATION_FILE), IDENTITY.name, "another-target", "weights_sha256", "delete"):
        assert word in str(error.value)


def test_without_a_file_there_is_no_prior(tmp_path):
    assert read_prior(tmp_path, IDENTITY) is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda text: text[:40], "not valid JSON|JSON"),
        (lambda text: text.replace('"hits"', '"hit"', 1), "hit"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "format 9"),
        (lambda text: text.replace('"hits": 3.0', '"hits": 30.0'), "at most as many hits"),
        (lambda text: text.replace('"depth": 1', '"depth": 7'), "depth"),
        (lambda text: text.replace('"total": 8.0', '"total": NaN'), "JSON|total"),
        (lambda text: text.replace('"proposed_by": ["redrafter"', '"proposed_by": ["gone"'), "gone.*some of those"),
        (lambda text: text.replace('"proposed_by": ["redrafter", "recycling"]', '"proposed_by": []'), "some of those"),
        (lambda text: text.replace('"proposed_by": ["redrafter"', '"proposed_by": ["recycling"'), "recycling is there twice"),
        (lambda text: text.replace('"present": ["redrafter"', '"present": ["redrafter", "suffix"'), "suffix is there twice"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, damage, problem):
    write_prior(tmp_path, IDENTITY, Prior.of(COUNTS, NAMES))
    path = tmp_path / CALIBRATION_FILE
    text = json.dumps(json.loads(path.read_text()))
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ValueError, match=problem) as error:
        read_prior(tmp_path, IDENTITY)
    assert str(path) in str(error.value)
    assert "delete" in str(error.value)


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
