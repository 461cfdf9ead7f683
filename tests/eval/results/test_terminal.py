"""The table in the terminal: 80 columns and a few lines of notes, whatever was measured."""

from typing import Any, cast

import pytest

from outrider.eval.results.rows import Row
from outrider.eval.results.tables import MAX_NOTE_LINES, note_lines

from ..conftest import MakeRecord, printed, rows_of

LABELS = [
    "ReDrafter, 4 beams of 3, 5 nodes",
    "ReDrafter (the_name_of_a_folder_without_any_space_and_of_many_characters), 16 beams of 5, 40 nodes, tuned",
    "ReDrafter + Suffix + Recycling, 40 nodes, paced",
    "x" * 200,
]


@pytest.fixture
def rows(make_record: MakeRecord) -> list[Row]:
    """Return rows of plain decoding and of four methods, over sixteen prompts."""
    methods = {"baseline": "plain decoding", **{str(index): label for index, label in enumerate(LABELS)}}
    records = [
        make_record(prompt_id=str(index), method=method, label=label)
        for index in range(16)
        for method, label in methods.items()
    ]
    return rows_of(records)


def changed(rows: list[Row], *changes: dict[str, Any]) -> list[Row]:
    return [cast("Row", {**row, **change}) for row, change in zip(rows, changes, strict=True)]


def notes_of(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    blank = max(index for index, line in enumerate(lines) if not line.strip())
    return lines[blank + 1 :]


@pytest.mark.parametrize("suite", ["stdlib", "a_suite_with_a_very_long_name_of_a_file_without_any_space"])
def test_the_longest_names_fit_eighty_columns(rows: list[Row], suite: str) -> None:
    worst: dict[str, Any] = {
        "tokens_per_step": 10.25,
        "tokens_per_second": 12345.6,
        "speedup": 10.25,
        "speedup_ci95": (10.12, 11.34),
        "lossless_label": "NO (30 of 30 prompts)",
        "noisy": True,
        "suite": suite,
    }
    text = printed(changed(rows, {"suite": suite}, *[worst] * 4))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.split("─\n")[1].count(" 10.25x [10.12, 11.34] ") == 4
    assert "noisy" in text
    assert text.count("  Identical\n") == 1, "a column's name is never folded"
    assert len(notes_of(text)) <= MAX_NOTE_LINES


def test_the_most_important_notes_come_first(rows: list[Row]) -> None:
    first = {"prompt_id": "3", "turn": 0, "position": 7}
    wrong = {"speedup": None, "lossless": False, "num_mismatched_prompts": 1, "first_mismatch": first}
    lines = note_lines(changed(rows, {"num_skipped": 3}, wrong, {"noisy": True}, {"num_loops": 16}, {}), 300)
    starts = [" ".join(line.split()[:1]) for line in lines if not line.startswith("    ")]
    assert "NOT LOSSLESS, so it has no speedup" in lines[0]
    assert starts[1:] == ["noisy:", "3", "Loops:", "mt_bench,", "table.md"]
    short = notes_of(printed(changed(rows, {"num_skipped": 3}, wrong, {"noisy": True}, {"num_loops": 16}, {})))
    assert len(short) <= MAX_NOTE_LINES
    assert max(map(len, short)) <= 80


def test_a_narrow_terminal_loses_no_column(rows: list[Row]) -> None:
    lines = printed(rows, width=60).splitlines()
    (head,) = [line for line in lines if line.split()[:1] == ["Method"]]
    assert head.split() == ["Method", "Tok/step", "Tok/s", "Speedup", "[95", "%]", "Identical"]
