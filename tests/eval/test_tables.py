"""What a reader is told: rows, table, notes and plot."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.lossless import Mismatch
from outrider.eval.plots import plot_suite
from outrider.eval.records import EvalRecord
from outrider.eval.roofline import Roofline
from outrider.eval.rows import Row, build_rows, is_broken
from outrider.eval.tables import cells, footnotes, markdown, print_table
from outrider.models.decoding.types import PhaseSeconds

from .conftest import MakeRecord

ROOFLINE = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None)


@pytest.fixture
def records(make_record: MakeRecord) -> list[EvalRecord]:
    """Two prompts of two categories; the drafter takes half the baseline's time and emits two tokens a step."""
    result = []
    for prompt, category in (("81", "writing"), ("82", "math")):
        common: dict[str, Any] = {"prompt_id": prompt, "category": category}
        drafted = {**common, "method": "redrafter", "accepted_histogram": [0, 1], "num_draft_tokens": 4}
        result += [
            make_record(**common),
            make_record(**drafted, prefill_seconds=0.25, decode_seconds=0.25, truncated=True),
            make_record(**common, phase_seconds=PhaseSeconds(draft=0.0, verify=0.5, accept=0.1)),
            make_record(**drafted, decode_seconds=0.5, phase_seconds=PhaseSeconds(draft=0.25, verify=0.125, accept=0.1)),
        ]
    return result


def rows_of(records: list[EvalRecord], mismatches: list[Mismatch], **changes: Any) -> list[Row]:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench")])
    options: dict[str, Any] = {"config": config, "dtype": "float32", "roofline": ROOFLINE, "num_skipped": {"mt_bench": 0}}
    return build_rows(records, mismatches, **{**options, **changes})


def test_rows_hold_the_timed_records_numbers_and_split_the_profiled_ones(records: list[EvalRecord]) -> None:
    plain, drafted = rows_of(records, [])
    assert (plain["method"], drafted["method"]) == ("baseline", "redrafter")
    assert (plain["speedup"], plain["speedup_ci95"], plain["ceiling"]) == (1.0, None, None)
    assert drafted["speedup"] == pytest.approx(2.0)
    assert drafted["speedup_ci95"] == (pytest.approx(2.0), pytest.approx(2.0))
    assert drafted["tokens_per_step"] == 2.0
    assert drafted["draft_tokens_per_step"] == 4.0
    assert drafted["accepted_histogram"] == [0, 2]
    assert drafted["tokens_per_second"] == 6 / 1.0
    # Plain: 0.75 s over two steps. Drafter: 0.25 s over one step. rho = 0.25 / 0.375.
    assert drafted["rho"] == pytest.approx(2 / 3)
    assert drafted["ceiling"] == pytest.approx(2.0 / (1 + 2 / 3))
    assert drafted["time_split"] == pytest.approx({"draft": 0.5, "verify": 0.25, "accept": 0.2, "rest": 0.05})
    # 20 GB/s over 1 GB are 20 tokens/s; plain decoding makes 2 tokens in 0.75 s.
    assert plain["roofline_fraction"] == pytest.approx(2 / 0.75 / 20)
    assert (drafted["num_prompts"], drafted["num_turns"], drafted["num_truncated"]) == (2, 2, 2)
    assert drafted["lossless"] is True
    json.dumps([plain, drafted], allow_nan=False)


def test_a_wrong_answer_has_no_speedup_anywhere(records: list[EvalRecord], tmp_path: Path) -> None:
    wrong = Mismatch(record=records[5], position=1)  # the drafter's answer to prompt 82
    plain, drafted = rows_of(records, [wrong])
    assert is_broken(drafted)
    assert not is_broken(plain)
    assert drafted["lossless"] is False
    assert cells(drafted)["Lossless"] == "NO (1 of 2 prompts)"
    assert cells(drafted)["Speedup [95 %]"] == "-"
    assert [values["speedup"] for values in drafted["by_category"].values()] == [None, None]
    assert drafted["first_mismatch"] == {"prompt_id": "82", "turn": 0, "position": 1}
    assert any("prompt 82, turn 1, token 1" in note and "NOT LOSSLESS" in note for note in footnotes([plain, drafted]))
    plot_suite([plain, drafted], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_differences_within_low_precision_noise_keep_the_speedup_and_are_told(records: list[EvalRecord]) -> None:
    noisy = Mismatch(record=records[5], position=1, within_noise=True)
    plain, drafted = rows_of(records, [noisy], dtype="bfloat16")
    assert drafted["speedup"] == pytest.approx(2.0)
    assert drafted["lossless"] is False
    assert drafted["lossless_label"] == "within noise (1)"
    assert any("within this precision's own noise" in note for note in footnotes([plain, drafted]))


def test_one_unexplained_answer_outweighs_the_explained_ones_of_its_prompt(records: list[EvalRecord]) -> None:
    noisy = Mismatch(record=records[5], position=1, within_noise=True)
    wrong = Mismatch(record=records[7], position=0)
    drafted = rows_of(records, [noisy, wrong])[1]
    assert drafted["lossless_label"] == "NO (1 of 2 prompts)"
    assert drafted["num_within_noise"] == 0
    assert drafted["first_mismatch"] == {"prompt_id": "82", "turn": 0, "position": 0}


def test_skipped_turns_are_told(records: list[EvalRecord]) -> None:
    rows = rows_of(records, [], num_skipped={"mt_bench": 3})
    assert rows[0]["num_skipped"] == 3
    assert any("3 turns were SKIPPED" in note for note in footnotes(rows))


def test_markdown_has_one_line_per_row_of_as_many_cells_as_the_head(records: list[EvalRecord]) -> None:
    lines = [line for line in markdown(rows_of(records, [])).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2
    assert {line.count("|") for line in lines} == {13}
    assert lines[3].startswith("| mt_bench | redrafter | 2.00 | 6.0 | 2.00x [2.00, 2.00] | 1.20x | yes | 50% |")


def test_the_terminal_table_fits_eighty_columns_and_shows_brackets(records: list[EvalRecord]) -> None:
    rows = rows_of(records, [])
    rows[1]["method"] = "redrafter beam_width=16 beam_length=5"
    screen = StringIO()
    print_table(rows, Console(width=80, file=screen))
    text = screen.getvalue()
    assert "2.00x [2.00, 2.00]" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_a_roofline_of_weights_that_fit_the_cache_says_so(records: list[EvalRecord]) -> None:
    cached = Roofline(weight_bytes=10**7, bandwidth_gbs=20.0, given=False, cache_bytes=2**25)
    assert cached.tokens_per_second == 2000.0
    assert any("fit into the cache (34 MB)" in note for note in footnotes(rows_of(records, [], roofline=cached)))
    assert not any("cache" in note for note in footnotes(rows_of(records, [])))


def test_a_plot_is_a_png_and_the_baseline_alone_makes_none(records: list[EvalRecord], tmp_path: Path) -> None:
    rows = rows_of(records, [])
    plot_suite(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plot_suite(rows[:1], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
