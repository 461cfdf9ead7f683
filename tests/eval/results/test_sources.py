"""Sources of the tokens in shares and notes."""

from typing import Any

import pytest

from outrider.eval.results.notes import notes, source_shares
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
    assert source_shares(rows[1]) == "ReDrafter 30 %, Suffix 20 %, several 10 %, bonus 40 %"
    alone: Row = {**rows[1], "accepted_by": {"suffix": 120}}
    assert source_shares(alone) == "Suffix 75 %, bonus 25 %"
    nothing: Row = {**alone, "accepted_by": {"suffix": 0}, "accepted_histogram": []}
    assert [source_shares(row) for row in (rows[0], nothing)] == ["", ""]


def test_the_table_and_the_terminal_note_the_sources_and_the_pace(rows: list[Row]) -> None:
    text = "ReDrafter 30 %, Suffix 20 %, several 10 %, bonus 40 %"
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
