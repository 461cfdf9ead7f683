"""Attempts: which answers are disturbed, what is decoded again, and which attempt counts."""

import dataclasses
from typing import Any

import pytest

from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.records.records import BASELINE, EvalRecord
from outrider.eval.records.run_files import Roofline
from outrider.eval.results.attempts import (
    MIN_ANSWERS,
    Disturbed,
    Repetition,
    find_repetitions,
    least_disturbed,
    num_repeated,
    ratios,
)
from outrider.eval.results.rows import Row, build_rows, is_broken, is_timeless
from outrider.eval.results.tables import footnotes
from outrider.eval.results.terminal import note_lines
from outrider.models.phases import PhaseSeconds

from ..conftest import MakeRecord

NUM_PROMPTS = 6
PREFILL, STEP, NUM_STEPS = 0.5, 1.0, 4


def answers(
    make_record: MakeRecord, seconds_per_step: list[float], num_steps: int = NUM_STEPS, **changes: Any
) -> list[EvalRecord]:
    """Return an answer of a method to each prompt, with these seconds per step."""
    values = {"prefill_seconds": PREFILL, **changes}
    return [
        make_record(prompt_id=str(index), accepted_histogram=[num_steps], decode_seconds=seconds * num_steps, **values)
        for index, seconds in enumerate(seconds_per_step)
    ]


def usual(make_record: MakeRecord, *methods: str, **changes: Any) -> list[EvalRecord]:
    """Return undisturbed answers of plain decoding, and of methods that take half its time."""
    records = answers(make_record, [STEP] * NUM_PROMPTS, **changes)
    for method in methods:
        records += answers(make_record, [STEP / 2] * NUM_PROMPTS, method=method, **changes)
    return records


def of(records: list[EvalRecord], method: str) -> list[EvalRecord]:
    return [record for record in records if record.method == method]


def stalled(records: list[EvalRecord], prompt: str, method: str, seconds: float = 100.0, **changes: Any) -> list[EvalRecord]:
    """Add seconds to the decoding of one answer."""
    result = []
    for record in records:
        if (record.prompt_id, record.method, record.attempt) == (prompt, method, changes.get("attempt", 0)):
            record = dataclasses.replace(record, decode_seconds=record.decode_seconds + seconds)
        result.append(record)
    return result


def by_prompt(records: list[EvalRecord]) -> dict[str, float]:
    measured = ratios(records)
    return {record.prompt_id: measured[record.batch_key] for record in records}


def test_the_ratio_is_that_of_the_seconds_per_step(make_record: MakeRecord) -> None:
    measured = by_prompt(answers(make_record, [1.0, 1.1, 4.0, 0.9, 1.0, 9.0, 1.0]))
    assert measured["5"] == pytest.approx(9.0)
    assert measured["2"] == pytest.approx(4.0)
    assert measured["0"] == pytest.approx(1.0)


def test_a_stall_of_the_prefill_is_a_disturbance_too(make_record: MakeRecord) -> None:
    """The speedup includes the prefill, so seconds per step alone would miss it."""
    records = answers(make_record, [1.0] * 6)
    records[2] = dataclasses.replace(records[2], prefill_seconds=PREFILL + 10.0)
    measured = by_prompt(records)
    assert measured["2"] == pytest.approx((PREFILL + 10 + NUM_STEPS) / (PREFILL + NUM_STEPS))
    assert measured["1"] == 1.0


def test_a_long_answer_and_the_prefill_of_a_long_prompt_are_not_disturbed(make_record: MakeRecord) -> None:
    records = answers(make_record, [1.0] * 6)
    records += answers(make_record, [1.0], num_steps=100, turn=1)
    # A hundred times the prompt, a hundred times the prefill.
    records += answers(make_record, [1.0], turn=2, prefill_seconds=100 * PREFILL, num_prompt_tokens=500)
    assert set(ratios(records).values()) == {1.0}


def test_too_few_answers_are_not_judged_but_a_clock_that_jumped_is(make_record: MakeRecord) -> None:
    records = answers(make_record, [1.0] * (MIN_ANSWERS - 2) + [50.0])
    assert set(ratios(records).values()) == {1.0}
    records[0] = dataclasses.replace(records[0], decode_seconds=-3.0)
    assert by_prompt(records)["0"] == 0.0
    enough = answers(make_record, [1.0] * (MIN_ANSWERS - 1) + [50.0])
    assert by_prompt(enough)[str(MIN_ANSWERS - 1)] == pytest.approx(50.0)


def test_answers_without_steps_and_profiled_ones_are_not_disturbed(make_record: MakeRecord) -> None:
    stepless = [make_record(prompt_id=str(index), accepted_histogram=[], decode_seconds=0.0) for index in range(9)]
    assert set(ratios(stepless).values()) == {1.0}
    phases = PhaseSeconds(draft=0.0, verify=0.0, accept=0.0)
    profiled = answers(make_record, [50.0], phase_seconds=phases)
    assert set(ratios([*answers(make_record, [1.0] * 6), *profiled]).values()) == {1.0}
    assert find_repetitions([*answers(make_record, [1.0] * 6), *profiled]) == {}


def test_disturbed_repetitions_do_not_change_what_is_usual(make_record: MakeRecord) -> None:
    records = stalled(usual(make_record), "1", BASELINE)
    for attempt in range(1, 20):
        again = [record for record in usual(make_record, attempt=attempt) if record.prompt_id == "1"]
        records += stalled(again, "1", BASELINE, attempt=attempt)
    assert find_repetitions(records) == {("1", 0, 0): Repetition(attempt=20, methods=[BASELINE])}


def test_a_batch_that_stalled_is_one_disturbance_of_all_its_prompts(make_record: MakeRecord) -> None:
    records = []
    for index in range(6):
        for row, num_steps in enumerate((2, 4)):
            batch = {"prompt_id": f"{index}.{row}", "batch_size": 2, "batch": index, "num_rows": 2}
            seconds = 40.0 if index == 3 else 4.0
            records.append(make_record(**batch, accepted_histogram=[num_steps], decode_seconds=seconds))
    (answer,) = least_disturbed(records, records).disturbed
    assert answer == Disturbed(prompt_ids=["3.0", "3.1"], turn=0, repeat=0, side="baseline", ratio=10.0)
    assert find_repetitions(records) == {(3, 0, 0): Repetition(attempt=1, methods=[BASELINE])}


def test_a_disturbed_method_is_repeated_alone_and_a_disturbed_baseline_with_all(make_record: MakeRecord) -> None:
    records = usual(make_record, "a", "b")
    assert find_repetitions(records) == {}
    assert find_repetitions(stalled(records, "1", "a")) == {("1", 0, 0): Repetition(attempt=1, methods=["a"])}
    assert find_repetitions(stalled(records, "1", BASELINE)) == {
        ("1", 0, 0): Repetition(attempt=1, methods=[BASELINE, "a", "b"])
    }
    negative = stalled(records, "1", "a", seconds=-20.0)
    assert find_repetitions(negative) == {("1", 0, 0): Repetition(attempt=1, methods=["a"])}


def test_an_undisturbed_repetition_ends_it_and_a_disturbed_one_is_followed_by_another(make_record: MakeRecord) -> None:
    records = stalled(usual(make_record, "a", "b"), "1", "a")
    again = [record for record in usual(make_record, "a", attempt=1) if record.prompt_id == "1"]
    assert find_repetitions([*records, *again]) == {}
    for side in (BASELINE, "a"):
        still = stalled([*records, *again], "1", side, attempt=1)
        assert find_repetitions(still) == {("1", 0, 0): Repetition(attempt=2, methods=["a"])}


def test_a_repetition_that_was_killed_is_completed(make_record: MakeRecord) -> None:
    records = stalled(usual(make_record, "a", "b"), "1", BASELINE)
    again = [record for record in usual(make_record, "a", "b", attempt=1) if record.prompt_id == "1"]
    for num_kept in (1, 2):
        repetition = find_repetitions([*records, *again[:num_kept]])["1", 0, 0]
        assert repetition.attempt == 1
        assert "b" in repetition.methods
    assert find_repetitions([*records, *again]) == {}


def test_the_pair_counts_whose_worse_side_is_disturbed_least(make_record: MakeRecord) -> None:
    records = stalled(usual(make_record, "a"), "1", "a", seconds=100.0)
    again = [record for attempt in (1, 2) for record in usual(make_record, "a", attempt=attempt) if record.prompt_id == "1"]
    records = stalled([*records, *again], "1", BASELINE, seconds=50.0, attempt=1)
    pairs = least_disturbed(of(records, BASELINE), of(records, "a"))
    assert [record.attempt for record in pairs.method] == [record.attempt for record in pairs.plain] == [0, 2, 0, 0, 0, 0]
    assert pairs.disturbed == []
    assert num_repeated(of(records, "a")) == num_repeated(records) == 1


def test_an_attempt_that_only_one_side_measured_does_not_count(make_record: MakeRecord) -> None:
    """Another method was disturbed there, or a killed run measured only one side."""
    records = [*usual(make_record, "a"), *(r for r in usual(make_record, attempt=1) if r.prompt_id == "1")]
    pairs = least_disturbed(of(records, BASELINE), of(records, "a"))
    assert {record.attempt for record in [*pairs.plain, *pairs.method]} == {0}


def rows_of(records: list[EvalRecord], *, on_cpu: bool = False) -> dict[str, Row]:
    rows = build_rows(
        records,
        [],
        config=EvalConfig(suites=[SuiteConfig(name="mt_bench")]),
        dtype="float32",
        roofline=Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None),
        num_skipped={},
        drafters={},
        on_cpu=on_cpu,
    )
    return {row["method"]: row for row in rows}


def test_figures_are_those_of_the_least_disturbed_attempts(make_record: MakeRecord) -> None:
    clean = usual(make_record, "a", "b")
    records = stalled(clean, "1", "a")
    assert rows_of(records)["a"]["speedup"] != rows_of(clean)["a"]["speedup"]
    records += [record for record in usual(make_record, "a", attempt=1) if record.prompt_id == "1"]
    rows, expected = rows_of(records), rows_of(clean)
    for method in ("baseline", "a", "b"):
        repeated = 1 if method != "b" else 0
        assert rows[method] == {**expected[method], "num_repeated": repeated}
    assert rows["a"]["num_compared"] == rows["a"]["num_faster"] == NUM_PROMPTS


def test_the_steps_and_sources_of_the_attempt_count_whose_times_count(make_record: MakeRecord) -> None:
    """Trees that depend on the clock differ from attempt to attempt: shares and times must belong together."""
    plain = usual(make_record)
    merged: dict[str, Any] = {"method": "a", "token_ids": list(range(NUM_STEPS + 1)), "num_verify_tokens": NUM_STEPS}
    merged |= {"pace": "expected", "prefill_seconds": PREFILL}
    slow: dict[str, Any] = {"accepted_histogram": [4], "accepted_by": {"suffix": 0, "drafter": 0}, "decode_seconds": 2.0}
    fast: dict[str, Any] = {"accepted_histogram": [1, 0, 1], "accepted_by": {"suffix": 1, "drafter": 1}, "decode_seconds": 1.0}
    records = [make_record(prompt_id=str(index), **{**merged, **slow}) for index in range(NUM_PROMPTS)]
    records[2] = dataclasses.replace(records[2], decode_seconds=200.0)
    again = [make_record(prompt_id="2", attempt=1, **{**merged, **fast})]
    again += [record for record in usual(make_record, attempt=1) if record.prompt_id == "2"]
    row = rows_of([*plain, *records, *again])["a"]
    assert row["disturbed"] == []
    assert row["pace"] == "expected"
    assert row["accepted_by"] == {"suffix": 1, "drafter": 1}
    num_steps = (NUM_PROMPTS - 1) * NUM_STEPS + 2
    assert row["accepted_histogram"] == [num_steps - 1, 0, 1]
    assert row["tokens_per_step"] == NUM_PROMPTS * NUM_STEPS / num_steps
    values = row["by_category"]["writing"]
    assert (values["num_steps"], values["accepted_by"]) == (num_steps, row["accepted_by"])


def test_what_stays_disturbed_is_listed_and_still_counts(make_record: MakeRecord) -> None:
    records = stalled(usual(make_record, "a", "b"), "1", "a", seconds=38.0)
    records += [r for r in stalled(usual(make_record, "a", attempt=1), "1", "a", 98.0, attempt=1) if r.prompt_id == "1"]
    rows = rows_of(records)
    assert rows["a"]["disturbed"] == [{"prompt_ids": ["1"], "turn": 0, "repeat": 0, "side": "method", "ratio": 20.0}]
    assert rows["b"]["disturbed"] == rows["baseline"]["disturbed"] == []
    assert rows["a"]["num_faster"] == NUM_PROMPTS - 1
    assert rows["a"]["median_speedup"] == pytest.approx((PREFILL + 4) / (PREFILL + 2))
    plain = rows_of(stalled(usual(make_record, "a"), "1", BASELINE, seconds=76.0))
    assert [answer["side"] for name in ("baseline", "a") for answer in plain[name]["disturbed"]] == ["baseline"] * 2


def test_answers_without_a_positive_time_have_no_part_in_the_figures(make_record: MakeRecord) -> None:
    clean = usual(make_record, "a")
    rows = rows_of(stalled(clean, "1", "a", seconds=-50.0))
    assert rows["a"]["speedup"] == pytest.approx(rows_of(clean)["a"]["speedup"])
    assert rows["a"]["num_compared"] == NUM_PROMPTS - 1
    assert rows["a"]["num_prompts"] == NUM_PROMPTS
    assert [answer["ratio"] for answer in rows["a"]["disturbed"]] == [0.0]


def test_a_method_without_a_positive_time_is_marked_and_the_others_keep_their_figures(make_record: MakeRecord) -> None:
    clean = usual(make_record, "a", "b")
    expected = rows_of(clean)
    phases = PhaseSeconds(draft=0.0, verify=0.0, accept=0.0)
    clean += answers(make_record, [0.0], method="a", phase_seconds=phases, prefill_seconds=0.0)
    rows = rows_of([dataclasses.replace(r, prefill_seconds=-1.0) if r.method == "a" else r for r in clean])
    assert rows[BASELINE] == expected[BASELINE]
    assert rows["b"] == expected["b"]
    row = rows["a"]
    assert is_timeless(row)
    assert not is_broken(row)
    assert (row["speedup"], row["tokens_per_second"], row["num_compared"]) == (None, None, 0)
    assert row["tokens_per_step"] == expected["a"]["tokens_per_step"]
    assert len(row["disturbed"]) == NUM_PROMPTS
    # Without plain decoding's times no method has a speed.
    rows = rows_of([dataclasses.replace(r, prefill_seconds=0.0) if r.method == BASELINE else r for r in clean])
    assert all(map(is_timeless, rows.values()))
    # A category without a positive time has no speedup; the others keep theirs.
    mixed = [dataclasses.replace(r, category="stem" if r.prompt_id == "1" else "math") for r in usual(make_record, "a")]
    by_category = rows_of(stalled(mixed, "1", "a", seconds=-50.0))["a"]["by_category"]
    assert by_category["stem"]["speedup"] is None
    assert by_category["math"]["speedup"] == pytest.approx(expected["a"]["speedup"])


def test_sides_without_a_common_attempt_are_an_error(make_record: MakeRecord) -> None:
    records = usual(make_record, "a")
    with pytest.raises(ValueError, match="prompt '3'.*finish the run"):
        least_disturbed([r for r in of(records, BASELINE) if r.prompt_id != "3"], of(records, "a"))


def test_one_stall_in_three_answers_is_found(make_record: MakeRecord) -> None:
    """The limit counts batches: twelve prompts in batches of four are three."""
    for method in (BASELINE, "a"):
        records = [record for record in usual(make_record, "a") if record.prompt_id in "012"]
        assert rows_of(records)[method]["stalls_judged"]
        assert "1" in {key[0] for key in find_repetitions(stalled(records, "1", method))}
        assert rows_of(stalled(records, "1", method))["a"]["disturbed"]


@pytest.mark.parametrize("num_answers", [1, 2])
def test_fewer_answers_are_judged_on_a_cpu_by_their_wait(make_record: MakeRecord, num_answers: int) -> None:
    seconds = PREFILL + STEP * NUM_STEPS

    def records_of(processor_seconds: float | None) -> list[EvalRecord]:
        records = answers(make_record, [STEP] * num_answers, processor_seconds=processor_seconds)
        return records + answers(make_record, [STEP] * num_answers, method="a", processor_seconds=processor_seconds)

    # 1. On a CPU a process that has not computed has waited.
    busy = records_of(2 * seconds)  # two threads
    assert find_repetitions(busy, on_cpu=True) == {}
    waited = stalled(busy, "0", "a")
    assert find_repetitions(waited, on_cpu=True) == {("0", 0, 0): Repetition(attempt=1, methods=["a"])}
    row = rows_of(waited, on_cpu=True)["a"]
    assert [answer["ratio"] for answer in row["disturbed"]] == [pytest.approx((seconds + 100) / (2 * seconds))]
    assert row["stalls_judged"]
    again = [dataclasses.replace(record, attempt=1) for record in busy if record.prompt_id == "0"]
    assert find_repetitions([*waited, *again], on_cpu=True) == {}
    assert rows_of([*waited, *again], on_cpu=True)["a"]["speedup"] == pytest.approx(1.0)
    # 2. Elsewhere the process waits for the device, and older records lack the processor seconds.
    for records, on_cpu in ((waited, False), (stalled(records_of(None), "0", "a"), True)):
        assert find_repetitions(records, on_cpu=on_cpu) == {}
        row = rows_of(records, on_cpu=on_cpu)["a"]
        assert (row["disturbed"], row["stalls_judged"]) == ([], False)
        assert any("too few answers to judge stalls" in note for note in footnotes([row]))
        assert any("Too few answers to judge stalls" in line for line in note_lines([row], 80))


def test_a_speedup_above_its_tokens_per_step_or_its_ceiling_is_flagged(make_record: MakeRecord) -> None:
    def row(seconds: float, draft_seconds: float | None = None) -> Row:
        records = usual(make_record)
        drafted = answers(make_record, [seconds] * NUM_PROMPTS, num_steps=2, method="a")
        longer: dict[str, Any] = {"accepted_histogram": [0, 2], "token_ids": list(range(5)), "num_verify_tokens": 4}
        records += [dataclasses.replace(record, **longer) for record in drafted]
        if draft_seconds is not None:
            phases = PhaseSeconds(draft=2 * draft_seconds, verify=0.0, accept=0.0)
            records.append(make_record(prompt_id="0", accepted_histogram=[2], decode_seconds=2.0, phase_seconds=phases))
            records.append(
                make_record(prompt_id="0", accepted_histogram=[2], decode_seconds=2.0, phase_seconds=phases, method="a")
            )
        return rows_of(records)["a"]

    # Two tokens per step: 4.5 s of plain decoding. The method takes 0.5 s + 2 steps.
    assert row(1.0)["tokens_per_step"] == 2.0
    assert (row(1.0)["speedup"], row(1.0)["exceeds"]) == (pytest.approx(4.5 / 2.5), "")
    assert (row(0.5)["speedup"], row(0.5)["exceeds"]) == (pytest.approx(4.5 / 1.5), "tokens per step")
    # rho = 0.5, so the ceiling is 2 / 1.5 = 1.33.
    assert row(1.0, 0.5)["ceiling"] == pytest.approx(4 / 3)
    assert row(1.0, 0.5)["exceeds"] == "ceiling"
    assert row(1.5, 0.5)["exceeds"] == ""


def test_a_stall_in_a_profile_changes_no_ceiling(make_record: MakeRecord) -> None:
    phases = PhaseSeconds(draft=1.0, verify=0.5, accept=0.1)
    profiled = [record for record in usual(make_record, "a", phase_seconds=phases) if record.prompt_id in "012"]
    clean = [*usual(make_record, "a"), *profiled]
    expected = rows_of(clean)["a"]
    assert expected["rho"] == pytest.approx(1 / NUM_STEPS)
    for method in (BASELINE, "a"):
        slow = PhaseSeconds(draft=99.0, verify=0.5, accept=0.1)
        changes: dict[str, Any] = {"decode_seconds": 100.0, "phase_seconds": slow}
        records = [
            dataclasses.replace(record, **changes)
            if record.profiled and (record.prompt_id, record.method) == ("1", method)
            else record
            for record in clean
        ]
        row = rows_of(records)["a"]
        assert (row["rho"], row["ceiling"]) == (expected["rho"], expected["ceiling"])
        assert row["time_split"] == pytest.approx(expected["time_split"])
    # Phase timers that make every answer slow are no stall.
    records = [dataclasses.replace(record, decode_seconds=100.0) if record.profiled else record for record in clean]
    assert rows_of(records)["a"]["rho"] == pytest.approx(1 / 100)


def test_a_batch_may_be_faster_than_the_tokens_per_step_of_its_answers(make_record: MakeRecord) -> None:
    """The longest answer sets the batch's steps. If it is easy to draft, the batch gains more."""
    records = []
    for index in range(5):
        for row, (num_tokens, num_steps) in enumerate(((100, 25), (20, 20))):
            batch: dict[str, Any] = {"prompt_id": f"{index}.{row}", "batch_size": 2, "batch": index, "num_rows": 2}
            records.append(make_record(**batch, accepted_histogram=[num_tokens], prefill_seconds=0.1, decode_seconds=100.0))
            histogram = [0, 0, 0, num_steps] if num_tokens == 100 else [num_steps]
            drafted = {**batch, "accepted_histogram": histogram, "method": "a"}
            records.append(make_record(**drafted, prefill_seconds=0.1, decode_seconds=25.0))
    config = EvalConfig(suites=[SuiteConfig(name="mt_bench")], batch_sizes=[2])
    roofline = Roofline(weight_bytes=10**9, bandwidth_gbs=20.0, given=True, cache_bytes=None)
    row = build_rows(records, [], config=config, dtype="float32", roofline=roofline, num_skipped={}, drafters={})[1]
    assert row["tokens_per_step"] == pytest.approx(120 / 45)
    assert row["speedup"] == pytest.approx(100.1 / 25.1)
    assert row["exceeds"] == ""


def test_processor_seconds_are_those_of_the_batches(make_record: MakeRecord) -> None:
    records = usual(make_record, "a", processor_seconds=3.0)
    rows = rows_of([dataclasses.replace(r, processor_seconds=1.5) if r.method == "a" else r for r in records])
    assert rows["baseline"]["processor_seconds_per_token"] == pytest.approx(3.0 / 5)
    assert (rows["baseline"]["processor_speedup"], rows["a"]["processor_speedup"]) == (1.0, 2.0)
    old = rows_of([dataclasses.replace(records[0], processor_seconds=None), *records[1:]])
    assert (old["baseline"]["processor_seconds_per_token"], old["a"]["processor_speedup"]) == (None, None)
