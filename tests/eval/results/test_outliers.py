"""Outliers: a stall of the machine is one, and a slow, short or long answer is not."""

from typing import Any

from outrider.eval.records.records import EvalRecord
from outrider.eval.results.outliers import find_outliers
from outrider.models.phases import PhaseSeconds

from ..conftest import MakeRecord


def answers(make_record: MakeRecord, seconds_per_step: list[float], num_steps: int = 4, **changes: Any) -> list[EvalRecord]:
    return [
        make_record(prompt_id=str(index), accepted_histogram=[num_steps], decode_seconds=seconds * num_steps, **changes)
        for index, seconds in enumerate(seconds_per_step)
    ]


def test_several_stalls_are_listed_worst_first(make_record: MakeRecord) -> None:
    outliers = find_outliers(answers(make_record, [1.0, 1.1, 4.0, 0.9, 1.0, 9.0, 1.0]))
    assert [(outlier.prompt_ids, outlier.turn, outlier.repeat) for outlier in outliers] == [(["5"], 0, 0), (["2"], 0, 0)]
    assert [outlier.seconds_per_step for outlier in outliers] == [9.0, 4.0]
    assert [outlier.ratio for outlier in outliers] == [9.0, 4.0]


def test_an_answer_of_many_steps_or_with_a_long_prefill_is_no_outlier(make_record: MakeRecord) -> None:
    records = answers(make_record, [1.0] * 6)
    records += answers(make_record, [1.0], num_steps=100, turn=1, prefill_seconds=50.0)
    assert find_outliers(records) == []


def test_a_usual_and_a_narrow_spread_have_no_outliers(make_record: MakeRecord) -> None:
    assert find_outliers(answers(make_record, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])) == []
    # The spread is zero, but the last value is less than 1.5 times the others.
    assert find_outliers(answers(make_record, [1.0, 1.0, 1.0, 1.0, 1.0, 1.4])) == []


def test_few_answers_answers_without_steps_and_profiled_ones_have_no_outliers(make_record: MakeRecord) -> None:
    assert find_outliers(answers(make_record, [1.0, 1.0, 1.0, 50.0])) == []
    assert find_outliers([make_record(prompt_id=str(index), accepted_histogram=[]) for index in range(9)]) == []
    phases = PhaseSeconds(draft=0.0, verify=0.0, accept=0.0)
    assert find_outliers(answers(make_record, [1.0] * 6) + answers(make_record, [50.0], phase_seconds=phases)) == []


def test_a_batch_that_stalled_is_one_outlier_of_all_its_prompts(make_record: MakeRecord) -> None:
    records = []
    for index in range(6):
        for row, num_steps in enumerate((2, 4)):
            seconds = 40.0 if index == 3 else 4.0
            records.append(
                make_record(
                    prompt_id=f"{index}.{row}",
                    batch_size=2,
                    batch=index,
                    num_rows=2,
                    accepted_histogram=[num_steps],
                    decode_seconds=seconds,
                )
            )
    (outlier,) = find_outliers(records)
    assert outlier.prompt_ids == ["3.0", "3.1"]
    assert (outlier.seconds_per_step, outlier.ratio) == (10.0, 10.0)
