"""Repeats of an answer: which one counts, and whether its time can be trusted.

A stall of the machine changes one timing, but not the speed of a method. So of an answer's repeats
the one with the median time counts. An answer is slow if it took more than SLOW times its processor
seconds, or the seconds of its fastest repeat. A speed is noisy if slow answers take more than
NOISY_SHARE of the time that counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..records.records import EvalRecord

SLOW = 1.5
"""Largest ratio of an answer's seconds to its processor seconds, or to those of its fastest repeat;
above it the answer is slow."""
NOISY_SHARE = 0.05
"""Largest share of slow answers in the seconds that count; above it the speed is noisy."""

AnswerKey = tuple[str | int, int]
"""Unit and turn: identifies an answer, or a batch of answers, of a method within a group."""


def is_slow(seconds: float, processor_seconds: float | None, others: Iterable[float] = ()) -> bool:
    """Check whether an answer took far longer than it had to.

    `processor_seconds` are those of all threads, where the decoding computes in this process and never
    waits; else None. `others` are the seconds of other repeats.
    """
    expected = [*others, *([] if processor_seconds is None else [processor_seconds])]
    return bool(expected) and seconds > SLOW * min(expected)


def counted(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Select the repeat of each answer that counts: the one with the median time (of two, the faster).

    `records` are those of one method under one suite, temperature and batch size. The rows of a
    batch are selected together.
    """
    repeats = _repeats(records)
    chosen = {
        key: sorted(of_answer, key=lambda repeat: (of_answer[repeat].seconds, repeat))[(len(of_answer) - 1) // 2]
        for key, of_answer in repeats.items()
    }
    return [record for record in records if chosen[_key(record)] == record.repeat]


def is_noisy(records: Sequence[EvalRecord], *, on_cpu: bool) -> bool:
    """Check whether slow answers take more than NOISY_SHARE of the seconds that count.

    `on_cpu` is whether decoding computes in this process, so that its processor seconds say how long
    it had to take.
    """
    slow, total = 0.0, 0.0
    repeats = _repeats(records)
    for record in {(_key(record)): record for record in counted(records)}.values():
        others = [other.seconds for other in repeats[_key(record)].values()]
        total += record.seconds
        if is_slow(record.seconds, record.processor_seconds if on_cpu else None, others):
            slow += record.seconds
    return slow > NOISY_SHARE * total


def _repeats(records: Iterable[EvalRecord]) -> dict[AnswerKey, dict[int, EvalRecord]]:
    """Collect a record of each repeat, by answer; the rows of a batch share its seconds."""
    repeats: dict[AnswerKey, dict[int, EvalRecord]] = defaultdict(dict)
    for record in records:
        repeats[_key(record)][record.repeat] = record
    return repeats


def _key(record: EvalRecord) -> AnswerKey:
    return record.unit, record.turn
