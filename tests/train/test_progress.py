"""The estimated end of training, and its progress bar."""

import re

import pytest

from outrider.train.progress import RECENT, Clock, Progress

RECORD = {"seconds": 0.0, "tokens_per_second": 12345.6, "loss": 2.345, "tokens_per_step_estimate": 1.987}


def test_neither_a_resume_nor_a_measurement_distorts_the_estimate() -> None:
    clock = Clock(num_steps=1000, measure_every=200)
    # The run was slow until step 500, where it resumed. Since then a step takes 0.5 s, without
    # measurements.
    clock.tick(500, 4000.0)
    assert clock.seconds_left(60.0) is None
    clock.tick(520, 4010.0)
    assert clock.seconds_left(0.0) == pytest.approx(480 * 0.5)
    assert clock.seconds_left(60.0) == pytest.approx(480 * 0.5 + 3 * 60), "at 600, 800 and 1000"
    clock.tick(1000, 4250.0)
    assert clock.seconds_left(60.0) == 0


def test_a_measurement_at_the_end_counts_if_it_is_a_separate_one() -> None:
    clock = Clock(num_steps=1000, measure_every=300)
    clock.tick(0, 0.0)
    clock.tick(500, 500.0)
    assert clock.seconds_left(10.0) == pytest.approx(500 + 30), "at 600, 900 and 1000"
    assert Clock(num_steps=9, measure_every=None)._measure_every is None


def test_the_speed_is_that_of_the_last_records() -> None:
    clock = Clock(num_steps=10_000, measure_every=None)
    for record in range(RECENT):
        clock.tick(record, 100.0 * record)
    for record in range(RECENT + 1):
        clock.tick(RECENT + record, 100.0 * RECENT + record)
    assert clock.seconds_left(0.0) == pytest.approx(10_000 - 2 * RECENT)


def test_the_bar_shows_the_whole_run_with_the_measured_beside_the_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(num_steps=100, measure_every=None)
    with Progress(clock, num_steps=100, start=40, seconds=80.0, active=True) as progress:
        progress.step()
        progress.show(41, {**RECORD, "seconds": 82.0}, (40, 1.765), measurement_seconds=0.0)
    shown = capsys.readouterr().err
    assert "41/100" in shown
    assert re.search(
        r"01:58 left, ends .*\d\d:\d\d, 12,346 tokens/s, loss 2\.35, "
        r"tokens per step 1\.99 estimated, 1\.76 measured at step 40",
        shown,
    )


def test_other_processes_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(Clock(num_steps=9, measure_every=None), num_steps=9, start=0, seconds=0.0, active=False) as progress:
        progress.step()
        progress.show(1, RECORD, None, measurement_seconds=0.0)
    assert capsys.readouterr().err == ""
