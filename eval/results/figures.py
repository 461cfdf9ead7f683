"""Figures of a method: the numbers of its row.

A stall of the machine changes one timing, but not the speed of a method. So of an answer's repeats
the one with the median time counts. An answer is slow if it took more than SLOW times its processor
seconds, or the seconds of its fastest repeat. A speed is noisy if slow answers take more than
NOISY_SHARE of the time that counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, cast

import numpy as np
from typing_extensions import TypedDict  # pydantic can't read typing's before Python 3.12

from ...data.loops import ends_in_a_loop
from ..records.records import BASELINE, EvalRecord
from ..records.run_files import Roofline
from . import stats
from .lossless import Mismatch, judge

SLOW = 1.5
"""Largest ratio of an answer's seconds to its processor seconds, or to those of its fastest repeat;
above it the answer is slow."""
NOISY_SHARE = 0.05
"""Largest share of slow answers in the seconds that count; above it the speed is noisy."""

AnswerKey = tuple[int, str | int, int]
"""Batch size, unit and turn: identifies an answer, or a batch of answers, of a method on a suite at a temperature."""


def is_slow(seconds: float, processor_seconds: float | None, others: Iterable[float] = ()) -> bool:
    """Check whether an answer took far longer than it had to.

    `processor_seconds` are those of all threads, where the decoding computes in this process and never
    waits; else None. `others` are the seconds of other repeats.
    """
    expected = [*others, *([] if processor_seconds is None else [processor_seconds])]
    return bool(expected) and seconds > SLOW * min(expected)


def counted(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Select the repeat of each answer that counts: the one with the median time (of two, the faster).

    `records` are those of one method under one suite and temperature. The rows of a batch are selected together.
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
    return record.batch_size, record.unit, record.turn


class Speeds(TypedDict):
    """Figures that compare the times of a method and of plain decoding."""

    speedup: float | None
    """Tokens per second over plain decoding's. None where a method that claims to be lossless is
    not: a wrong answer has no speed."""
    speedup_ci95: tuple[float, float] | None
    median_speedup: float | None
    """Median of the speedups over the units of the interval. It and the next two fields are None
    and 0 for plain decoding, and for methods without a speedup."""
    num_faster: int
    """Units in which the method was faster than plain decoding."""
    num_compared: int
    """Units in which the method was compared with plain decoding."""
    processor_seconds_per_token: float | None
    """Processor seconds of all threads per token of the answers, prefill included."""
    processor_speedup: float | None
    """Plain decoding's processor seconds per token over the method's."""
    noisy: bool
    """Whether too much of the time, or of plain decoding's, is of slow answers (`is_noisy`)."""
    by_category: dict[str, dict[str, Any]]
    """Figures of each category (`stats.by_category`)."""


class Figures(Speeds):
    """Figures of a method.

    None stands for a number that doesn't exist, or that must not be shown.
    """

    num_prompts: int
    num_turns: int
    """Answers that count: one of each answer's repeats."""
    num_batches: int
    """Units of the intervals: batches, or prompts at batch size 1."""
    num_skipped: int
    """Turns that were skipped because they exceed the target's context window."""
    num_truncated: int
    """Answers that ended at the token limit."""
    num_loops: int
    """Answers that end in a repeated cycle of tokens (`ends_in_a_loop`)."""
    num_tokens: int
    tokens_per_step: float | None
    """Tokens per verify step of one answer."""
    tokens_per_step_ci95: tuple[float, float] | None
    """Bootstrap interval over prompts; None for fewer than two prompts."""
    mean_accepted: float | None
    accepted_histogram: list[int]
    accepted_by: dict[str, int] | None
    """Accepted draft tokens by source (`EvalRecord.accepted_by`)."""
    draft_tokens_per_step: float | None
    read_gb_per_token: float | None
    """Gigabytes of weights read from files per token of the answers, prefill included; None for a
    target that is in memory."""
    late_draft_seconds: float | None
    """Seconds by which draft passes during waits delayed the target's passes, over all answers."""
    runs: dict[str, int] | None
    """Counts of the target's passes (`RunCounts`), over all answers; None for a target without stages."""
    tokens_per_second: float | None
    """Throughput of the whole batch."""
    answer_tokens_per_second: float | None
    """Throughput of one answer in its batch (`stats.answer_tokens_per_second`)."""
    decode_tokens_per_second: float | None
    rho: float | None
    ceiling: float | None
    """tau / (1 + rho): computed, not measured. None if there is no speedup."""
    draft_seconds_per_step: float | None
    time_split: dict[str, float] | None
    roofline_fraction: float | None
    """Decode tokens per second over the roofline of plain decoding. A plain step reads the weights
    once for a token of every row that is not finished. None for a target in stages."""
    lossless: bool | None
    """Whether every answer equals the baseline's, token for token. None without answers."""
    lossless_label: str
    num_mismatched_prompts: int
    num_within_noise: int
    """Mismatched prompts that the audit explains by arithmetic noise (in low precision or in
    samples)."""
    num_unaudited: int
    """Mismatched prompts without a known error whose audit ran out of memory."""
    first_mismatch: dict[str, Any] | None
    out_of_memory: bool
    """Whether the method or plain decoding ran out of memory here, so that there are no figures."""


NO_FIGURES = cast(
    "Figures",
    {
        **{name: 0 if name.startswith("num_") else None for name in Figures.__annotations__},
        "accepted_histogram": [],
        "noisy": False,
        "by_category": {},
        "lossless_label": "-",
        "out_of_memory": True,
    },
)
"""Figures of a method that ran out of memory."""


def compute_figures(
    plain_records: Sequence[EvalRecord],
    method_records: Sequence[EvalRecord],
    mismatches: Sequence[Mismatch],
    roofline: Roofline | None,
    num_skipped: int,
    seed: int,
    *,
    on_cpu: bool = False,
) -> Figures:
    """Compute the figures of a method from its records and plain decoding's.

    All figures are those of the repeats that count (`counted`), on both sides. `mismatches` are those of all methods.
    """
    # 1. Split the records: timed answers give the speeds, profiled ones the time split and what
    # follows from it.
    sides = (plain_records, method_records)
    plain, timed = ([record for record in records if not record.profiled] for records in sides)
    profiled_plain, profiled = ([record for record in records if record.profiled] for records in sides)
    noisy = is_noisy(plain, on_cpu=on_cpu) or is_noisy(timed, on_cpu=on_cpu)
    plain, timed = counted(plain), counted(timed)

    # 2. Compare the method with plain decoding.
    is_baseline = timed[0].method == BASELINE
    verdict, plain_verdict = judge(method_records, mismatches), judge(plain_records, mismatches)
    # Without a correct baseline no comparison is valid.
    is_broken = verdict.broken or plain_verdict.broken
    tau = stats.tokens_per_step(timed)
    rho = None if is_baseline else stats.relative_draft_cost(profiled_plain, profiled)
    histogram = stats.accepted_histogram(timed)

    # 3. The row.
    return {
        "num_prompts": stats.num_prompts(timed),
        "num_turns": len(timed),
        "num_batches": len({record.unit for record in timed}),
        "num_skipped": num_skipped,
        "num_truncated": sum(record.truncated for record in timed),
        # a final stop token is no part of a loop
        "num_loops": sum(ends_in_a_loop(record.token_ids if record.truncated else record.token_ids[:-1]) for record in timed),
        "num_tokens": sum(len(record.token_ids) for record in timed),
        "tokens_per_step": tau,
        "tokens_per_step_ci95": _steps_interval(timed),
        "mean_accepted": stats.mean_accepted(histogram),
        "accepted_histogram": histogram,
        "accepted_by": stats.accepted_by(timed),
        "draft_tokens_per_step": stats.draft_tokens_per_step(timed),
        "read_gb_per_token": stats.read_gb_per_token(timed),
        "late_draft_seconds": stats.late_draft_seconds(timed),
        "runs": stats.run_counts(timed),
        "tokens_per_second": stats.tokens_per_second(timed),
        "answer_tokens_per_second": stats.answer_tokens_per_second(timed),
        "decode_tokens_per_second": stats.decode_tokens_per_second(timed),
        "rho": rho,
        "ceiling": None if is_broken else stats.ceiling(tau, rho),
        "draft_seconds_per_step": None if is_baseline else stats.draft_seconds_per_step(profiled),
        "time_split": stats.time_split(profiled),
        "roofline_fraction": _roofline_fraction(timed, roofline),
        "lossless": not (verdict.lossy or verdict.num_mismatched or plain_verdict.broken),
        "lossless_label": verdict.label if is_baseline else verdict.label_beside(plain_verdict),
        "num_mismatched_prompts": verdict.num_mismatched,
        "num_within_noise": verdict.num_within_noise,
        "num_unaudited": verdict.num_unaudited,
        "first_mismatch": verdict.first,
        **_speeds(plain, timed, noisy=noisy, is_broken=is_broken, seed=seed),
        "out_of_memory": False,
    }


def _steps_interval(records: Sequence[EvalRecord]) -> tuple[float, float] | None:
    """Compute the 95 % interval of tokens per step over the prompts whose answers took a step.

    Returns None for fewer than two of them.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        total = sums[record.prompt_id]
        total[:] = total[0] + record.num_verify_tokens, total[1] + record.num_steps
    counts = np.array([total for total in sums.values() if total[1]])
    return stats.bootstrap(counts, stats.ratio, seed=0)[1] if len(counts) else None


def _speeds(plain: Sequence[EvalRecord], timed: Sequence[EvalRecord], *, noisy: bool, is_broken: bool, seed: int) -> Speeds:
    """Compare a method's times with plain decoding's.

    A broken method has no speed anywhere, and none has where plain decoding is broken. The baseline's speedup is 1.
    """
    # 1. What every method has.
    seconds, plain_seconds = (stats.processor_seconds_per_token(records) for records in (timed, plain))
    categories = stats.by_category(plain, timed, seed=seed)
    speeds: Speeds = {
        "speedup": None if is_broken else 1.0,
        "speedup_ci95": None,
        "median_speedup": None,
        "num_faster": 0,
        "num_compared": 0,
        "noisy": noisy,
        "processor_seconds_per_token": seconds,
        "processor_speedup": None if is_broken or not seconds or plain_seconds is None else plain_seconds / seconds,
        "by_category": categories,
    }
    if is_broken:
        for values in categories.values():
            values.update(speedup=None, speedup_ci95=None)
    if is_broken or timed[0].method == BASELINE:
        return speeds
    # 2. The comparison with plain decoding.
    speedup, interval = stats.speedup(plain, timed, seed=seed)
    by_unit = stats.unit_speedups(plain, timed)
    return {
        **speeds,
        "speedup": speedup,
        "speedup_ci95": interval,
        "median_speedup": median(by_unit),
        "num_faster": sum(value > 1 for value in by_unit),
        "num_compared": len(by_unit),
    }


def _roofline_fraction(records: Sequence[EvalRecord], roofline: Roofline | None) -> float | None:
    """Compute decoding speed as a share of plain decoding's bound for the same number of rows.

    Returns None if there was no step, and without a roofline.
    """
    if roofline is None:
        return None
    speed, num_rows = stats.decode_tokens_per_second(records), stats.rows_per_step(records)
    return None if speed is None or num_rows is None else speed / (num_rows * roofline.tokens_per_second)
