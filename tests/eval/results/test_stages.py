"""Figures and notes of a target in stages; tables without stages stay as they are."""

from typing import Any

from outrider.eval.results.notes import notes
from outrider.eval.results.rows import Row
from outrider.eval.results.tables import cells, csv_table, markdown
from outrider.models.phases import RunCounts

from ..conftest import ROOFLINE, MakeRecord, info_of, printed, rows_of

PLAIN = RunCounts(num_runs=2, num_entries=2)
COUNTS = RunCounts(num_runs=20, num_entries=50, num_cancelled=8, num_cancelled_entries=15)


def rows_with(make_record: MakeRecord, layers: list[int] | None) -> list[Row]:
    """Return rows of plain decoding, of a drafter that waits, and of the same without waiting."""
    names = ["draft_model", *([] if layers is None else ["draft_model pipelined"])]
    drafted: dict[str, Any] = {"accepted_histogram": [1, 1], "token_ids": [0, 1, 2, 0]}
    records = [make_record(token_ids=[0, 1, 2, 0], accepted_histogram=[3], runs=None if layers is None else PLAIN)]
    records += [
        make_record(method=name, runs=None if layers is None else COUNTS, decode_seconds=0.05, prefill_seconds=0.01, **drafted)
        for name in names
    ]
    target = {} if layers is None else {"stage_layers": layers}
    methods = {"draft_model": {}, "draft_model pipelined": {"decode": "pipelined"}}
    return rows_of(records, info=info_of(records, roofline=ROOFLINE if layers is None else None, methods=methods, **target))


def test_a_pipelined_method_has_no_ceiling_and_no_split(make_record: MakeRecord) -> None:
    plain, waiting, pipelined = rows_with(make_record, [4, 4])
    assert waiting["speedup"] == pipelined["speedup"]
    assert [row["pipelined"] for row in (plain, waiting, pipelined)] == [False, False, True]
    assert (pipelined["ceiling"], pipelined["time_split"], pipelined["rho"]) == (None, None, None)


def test_a_target_in_stages_has_no_roofline_and_no_processor_times(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, [4, 4])
    for row in rows:
        assert (row["roofline"], row["roofline_fraction"], row["processor_seconds_per_token"]) == (None, None, None)
        assert cells(row)["Of roofline"] == cells(row)["CPU ms/tok"] == "-"
    assert not any("Roofline" in note for note in notes(rows))


def test_tables_show_the_stages_and_what_was_cancelled(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, [3, 5])
    assert rows[2]["runs"] == {"num_runs": 20, "num_entries": 50, "num_cancelled": 8, "num_cancelled_entries": 15}
    page, screen = markdown(rows), printed(rows)
    for text in (page, screen.replace("\n    ", " ")):
        assert "8 layers ran in 2 processes (3, 5)" in text
        assert "several passes are under way" in text.lower()
    assert "20 passes of 2.5 tokens on average; 30% of these tokens were cancelled" in page
    assert max(map(len, screen.splitlines())) <= 80
    header, *lines = csv_table(rows).splitlines()
    values = dict(zip(header.split(","), lines[2].split('"')[-1].split(","), strict=False))
    assert header.split(",").count("num_cancelled_entries") == 1
    assert lines[2].endswith("20,50,8,15"), values


def test_tables_without_stages_have_nothing_of_them(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, None)
    assert [row["stage_layers"] for row in rows] == [None, None]
    assert any("Roofline" in note for note in notes(rows))
    for text in (markdown(rows), printed(rows)):
        assert "tages" not in text
        assert "ipelined" not in text
