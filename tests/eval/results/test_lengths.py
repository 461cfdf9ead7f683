"""Tokens per step over the length of an answer."""

from pathlib import Path

import pytest

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.results.lengths import by_window, window_name
from outrider.eval.results.plots import plot_windows
from outrider.eval.results.rows import build_rows

from ..conftest import MakeRecord


def test_a_step_counts_in_the_window_of_its_first_token(make_record: MakeRecord) -> None:
    # 31 tokens in the first window: one of the prefill, 10 steps of 3. The step of index 31 begins in the
    # first window and ends in the second.
    steps = [3] * 11 + [1] * 4
    long = make_record(accepted_histogram=[4, 0, 11], step_tokens=steps)
    short = make_record(prompt_id="82", accepted_histogram=[0, 0, 2], step_tokens=[3, 3])
    windows = by_window([long, short])
    assert windows == [
        {"first_token": 0, "num_answers": 2, "num_steps": 13, "tokens_per_step": 3.0},
        {"first_token": 32, "num_answers": 1, "num_steps": 4, "tokens_per_step": 1.0},
    ]
    assert [window_name(window) for window in windows or []] == ["1 to 32", "33 to 64"]


def test_records_of_older_versions_have_no_windows_rather_than_wrong_ones(make_record: MakeRecord) -> None:
    new, old = make_record(step_tokens=[1, 1]), make_record(prompt_id="82")
    assert by_window([new, old]) is None
    assert by_window([]) == []


@pytest.mark.parametrize("steps", [[1], [1, 2], [2]])
def test_steps_that_contradict_the_tokens_are_an_error(make_record: MakeRecord, steps: list[int]) -> None:
    with pytest.raises(ValueError, match="step_tokens has the tokens of each verify step"):
        make_record(accepted_histogram=[2], step_tokens=steps)


def test_a_plot_over_the_length_is_written_for_answers_longer_than_a_window_only(
    make_record: MakeRecord, tmp_path: Path
) -> None:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench")])
    for name, num_steps in (("short", 8), ("long", 40)):
        plain = make_record(accepted_histogram=[2 * num_steps], step_tokens=[1] * 2 * num_steps)
        drafted = make_record(method="redrafter", accepted_histogram=[0, num_steps], step_tokens=[2] * num_steps)
        rows = build_rows([plain, drafted], [], config=config, dtype="float32", roofline=None, num_skipped={}, drafters={})
        assert rows[1].get("by_window") == by_window([drafted])
        plot_windows(rows, tmp_path / f"{name}.png")
    assert not (tmp_path / "short.png").exists()
    assert (tmp_path / "long.png").read_bytes()[:4] == b"\x89PNG"
