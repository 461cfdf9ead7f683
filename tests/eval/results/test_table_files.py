"""Tables for other programs: they keep the table's numbers with any name of a method."""

import csv
import dataclasses
import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.records.records import EvalRecord
from outrider.eval.records.run_files import Roofline
from outrider.eval.results.markdown import escape_markdown
from outrider.eval.results.rows import Row, build_rows
from outrider.eval.results.table_files import csv_table, latex_table
from outrider.eval.results.tables import footnotes, markdown
from outrider.eval.results.terminal import print_table

from ..conftest import MakeRecord

NASTY = 'redrafter a|b_c/50%, "x" & $y$ \\z {#1} [bold]~^<i>*\n'
ROOFLINE = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None)


@pytest.fixture
def records(make_record: MakeRecord) -> list[EvalRecord]:
    """Return records of six prompts. The drafter takes half the time and stalls once."""
    result = []
    for index in range(6):
        common: dict[str, Any] = {"prompt_id": str(index)}
        drafted = {**common, "method": NASTY, "accepted_histogram": [0, 1], "prefill_seconds": 0.25}
        result += [make_record(**common), make_record(**drafted, decode_seconds=0.25 if index else 5.0)]
    return result


@pytest.fixture
def rows(records: list[EvalRecord]) -> list[Row]:
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench")])
    skipped = {("mt_bench", 0.0, 1): 2}
    rows = build_rows(records, [], config=config, dtype="float32", roofline=ROOFLINE, num_skipped=skipped, drafters={})
    rows[1]["name"] = NASTY
    return rows


def test_csv_holds_the_bare_numbers_and_names_survive_it(rows: list[Row]) -> None:
    plain, drafted = csv.DictReader(StringIO(csv_table(rows)))
    assert drafted["method"] == NASTY
    assert (plain["method"], plain["name"]) == ("baseline", "plain decoding")
    assert drafted["name"] == NASTY
    assert float(drafted["speedup"]) == rows[1]["speedup"]
    assert float(drafted["tokens_per_second"]) == rows[1]["tokens_per_second"]
    interval = rows[1]["speedup_ci95"]
    assert interval is not None
    assert (float(drafted["speedup_ci95_low"]), float(drafted["speedup_ci95_high"])) == interval
    assert (plain["speedup_ci95_low"], plain["rho"], plain["time_draft"]) == ("", "", "")
    assert (drafted["batch_size"], drafted["num_skipped"], drafted["num_disturbed"]) == ("1", "2", "1")
    assert None not in drafted  # as many cells as column headers
    assert None not in drafted.values()


def test_csv_has_a_column_for_each_source_of_accepted_drafts(rows: list[Row]) -> None:
    header = csv_table(rows).splitlines()[0]
    assert "accepted_by" not in header, "no method is merged"
    rows[1] |= {"accepted_by": {"suffix": 3, "suffix+drafter": 2}, "pace": "fixed"}
    plain, drafted = csv.DictReader(StringIO(csv_table([*rows])))
    assert (drafted["accepted_by_suffix"], drafted["accepted_by_suffix+drafter"], drafted["pace"]) == ("3", "2", "fixed")
    assert (plain["accepted_by_suffix"], plain["accepted_by_suffix+drafter"], plain["pace"]) == ("", "", "")


def test_latex_has_one_line_of_as_many_cells_per_row(rows: list[Row]) -> None:
    text = latex_table(rows)
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in lines] == [8, 8, 8]
    assert lines[1].startswith(r"mt\_bench & 0 & 1 & plain decoding & 1.00 &")
    assert lines[2].startswith(r"mt\_bench & 0 & 1 & redrafter a")
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    after = text.split(r"\end{tabular}")[1].strip().splitlines()
    assert len(after) == len(footnotes(rows))
    assert all(line.startswith("% ") for line in after)


def test_special_characters_of_latex_are_escaped(rows: list[Row]) -> None:
    name = latex_table(rows).splitlines()[6].split(" & ")[3:-5]
    assert name[0].startswith(r"redrafter a|b\_c/50\%, ")
    assert not re.search(r"(?<!\\)[%&$#_]", "".join(name))
    assert r"\textbackslash" in "".join(name)


def test_markdown_keeps_its_columns_with_any_name(rows: list[Row]) -> None:
    lines = [line for line in markdown(rows).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {22}
    assert r"redrafter a\|b_c/50%," in lines[3]
    assert escape_markdown("a_b _c_ *d* <e>") == r"a_b \_c\_ \*d\* \<e\>"


def test_names_are_not_taken_for_the_terminals_markup(rows: list[Row]) -> None:
    screen = StringIO()
    print_table(rows, Console(width=300, file=screen))
    assert "{#1} [bold]~^<i>*" in screen.getvalue()


def test_disturbed_answers_are_in_the_summary_and_in_a_note(rows: list[Row]) -> None:
    assert rows[0]["disturbed"] == []
    assert rows[1]["disturbed"] == [
        {"side": "method", "prompt_ids": ["0"], "turn": 0, "repeat": 0, "ratio": 20.0},
    ]
    (note,) = [note for note in footnotes(rows) if note.startswith("Disturbed answers: 1.")]
    assert "prompt 0 turn 1 of redrafter a" in note
    assert "(20.0x). The evaluation's command measures only these answers again." in note
    answer = rows[1]["disturbed"][0]
    many: Any = {**rows[1], "disturbed": [{**answer, "repeat": repeat} for repeat in range(5)]}
    assert any("and 2 more, listed in the summary" in note for note in footnotes([many]))


def test_the_command_that_measures_again_is_in_the_table_as_it_was_typed(rows: list[Row]) -> None:
    command = "outrider eval --setting '{a_b: 5}' --suite-path mt_bench=*.jsonl"
    with_command: Any = [rows[0], {**rows[1], "command": command}]
    assert markdown(with_command).count(f"To measure only these answers again: `{command}`.") == 1
    assert any(f"again: `{command}`." in note for note in footnotes(with_command))


def test_a_stalled_answer_of_plain_decoding_is_listed_once_for_all_methods(rows: list[Row]) -> None:
    stalled = {"side": "baseline", "prompt_ids": ["0"], "turn": 0, "repeat": 0, "ratio": 9.0}
    several: Any = [{**rows[1], "method": method, "name": method, "disturbed": [stalled]} for method in ("one", "two")]
    (note,) = [note for note in footnotes([rows[0], *several]) if note.startswith("Disturbed")]
    assert "Disturbed answers: 1." in note
    assert "prompt 0 turn 1 of plain decoding (9.0x)" in note


def test_an_error_of_measurement_is_no_number_in_any_file(rows: list[Row]) -> None:
    wrong: Any = {
        **rows[1],
        "speedup": 7.77,
        "speedup_ci95": (7.77, 7.77),
        "median_speedup": 7.77,
        "exceeds": "tokens per step",
    }
    (line,) = csv.DictReader(StringIO(csv_table([wrong])))
    assert (line["speedup"], line["speedup_ci95_low"], line["median_speedup"]) == ("", "", "")
    assert line["exceeds"] == "tokens per step"
    assert "7.77" not in latex_table([wrong]).split("\\end{tabular}")[0]
    table = "\n".join(line for line in markdown([wrong]).splitlines() if line.startswith("|"))
    assert "7.77" not in table
    assert "| error: above its tokens per step |" in table


def test_each_batch_size_has_its_lines(records: list[EvalRecord]) -> None:
    batched = [dataclasses.replace(record, batch_size=2, batch=int(record.prompt_id) // 2, num_rows=2) for record in records]
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench")], batch_sizes=[1, 2])
    rows = build_rows([*records, *batched], [], config=config, dtype="float32", roofline=ROOFLINE, num_skipped={}, drafters={})
    assert [row["batch_size"] for row in csv.DictReader(StringIO(csv_table(rows)))] == ["1", "1", "2", "2"]
    assert len(re.findall(r"^mt\\_bench & 0 & [12] ", latex_table(rows), re.MULTILINE)) == 4
    # Two prompts share their seconds, so the batch is twice as fast. It reaches the same fraction
    # of the roofline.
    assert rows[2]["tokens_per_second"] == 2 * rows[0]["tokens_per_second"]
    assert rows[2]["roofline_fraction"] == rows[0]["roofline_fraction"]
    assert rows[2]["tokens_per_step"] == rows[0]["tokens_per_step"]
    assert [row["num_batches"] for row in rows] == [6, 6, 3, 3]
    notes = [note for note in footnotes(rows) if "Too few batches for a reliable interval: 3." in note]
    assert len(notes) == 1
    assert notes[0].startswith("mt_bench, greedy, batch size 2 ")
