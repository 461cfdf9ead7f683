"""Figures and notes of a target in stages; tables without stages stay as they are."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from outrider.eval.records.records import EvalRecord, Runs
from outrider.eval.records.run_files import RECORDED_OPTIONS, DrafterFacts, Environment, Facts, Roofline, RunInfo
from outrider.eval.results.finished import rows_of
from outrider.eval.results.rows import Row
from outrider.eval.results.table_files import csv_table, latex_table
from outrider.eval.results.tables import cells, footnotes, markdown
from outrider.eval.results.terminal import print_table

from ..conftest import MakeRecord

PLAIN = Runs(num_runs=2, num_entries=2, num_cancelled=0, num_cancelled_entries=0)
COUNTS = Runs(num_runs=20, num_entries=50, num_cancelled=8, num_cancelled_entries=15)
ENVIRONMENT = Environment(
    python="3.11", packages={}, system="Linux", cpu="c", num_cpus=2, num_threads=1, device="cpu", git_hash=None
)
ROOFLINE = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None)
SETTING = {"length": 4, "top_k": 1}


def rows_with(make_record: MakeRecord, layers: list[int] | None) -> list[Row]:
    """Return rows of plain decoding, of a drafter that waits, and of the same without waiting."""
    config: dict[str, Any] = {"max_new_tokens": 8, "temperatures": [0.0], "batch_sizes": [1], "repeats": 1, "seed": 0}
    target = {"dtype": "torch.float32", **({} if layers is None else {"stage_layers": layers})}
    method = {"config": {"pace": "fixed", **SETTING}, "setting": SETTING, "weights": "w"}
    keys = ["draft_model length=4 top_k=1", "draft_model pipelined length=4 top_k=1"]
    methods = {keys[0]: method, keys[1]: {**method, "decode": "pipelined"}}
    info = RunInfo(
        config={**dict.fromkeys(RECORDED_OPTIONS), **config, "suites": {"mt_bench": "r"}, "target": target, "methods": methods},
        environment=ENVIRONMENT,
        roofline=ROOFLINE if layers is None else None,
    )
    drafted: dict[str, Any] = {"accepted_histogram": [1, 1], "token_ids": [0, 1, 2, 0]}
    names = [] if layers is None else [keys[1]]
    records = [make_record(token_ids=[0, 1, 2, 0], accepted_histogram=[3], runs=None if layers is None else PLAIN)]
    records += [
        make_record(method=key, runs=None if layers is None else COUNTS, decode_seconds=0.05, prefill_seconds=0.01, **drafted)
        for key in [keys[0], *names]
    ]
    if layers is not None:
        records = [replace(record, processor_seconds=None) for record in records]
    drafters = {key: DrafterFacts(parameters=1, training=None) for key in methods}
    facts = Facts(drafters=drafters, num_turns={"mt_bench": 1}, audits={}, out_of_memory=[], without_profile=[], unaudited=[])
    return rows_of(records, info, facts)


def printed(rows: list[Row]) -> str:
    screen = StringIO()
    print_table(rows, Console(width=80, file=screen))
    return screen.getvalue()


def test_a_pipelined_method_may_be_faster_than_its_tokens_per_step(make_record: MakeRecord) -> None:
    plain, waiting, pipelined = rows_with(make_record, [4, 4])
    assert [row["name"] for row in (plain, waiting, pipelined)] == [
        "plain decoding",
        "Draft model, length 4, top-k 1",
        "Draft model, pipelined",
    ]
    assert waiting["speedup"] == pipelined["speedup"]
    assert (waiting["exceeds"], pipelined["exceeds"]) == ("tokens per step", "")
    assert [row["pipelined"] for row in (plain, waiting, pipelined)] == [False, False, True]
    assert (pipelined["ceiling"], pipelined["time_split"], pipelined["rho"]) == (None, None, None)


def test_a_target_in_stages_has_no_roofline_and_no_processor_times(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, [4, 4])
    for row in rows:
        assert (row["roofline"], row["roofline_fraction"], row["processor_seconds_per_token"]) == (None, None, None)
        assert cells(row)["Of roofline"] == cells(row)["CPU ms/tok"] == "-"
    assert not any("Roofline" in note for note in footnotes(rows))


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
    assert "pipelined" in latex_table(rows)


def test_tables_without_stages_have_nothing_of_them(make_record: MakeRecord) -> None:
    rows = rows_with(make_record, None)
    assert [row["stage_layers"] for row in rows] == [None, None]
    assert any("Roofline" in note for note in footnotes(rows))
    for text in (markdown(rows), printed(rows)):
        assert "tages" not in text
        assert "ipelined" not in text


@pytest.mark.parametrize("changes", [{"runs": None}, {"runs": PLAIN}])
def test_records_with_and_without_runs_are_read_back(make_record: MakeRecord, changes: dict[str, Any]) -> None:
    from pydantic import TypeAdapter

    record = make_record(**changes)
    assert TypeAdapter(EvalRecord).validate_json(record.to_json()) == record
