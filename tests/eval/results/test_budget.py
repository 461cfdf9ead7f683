"""Figures and notes of a target with a memory budget; tables without one stay as they are."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.eval.records.run_files import BudgetFacts, Roofline
from outrider.eval.results.notes import notes
from outrider.eval.results.rows import Row
from outrider.eval.results.tables import cells, csv_table, markdown
from outrider.models.phases import StreamCounts

from ..conftest import MakeRecord, info_of, printed, rows_of

ROOFLINE = Roofline(weight_bytes=2 * 10**9, bandwidth_gbs=0.5, cache_bytes=None, streamed=True)
BUDGET = BudgetFacts(plan="36 layers: 7 stay, 29 stream (9.10 GiB a pass); 3.93 of 4.00 GiB", read_gbs=1.5, peak_bytes=5 << 30)
COUNTS = StreamCounts(
    passes=3,
    bytes_read=6 * 10**9,
    read_seconds=4.0,
    wait_seconds=3.0,
    drafts=2,
    draft_seconds=0.5,
    late_drafts=1,
    late_seconds=0.25,
)


def rows_with(make_record: MakeRecord, streaming: StreamCounts | None, **options: Any) -> list[Row]:
    drafted: dict[str, Any] = {"method": "redrafter", "accepted_histogram": [0, 1], "prefill_seconds": 0.1, **options}
    counts = None if streaming is None else replace(streaming, bytes_read=3 * 10**9)
    records = [make_record(streaming=counts and replace(counts, late_seconds=0.0)), make_record(streaming=streaming, **drafted)]
    return rows_of(records, info=info_of(records, roofline=ROOFLINE), budget=None if streaming is None else BUDGET)


def test_bytes_per_token_count_each_batch_once(make_record: MakeRecord) -> None:
    plain, drafted = rows_with(make_record, COUNTS)
    assert plain["read_gb_per_token"] == 1.0  # 3 GB for three tokens
    assert drafted["read_gb_per_token"] == 2.0
    assert (plain["late_draft_seconds"], drafted["late_draft_seconds"]) == (0.0, 0.25)
    batch: dict[str, Any] = {"batch_size": 2, "num_rows": 2, "streaming": COUNTS}
    records = [make_record(prompt_id=name, **batch) for name in ("81", "82")]
    (row,) = rows_of(records)
    assert row["read_gb_per_token"] == 1.0, "six tokens share the 6 GB of their batch"


def test_tables_show_what_was_read_the_plan_the_rate_and_the_peak(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, COUNTS)
    assert cells(rows[1])["GB/tok"] == "2"
    page, screen = markdown(rows), printed(rows)
    for text in (page, screen.replace("\n    ", " ")):
        assert "GB/tok" in text
        assert "29 stream (9.10 GiB a pass)" in text
        assert "at 1.50 GB/s" in text
        assert "5.00 GiB" in text
    assert max(map(len, screen.splitlines())) <= 80
    lines = notes(rows)
    (roofline,) = (note for note in lines if "2000.0 MB of weights read from files per pass at 0.50 GB/s" in note)
    assert "0.25 tokens/s" in roofline
    assert any("drafts during waits made verification 0.25 s later" in note for note in lines)
    assert "read_gb_per_token" in csv_table(rows).splitlines()[0]


def test_tables_without_a_budget_have_nothing_of_it(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, None)
    assert [row["read_gb_per_token"] for row in rows] == [None, None]
    for text in (markdown(rows), printed(rows)):
        assert "GB/tok" not in text
        assert "udget" not in text


@pytest.mark.parametrize("oom", [False, True])
def test_the_widest_cells_fit_eighty_columns(make_record: MakeRecord, oom: bool) -> None:
    rows = rows_with(make_record, replace(COUNTS, bytes_read=123_456_789_012))
    rows[1]["label"] = "Draft model + Suffix + Recycling, 256 nodes, paced"
    rows[1] |= {"speedup": 12.34, "speedup_ci95": (11.11, 13.33), "noisy": True, "out_of_memory": oom}
    text = printed(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert "GB/tok" in text
