"""Repeats of an answer: the one that counts, and noise."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.eval.records.records import BASELINE, EvalRecord
from outrider.eval.results.figures import counted, is_noisy, is_slow
from outrider.eval.results.notes import headline, speed_note

from ..conftest import MakeRecord, info_of, rows_of

PLAIN, DRAFTED = 1.0, 0.8
"""Seconds of an undisturbed answer."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records have times of their own."""


@pytest.fixture
def run(make_record: MakeRecord) -> list[EvalRecord]:
    """Return two methods' answers to eight prompts, in three repeats, on a CPU that always computes."""
    return [
        make_record(
            method=method,
            prompt_id=str(prompt),
            repeat=repeat,
            prefill_seconds=seconds / 4,
            decode_seconds=seconds * 3 / 4,
            processor_seconds=seconds,
        )
        for repeat in range(3)
        for prompt in range(8)
        for method, seconds in ((BASELINE, PLAIN), ("redrafter", DRAFTED), ("medusa", 2 * PLAIN))
    ]


def stalled(records: list[EvalRecord], seconds: float, repeats: tuple[int, ...] = (0,), **fields: Any) -> list[EvalRecord]:
    """Add seconds in which nothing is computed to the answers that have these fields."""
    return [
        replace(record, decode_seconds=record.decode_seconds + seconds)
        if record.repeat in repeats and all(getattr(record, name) == value for name, value in fields.items())
        else record
        for record in records
    ]


@pytest.mark.parametrize(
    ("seconds", "processor_seconds", "others", "slow"),
    [
        (1.6, 1.0, [], True),
        (1.4, 1.0, [], False),
        (2.1, 4.0, [], False),  # four threads
        (2.1, None, [], False),
        (2.1, None, [1.0, 5.0], True),
        (2.1, 4.0, [1.0], True),
    ],
)
def test_an_answer_is_slow_by_its_processor_time_or_by_its_other_repeats(clock, seconds, processor_seconds, others, slow):
    assert is_slow(seconds, processor_seconds, others) == slow


def test_the_median_repeat_counts_and_of_two_the_faster(make_record: MakeRecord) -> None:
    repeats = [make_record(repeat=index, decode_seconds=seconds) for index, seconds in enumerate((5.0, 1.0, 2.0))]
    assert [record.decode_seconds for record in counted(repeats)] == [2.0]
    assert [record.decode_seconds for record in counted(repeats[:2])] == [1.0]
    batch = [replace(record, batch_size=2, num_rows=2, prompt_id=name) for record in repeats for name in ("a", "b")]
    assert [(record.prompt_id, record.repeat) for record in counted(batch)] == [("a", 2), ("b", 2)], "rows stay together"


@pytest.mark.parametrize("method", [BASELINE, "redrafter"])
def test_a_stall_in_one_repeat_changes_nothing(clock: None, run: list[EvalRecord], method: str) -> None:
    assert rows_of(stalled(run, 30.0, method=method, prompt_id="3")) == rows_of(run)
    assert rows_of(stalled(run, 30.0, method=method)) == rows_of(run), "of a whole repeat neither"


def test_all_rows_have_one_denominator_and_the_headline_follows_from_the_table(clock: None, run: list[EvalRecord]) -> None:
    """Also where plain decoding stalls in each repeat: tokens/s and speedup say the same, with a mark."""
    for records in (run, stalled(run, 30.0, repeats=(0, 1, 2), method=BASELINE, prompt_id="3")):
        rows = rows_of(records)
        plain, *others = rows
        for row in others:
            speed, plain_speed = row["tokens_per_second"], plain["tokens_per_second"]
            assert speed is not None
            assert plain_speed is not None
            assert row["speedup"] == pytest.approx(speed / plain_speed)
        best = max(others, key=lambda row: row["speedup"] or 0.0)
        assert f"{best['speedup']:.2f}x" in headline(rows)
        assert "Tok/s over plain decoding's Tok/s" in speed_note(rows)
        assert [row["noisy"] for row in rows] == [records is not run] * 3


def test_little_noise_has_no_mark(clock: None, run: list[EvalRecord]) -> None:
    one = stalled(run, 0.3, repeats=(0, 1, 2), method="redrafter", prompt_id="0")
    assert not any(row["noisy"] for row in rows_of(one)), "less than 1.5 times the processor time"
    many = [replace(record, prompt_id=f"{record.prompt_id} {index}") for index in range(9) for record in run]
    one = stalled(many, 1.0, repeats=(0, 1, 2), method="redrafter", prompt_id="0 0")
    assert not any(row["noisy"] for row in rows_of(one)), "one slow answer of 72"


def test_an_accelerator_is_judged_by_repeats_alone(clock: None, run: list[EvalRecord]) -> None:
    waiting = [replace(record, processor_seconds=0.01) for record in run if record.repeat < 2]
    info = info_of(waiting)
    info = replace(info, environment=replace(info.environment, device="GPU"))
    assert not any(row["noisy"] for row in rows_of(waiting, info=info))
    slow = [record for record in stalled(run, 3.0, repeats=(0, 1), method="redrafter") if record.method == "redrafter"]
    assert is_noisy([replace(record, processor_seconds=None) for record in slow], on_cpu=False)
