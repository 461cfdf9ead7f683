"""Sources of the tokens in shares and notes."""

from typing import Any

import pytest

from outrider.eval.results.notes import merged_rows, notes, shares_text, source_shares
from outrider.eval.results.rows import Row
from outrider.eval.results.tables import MAX_NOTE_LINES, markdown, note_lines

from ..conftest import MakeRecord, rows_of

COUNTS = {"redrafter": 3, "suffix": 2, "redrafter+suffix": 1}


@pytest.fixture
def rows(make_record: MakeRecord) -> list[Row]:
    """Return rows of plain decoding and of a merged method: 6 accepted tokens and 4 bonus tokens."""
    records = []
    for index in range(10):
        common: dict[str, Any] = {"prompt_id": str(index), "category": "all"}
        drafted = {
            "method": "redrafter+suffix",
            "label": "ReDrafter + Suffix",
            "accepted_histogram": [1, 1, 1, 1],
            "accepted_by": COUNTS,
        }
        plain = {"accepted_histogram": [10]}
        records += [make_record(**common, **plain), make_record(**common, **drafted, pace="expected", decode_seconds=0.5)]
    return rows_of(records)


def test_shares_are_of_all_emitted_tokens_with_the_bonus_tokens_last(rows: list[Row]) -> None:
    shares = {"redrafter": 0.3, "suffix": 0.2, "several": 0.1, "bonus": 0.4}
    assert source_shares(rows[1]) == pytest.approx(shares)
    assert list(source_shares(rows[1]) or {}) == list(shares)
    assert source_shares(rows[1]["by_category"]["all"]) == pytest.approx(shares)
    assert source_shares({"accepted_by": {"suffix": 3}, "num_steps": 1}) == {"suffix": 0.75, "bonus": 0.25}
    assert source_shares({"accepted_by": {"suffix": 0}, "num_steps": 0}) is None
    assert merged_rows(rows) == [rows[1]]


def test_the_table_and_the_terminal_note_the_sources_and_the_pace(rows: list[Row]) -> None:
    text = "ReDrafter 30 %, Suffix 20 %, several 10 %, bonus 40 %"
    assert shares_text(rows[1]) == text
    lines = notes(rows)
    assert [note for note in lines if text in note] == [f"Sources of ReDrafter + Suffix on mt_bench (greedy): {text}."]
    assert sum("depend on the clock" in note for note in lines) == 1
    assert text in markdown(rows)
    assert text in " ".join(" ".join(note_lines(rows, 80)).split())
    # Many merged methods leave room for other notes.
    many = note_lines([*rows, *[rows[1]] * 5], 80)
    assert len(many) <= MAX_NOTE_LINES
    assert max(map(len, many)) <= 80
    fixed: Row = {**rows[1], "pace": "fixed"}
    assert not any("depend on the clock" in note for note in notes([rows[0], fixed]))
