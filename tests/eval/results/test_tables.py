"""Results of an evaluation: rows, table, notes and plot."""

import csv
import dataclasses
import json
import re
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from outrider.eval.records.records import EvalRecord
from outrider.eval.records.run_files import DrafterFacts, Roofline
from outrider.eval.results.lossless import Mismatch
from outrider.eval.results.markdown import escape_markdown
from outrider.eval.results.notes import notes
from outrider.eval.results.plots import plot
from outrider.eval.results.rows import Row, is_broken
from outrider.eval.results.tables import cells, csv_table, markdown
from outrider.models.drafters.saved.folder import TrainingFacts
from outrider.models.phases import PhaseSeconds

from .. import conftest
from ..conftest import MakeRecord, info_of, printed

TRAINING = TrainingFacts(
    steps=500,
    seconds=160.4,
    positions_seen=512_000,
    tokens_seen=900_000,
    parameters=1_440_000,
    tokens_per_step_estimate=1.9,
    labels="distilled",
    hardware="8 x H",
)
DRAFTERS = {"redrafter": DrafterFacts(parameters=1_440_000, training=asdict(TRAINING))}
NASTY = 'redrafter a|b_c/50%, "x" & $y$ \\z {#1} [bold]~^<i>*\n'


@pytest.fixture
def records(make_record: MakeRecord) -> list[EvalRecord]:
    """Return records of two prompts of two categories.

    The drafter takes half the baseline's time and emits two tokens a step.
    """
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
    return conftest.rows_of(records, mismatches, **{"drafters": DRAFTERS, **changes})


def test_rows_hold_the_timed_records_numbers_and_split_the_profiled_ones(records: list[EvalRecord]) -> None:
    plain, drafted = rows_of(records, [])
    assert (plain["method"], drafted["method"]) == ("baseline", "redrafter")
    assert (plain["speedup"], plain["speedup_ci95"], plain["ceiling"]) == (1.0, None, None)
    assert drafted["speedup"] == pytest.approx(2.0)
    assert drafted["speedup_ci95"] == (pytest.approx(2.0), pytest.approx(2.0))
    assert drafted["tokens_per_step"] == 2.0
    assert drafted["tokens_per_step_ci95"] == (2.0, 2.0)
    assert drafted["draft_tokens_per_step"] == 4.0
    assert drafted["accepted_histogram"] == [0, 2]
    assert drafted["tokens_per_second"] == 6 / 1.0
    # Plain: 0.75 s over two steps. Drafter: 0.25 s over one step. rho = 0.25 / 0.375.
    assert drafted["rho"] == pytest.approx(2 / 3)
    assert drafted["ceiling"] == pytest.approx(2.0 / (1 + 2 / 3))
    assert drafted["time_split"] == pytest.approx({"draft": 0.5, "verify": 0.25, "accept": 0.2, "rest": 0.05})
    assert drafted["draft_seconds_per_step"] == pytest.approx(0.25)
    assert (plain["draft_seconds_per_step"], plain["parameters"], plain["training"]) == (None, None, None)
    assert drafted["parameters"] == 1_440_000
    assert drafted["training"] is not None
    assert drafted["training"]["seconds"] == 160.4
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
    assert cells(drafted)["Identical"] == "NO (1 of 2 prompts)"
    assert cells(drafted)["Speedup [95 %]"] == "-"
    assert [values["speedup"] for values in drafted["by_category"].values()] == [None, None]
    assert drafted["first_mismatch"] == {"prompt_id": "82", "turn": 0, "position": 1}
    assert any("prompt 82, turn 1, token 1" in note and "NOT LOSSLESS" in note for note in notes([plain, drafted]))
    plot([plain, drafted], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_differences_within_low_precision_noise_keep_the_speedup_and_are_noted(records: list[EvalRecord]) -> None:
    noisy = Mismatch(record=records[5], position=1, within_noise=True)
    plain, drafted = rows_of(records, [noisy], info=info_of(records, dtype="torch.bfloat16"))
    assert drafted["speedup"] == pytest.approx(2.0)
    assert drafted["lossless"] is False
    assert drafted["lossless_label"] == "within noise (1)"
    assert any("rounding noise explains" in note for note in notes([plain, drafted]))


def test_one_unexplained_answer_outweighs_the_explained_ones_of_its_prompt(records: list[EvalRecord]) -> None:
    noisy = Mismatch(record=records[5], position=1, within_noise=True)
    wrong = Mismatch(record=records[7], position=0)
    drafted = rows_of(records, [noisy, wrong])[1]
    assert drafted["lossless_label"] == "NO (1 of 2 prompts)"
    assert drafted["num_within_noise"] == 0
    assert drafted["first_mismatch"] == {"prompt_id": "82", "turn": 0, "position": 0}


def test_markdown_has_one_line_per_row_of_as_many_cells_as_the_head(records: list[EvalRecord]) -> None:
    plain, drafted = rows_of(records, [])
    drafted |= {"median_speedup": 2.1, "num_faster": 1, "num_compared": 2}
    drafted |= {"processor_seconds_per_token": 0.0125, "processor_speedup": 1.5}
    lines = [line for line in markdown([plain, drafted]).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2
    assert {line.count("|") for line in lines} == {22}
    assert lines[0].startswith("| Suite | Temperature | Batch | Method | Tok/step |")
    assert lines[2].startswith("| mt_bench | 0 | 1 | plain decoding |")
    assert lines[3].startswith(
        "| mt_bench | 0 | 1 | ReDrafter | 2.00 | 6.0 | 2.00x [2.00, 2.00] | 1.20x | yes | "
        "2.10x | 1 of 2 | 12.50 | 1.50x | 1.4M | 160 | 250.00 | 50% |"
    )


def test_parameter_counts_are_rounded_to_about_three_digits(records: list[EvalRecord]) -> None:
    shown = []
    for number in (850, 1_440_000, 33_500, 2_000_000_000):
        facts = DrafterFacts(parameters=number, training=None)
        shown.append(cells(rows_of(records, [], drafters={"redrafter": facts})[1]))
    assert [texts["Params"] for texts in shown] == ["850", "1.4M", "33.5k", "2.0B"]
    assert {texts["Trained s"] for texts in shown} == {"-"}
    assert {name: cells(rows_of(records, [])[0])[name] for name in ("Params", "Trained s", "Draft ms")} == dict.fromkeys(
        ("Params", "Trained s", "Draft ms"), "-"
    )


@pytest.fixture
def sampled(records: list[EvalRecord]) -> list[EvalRecord]:
    """Return the same records at temperature 0.7."""
    return [dataclasses.replace(record, temperature=0.7, token_ids=record.token_ids[::-1]) for record in records]


def test_each_temperature_has_rows_of_its_own_in_the_order_of_the_run(records, sampled):
    rows = rows_of([*sampled, *records], [], num_turns={"mt_bench": 3})
    assert [(row["temperature"], row["method"]) for row in rows] == [
        (0.7, "baseline"),
        (0.7, "redrafter"),
        (0.0, "baseline"),
        (0.0, "redrafter"),
    ]
    assert [row["num_turns"] for row in rows] == [2] * 4
    assert [row["num_skipped"] for row in rows] == [1, 1, 1, 1]
    lines = notes(rows)
    assert sum("1 turns were SKIPPED" in note for note in lines) == 2
    assert any(note.startswith("mt_bench, temperature 0.7 ") for note in lines)
    shown = [line.strip() for line in printed(rows, 110).splitlines()]
    assert [shown.count(f"mt_bench, {name}") for name in ("greedy", "temperature 0.7")] == [1, 1]


def test_answers_that_run_in_circles_are_counted_and_noted(records: list[EvalRecord]) -> None:
    assert [row["num_loops"] for row in rows_of(records, [])] == [0, 0]
    assert not any(note.startswith("Loops") for note in notes(rows_of(records, [])))
    circling = [
        dataclasses.replace(record, token_ids=[7] * 65, accepted_histogram=[64], num_verify_tokens=64, truncated=True)
        if record.prompt_id == "81"
        else record
        for record in records
    ]
    rows = rows_of(circling, [])
    assert [row["num_loops"] for row in rows] == [1, 1]
    (note,) = [note for note in notes(rows) if note.startswith("Loops")]
    assert "1 of 2 answers of plain decoding on mt_bench (greedy) end in a short cycle of tokens (50%)" in note


def test_a_note_names_a_roofline_of_weights_that_fit_the_cache(records: list[EvalRecord]) -> None:
    cached = Roofline(weight_bytes=10**7, bandwidth_gbs=20.0, cache_bytes=2**25, streamed=False)
    assert cached.tokens_per_second == 2000.0
    assert any(
        "fit into the cache (34 MB)" in note for note in notes(rows_of(records, [], info=info_of(records, roofline=cached)))
    )
    assert not any("cache" in note for note in notes(rows_of(records, [])))


def test_plots_mark_a_noisy_speed(records: list[EvalRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    texts: list[str] = []
    draw = Axes.annotate
    monkeypatch.setattr(
        Axes, "annotate", lambda axes, text, *args, **options: [texts.append(text), draw(axes, text, *args, **options)][1]
    )
    other = [dataclasses.replace(record, method="medusa") for record in records if record.method != "baseline"]
    plain, first, second = rows_of([*records, *other], [])
    second["noisy"] = True
    plot([plain, first, second], tmp_path / "plot.png")
    assert [text for text in texts if text.startswith("2.00x")] == ["2.00x", "2.00x (noisy)"]


@pytest.mark.usefixtures("real_plots")
def test_a_plot_is_a_png_of_all_drafters_and_the_baseline_alone_makes_none(records, sampled, tmp_path):
    """A method may be missing at the first temperature, as a tuned setting is."""
    other = [dataclasses.replace(record, method="medusa tree_nodes=5") for record in records if record.method != "baseline"]
    wrong = Mismatch(record=other[0], position=1)
    rows = rows_of([*sampled, *records, *other], [wrong])
    assert len(rows) == 5
    plot([{**row, "label": r"$\foo$ " + row["label"]} for row in rows], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plot(rows[:1], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.fixture
def rows(records: list[EvalRecord]) -> list[Row]:
    """Return the rows of a method with a name of all special characters."""
    return rows_of([dataclasses.replace(r, label=NASTY) if r.method != "baseline" else r for r in records], [])


def test_csv_holds_the_bare_numbers_and_names_survive_it(rows: list[Row]) -> None:
    rows[1]["noisy"] = True
    plain, drafted = csv.DictReader(StringIO(csv_table(rows)))
    assert (plain["method"], plain["label"]) == ("baseline", "plain decoding")
    assert (drafted["method"], drafted["label"]) == ("redrafter", NASTY)
    assert float(drafted["speedup"]) == rows[1]["speedup"]
    interval = rows[1]["speedup_ci95"]
    assert interval is not None
    assert (float(drafted["speedup_ci95_low"]), float(drafted["speedup_ci95_high"])) == interval
    assert (plain["speedup_ci95_low"], plain["rho"]) == ("", "")
    assert (drafted["batch_size"], drafted["noisy"], plain["noisy"]) == ("1", "True", "False")
    assert float(drafted["training_seconds"]) == 160.4
    assert None not in drafted  # as many cells as column headers
    assert None not in drafted.values()
    assert "accepted_by" not in csv_table(rows), "no method is merged"
    rows[1] |= {"accepted_by": {"suffix": 3, "suffix+drafter": 2}}
    plain, drafted = csv.DictReader(StringIO(csv_table(rows)))
    assert (drafted["accepted_by_suffix"], drafted["accepted_by_suffix+drafter"]) == ("3", "2")
    assert (plain["accepted_by_suffix"], plain["accepted_by_suffix+drafter"]) == ("", "")


def test_markdown_and_terminal_show_any_name(rows: list[Row]) -> None:
    lines = [line for line in markdown(rows).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {22}
    assert r"redrafter a\|b_c/50%," in lines[3]
    assert escape_markdown("a_b _c_ *d* <e>") == r"a_b \_c\_ \*d\* \<e\>"
    assert "{#1} [bold]~^<i>*" in printed(rows, 300)


def test_each_batch_size_has_its_lines(make_record: MakeRecord) -> None:
    records = [make_record(prompt_id=str(index), method=name) for index in range(6) for name in ("baseline", "redrafter")]
    batched = [dataclasses.replace(record, batch_size=2, batch=int(record.prompt_id) // 2, num_rows=2) for record in records]
    rows = rows_of([*records, *batched], [])
    assert [row["batch_size"] for row in csv.DictReader(StringIO(csv_table(rows)))] == ["1", "1", "2", "2"]
    # Two prompts share their seconds, so the batch is twice as fast. It reaches the same fraction
    # of the roofline.
    assert rows[2]["tokens_per_second"] == 2 * (rows[0]["tokens_per_second"] or 0)
    assert rows[2]["roofline_fraction"] == rows[0]["roofline_fraction"]
    assert rows[2]["tokens_per_step"] == rows[0]["tokens_per_step"]
    assert [row["num_batches"] for row in rows] == [6, 6, 3, 3]
    few = [note for note in notes(rows) if "Too few batches for a reliable interval: 3." in note]
    assert len(few) == 1
    assert few[0].startswith("mt_bench, greedy, batch size 2 ")
