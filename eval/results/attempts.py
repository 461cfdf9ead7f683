"""Attempts at an answer whose timing was disturbed, and the choice of the one that counts.

A machine that stalls, or a clock that jumps, changes one timing and not the speed of a method. So
a disturbed answer is decoded again, next to plain decoding's. Of all attempts, the pair of method
and plain decoding that was disturbed least counts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ..records.records import BASELINE, BatchKey, EvalRecord
from .stats import batches

MAX_RATIO = 3.0
"""An answer is disturbed above this ratio of its time to the usual time."""
MIN_ANSWERS = 3
"""Fewest answers (in batches: batches) of a method from which a usual time can be computed.

Of three, the median is undisturbed if one was disturbed.
"""

PairKey = tuple[str | int, int, int]
"""Unit, turn, repeat: identifies what a method and plain decoding answer as a pair, within a
group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """Answer, or batch of answers, that is disturbed even in the attempt that counts."""

    prompt_ids: list[str]
    turn: int
    """0 for a prompt's first turn."""
    repeat: int
    side: Literal["method", "baseline"]
    ratio: float
    """Ratio to the usual time (`ratios`); 0 if the clock jumped, so that a time isn't positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Records of a method and of plain decoding in the attempts that count.

    Answers with a time that isn't positive are left out on both sides; `disturbed` has them.
    """

    plain: list[EvalRecord]
    method: list[EvalRecord]
    counted: list[EvalRecord]
    """The method's records in the attempts that count, those without a positive time included."""
    disturbed: list[Disturbed]
    """The worst first."""
    judged: bool
    """Whether stalls of both sides can be detected (`are_judged`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Answers to decode again as a pair with plain decoding's: the attempt, and the methods."""

    attempt: int
    methods: list[str]


def ratios(records: Iterable[EvalRecord], *, on_cpu: bool = False) -> dict[BatchKey, float]:
    """Compute the ratio of each answer's time to its method's usual time.

    `records` are those of one method under one suite, temperature and batch size; profiled ones are
    left out. The usual times are medians over first attempts: of the seconds per step, of the
    prefill's seconds, and of the prefill's seconds per token. The ratio is the larger one of two:
    of the decoding's seconds per step, and of all seconds, so that a stall of the prefill counts
    too. It is 0 where a time isn't positive.

    Fewer than MIN_ANSWERS have no usual time. Then the ratio is that of wall seconds to processor
    seconds if the target runs on a CPU (`on_cpu`), since decoding there never waits. On another
    device the process waits for it, so the ratio is 1.
    """
    # 1. One record and the prompts' tokens for each batch.
    timed = [record for record in records if not record.profiled]
    runs = {record.batch_key: record for record in batches(timed)}
    num_tokens: dict[BatchKey, int] = defaultdict(int)
    for record in timed:
        num_tokens[record.batch_key] += record.num_prompt_tokens
    # 2. The usual times.
    usual = [(key, record) for key, record in runs.items() if record.attempt == 0 and _is_positive(record)]
    if len(usual) < MIN_ANSWERS:
        return {key: _waiting_ratio(record, on_cpu) if _is_positive(record) else 0.0 for key, record in runs.items()}
    step = median([record.decode_seconds / record.num_steps for _, record in usual if record.num_steps] or [0.0])
    prefill = median(record.prefill_seconds for _, record in usual)
    token = median(record.prefill_seconds / num_tokens[key] for key, record in usual)
    # 3. The ratios.
    result = {}
    for key, record in runs.items():
        decoding = step * record.num_steps
        whole = record.seconds / (max(prefill, token * num_tokens[key]) + decoding)
        result[key] = max(whole, record.decode_seconds / decoding if decoding else 0.0) if _is_positive(record) else 0.0
    return result


def are_judged(records: Iterable[EvalRecord], *, on_cpu: bool = False) -> bool:
    """Check whether a method's answers suffice to detect a stall, as `ratios` does."""
    runs = [record for record in batches(records) if record.attempt == 0 and _is_positive(record)]
    return len(runs) >= MIN_ANSWERS or (on_cpu and all(record.processor_seconds for record in runs))


def least_disturbed(plain: Sequence[EvalRecord], records: Sequence[EvalRecord], *, on_cpu: bool = False) -> Pairs:
    """Select the attempt that counts for each answer: the one that was disturbed least.

    Both sides must have measured the attempt, and the larger of their two ratios decides. For the
    baseline itself both sides are equal. Raises ValueError if the sides have no attempt at an
    answer in common.
    """
    # 1. The best attempt of each pair.
    measured = (_by_attempt(plain, on_cpu), _by_attempt(records, on_cpu))
    best = {key: min(common, key=lambda attempt: common[attempt]) for key, common in _common(*measured).items()}
    if unpaired := [record.name for record in (*plain, *records) if _pair_key(record) not in best]:
        raise ValueError(f"plain decoding and {records[0].method} have no attempt in common for {unpaired[0]}; finish the run")
    chosen = [_in_first_order(side, best) for side in (plain, records)]
    # 2. Answers that are still disturbed.
    disturbed = _still_disturbed(chosen[0], measured[0], "baseline")
    if records[0].method != BASELINE:
        disturbed += _still_disturbed(chosen[1], measured[1], "method")
    disturbed.sort(key=lambda answer: -_disturbance(answer.ratio))
    # 3. The records that figures are computed from.
    timeless = {_pair_key(record) for side in chosen for record in batches(side) if not _is_positive(record)}
    kept = [[record for record in side if _pair_key(record) not in timeless] for side in chosen]
    judged = all(are_judged(side, on_cpu=on_cpu) for side in (plain, records))
    return Pairs(plain=kept[0], method=kept[1], counted=chosen[1], disturbed=disturbed, judged=judged)


def _in_first_order(records: Sequence[EvalRecord], best: Mapping[PairKey, int]) -> list[EvalRecord]:
    """Select the best attempts, in the order of the first ones."""
    order = {key: index for index, key in enumerate(dict.fromkeys(map(_pair_key, records)))}
    chosen = [record for record in records if record.attempt == best[_pair_key(record)]]
    return sorted(chosen, key=lambda record: order[_pair_key(record)])


def _still_disturbed(
    records: Sequence[EvalRecord], measured: Mapping[PairKey, Mapping[int, float]], side: Literal["method", "baseline"]
) -> list[Disturbed]:
    """List the disturbed answers of one side, in the attempts that count."""
    prompt_ids: dict[PairKey, list[str]] = defaultdict(list)
    for record in records:
        prompt_ids[_pair_key(record)].append(record.prompt_id)
    result = []
    for record in batches(records):
        key = _pair_key(record)
        if _is_disturbed(ratio := measured[key][record.attempt]):
            result.append(Disturbed(prompt_ids=prompt_ids[key], turn=record.turn, repeat=record.repeat, side=side, ratio=ratio))
    return result


def find_repetitions(records: Sequence[EvalRecord], *, on_cpu: bool = False) -> dict[PairKey, Repetition]:
    """List what must be decoded again in one group, because all attempts so far are disturbed.

    A pair is disturbed if one of its sides is. So a disturbed answer of plain decoding concerns
    every method. A last attempt that a killed run left incomplete is completed first.
    """
    # 1. The ratios of each method's attempts.
    by_method: dict[str, list[EvalRecord]] = defaultdict(list)
    for record in records:
        if not record.profiled:
            by_method[record.method].append(record)
    measured = {method: _by_attempt(of_method, on_cpu) for method, of_method in by_method.items()}
    plain = measured.get(BASELINE, {})
    # 2. The methods that are disturbed in all attempts, by pair.
    methods: dict[PairKey, list[str]] = defaultdict(list)
    for method, attempts in measured.items():
        for key, common in _common(plain, attempts).items():
            if _is_disturbed(min(common.values())):
                methods[key].append(method)
    # 3. The attempt to make next.
    result = {}
    for key, names in methods.items():
        last = max(attempt for attempts in measured.values() for attempt in attempts.get(key, {}))
        is_complete = all(last in measured[name].get(key, {}) for name in (BASELINE, *names))
        result[key] = Repetition(attempt=last + 1 if is_complete else last, methods=names)
    return result


def steady_profiles(timed: Sequence[EvalRecord], profiled: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Leave out the disturbed ones of the profiled answers.

    The usual seconds per step are those of the method's timed answers. Where they are unknown, or
    where all profiled answers are slow because of the phase timers, only answers without a positive
    time are left out.
    """
    positive = {run.batch_key: run for run in batches(profiled) if _is_positive(run)}
    usable = [record for record in profiled if record.batch_key in positive]
    runs = [record for record in batches(timed) if record.attempt == 0 and record.num_steps and _is_positive(record)]
    if len(runs) < MIN_ANSWERS:
        return usable
    limit = MAX_RATIO * median(record.decode_seconds / record.num_steps for record in runs)
    steady = {key for key, run in positive.items() if run.decode_seconds <= limit * run.num_steps}
    return [record for record in usable if record.batch_key in steady] or usable


def num_repeated(records: Iterable[EvalRecord]) -> int:
    """Count the answers that were decoded more than once because of a disturbed timing."""
    return len({(*_pair_key(record), record.prompt_id) for record in records if record.attempt > 0})


def _by_attempt(records: Sequence[EvalRecord], on_cpu: bool) -> dict[PairKey, dict[int, float]]:
    """Compute the ratio of each attempt, by pair."""
    measured = ratios(records, on_cpu=on_cpu)
    result: dict[PairKey, dict[int, float]] = {}
    for record in records:
        result.setdefault(_pair_key(record), {})[record.attempt] = measured[record.batch_key]
    return result


def _common(
    plain: Mapping[PairKey, Mapping[int, float]], measured: Mapping[PairKey, Mapping[int, float]]
) -> dict[PairKey, dict[int, float]]:
    """Compute how much each attempt of both sides was disturbed: by the worse side."""
    result = {}
    for key, attempts in measured.items():
        both = sorted(attempts.keys() & plain.get(key, {}).keys())
        if both:
            result[key] = {attempt: max(_disturbance(side[key][attempt]) for side in (plain, measured)) for attempt in both}
    return result


def _pair_key(record: EvalRecord) -> PairKey:
    return (record.unit, record.turn, record.repeat)


def _is_positive(record: EvalRecord) -> bool:
    """Check that the clock ran forwards; an answer without steps may take no time to decode."""
    return record.prefill_seconds > 0 and (record.decode_seconds > 0 or (record.decode_seconds == 0 and not record.num_steps))


def _waiting_ratio(record: EvalRecord, on_cpu: bool) -> float:
    """Compute wall seconds over processor seconds; 1 where a wait is normal or wasn't measured."""
    return record.seconds / record.processor_seconds if on_cpu and record.processor_seconds else 1.0


def _is_disturbed(ratio: float) -> bool:
    return _disturbance(ratio) > MAX_RATIO


def _disturbance(ratio: float) -> float:
    """Make a ratio comparable: an answer without a positive time is the worst."""
    return ratio if ratio > 0 else math.inf
