"""Sources of the tokens in shares and notes."""

from typing import Any

import pytest

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.records.run_files import Roofline
from outrider.eval.results.rows import Row, build_rows
from outrider.eval.results.sources import merged_rows, shares_text, source_shares
from outrider.eval.results.tables import footnotes, markdown
from outrider.eval.results.terminal import note_lines

from ..conftest import MakeRecord

COUNTS = {"redrafter": 3, "suffix": 2, "redrafter+suffix": 1}


@pytest.fixture
def rows(make_record: MakeRecord) -> list[Row]:
    """Return rows of plain decoding and of a merged method: 6 accepted tokens and 4 bonus tokens."""
    records = []
    for index in range(10):
        common: dict[str, Any] = {"prompt_id": str(index), "category": "all"}
        drafted = {"method": "redrafter+suffix", "accepted_histogram": [1, 1, 1, 1], "accepted_by": COUNTS}
        plain = {"accepted_histogram": [10]}
        records += [make_record(**common, **plain), make_record(**common, **drafted, pace="expected", decode_seconds=0.5)]
    roofline = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None)
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench")])
    return build_rows(records, [], config=config, dtype="float32", roofline=roofline, num_skipped={}, drafters={})


def test_shares_are_of_all_emitted_tokens_with_the_bonus_tokens_last(rows: list[Row]) -> None:
    shares = {"redrafter": 0.3, "suffix": 0.2, "several": 0.1, "bonus": 0.4}
    assert source_shares(rows[1]) == pytest.approx(shares)
    assert list(source_shares(rows[1]) or {}) == list(shares)
    assert source_shares(rows[1]["by_category"]["all"]) == pytest.approx(shares)
    assert source_shares({"accepted_by": {"suffix": 3}, "num_steps": 1}) == {"suffix": 0.75, "bonus": 0.25}
    assert source_shares({"accepted_by": {"suffix": 0}, "num_steps": 0}) is None
    assert merged_rows(rows) == [rows[1]]


def test_rows_of_older_versions_have_no_shares(rows: list[Row]) -> None:
    old: Any = {name: value for name, value in rows[0].items() if name not in ("accepted_by", "pace")}
    assert source_shares(old) is None
    category = {"num_prompts": 1, "tokens_per_step": 2.0, "speedup": None, "speedup_ci95": None}
    assert source_shares(category) is None
    assert not any("Sources" in note or "pace" in note for note in footnotes([old]))


def test_the_table_and_the_terminal_note_the_sources_and_the_pace(rows: list[Row]) -> None:
    text = "ReDrafter 30 %, Suffix 20 %, several 10 %, bonus 40 %"
    assert shares_text(rows[1]) == text
    notes = footnotes(rows)
    assert [note for note in notes if text in note] == [f"Sources of ReDrafter + Suffix on mt_bench (greedy): {text}."]
    assert sum("depend on the clock" in note for note in notes) == 1
    assert text in markdown(rows)
    assert text in " ".join(" ".join(note_lines(rows, 80)).split())
    # Many merged methods leave room for other notes.
    many = note_lines([*rows, *[rows[1]] * 5], 80)
    assert len(many) <= 6
    assert max(map(len, many)) <= 80
    fixed: Row = {**rows[1], "pace": "fixed"}
    assert not any("depend on the clock" in note for note in footnotes([rows[0], fixed]))
