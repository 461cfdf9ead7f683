"""Figures of a method: the numbers of its row."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NotRequired, cast

import numpy as np
from typing_extensions import TypedDict  # pydantic can't read typing's before Python 3.12

from ...data.loops import ends_in_a_loop
from ..records.records import BASELINE, EvalRecord
from ..records.run_files import Roofline
from . import stats
from .attempts import Pairs, least_disturbed, num_repeated, steady_profiles
from .lengths import Window, by_window
from .lossless import Mismatch, Verdict, judge

TOLERANCE = 1.02
"""A speedup exceeds its bound if it is larger than the bound by this factor."""


class Speeds(TypedDict):
    """Figures that compare the times of a method and of plain decoding."""

    speedup: float | None
    """Speedup over plain decoding. None where a method that claims to be lossless is not: a wrong
    answer has no speed."""
    speedup_ci95: tuple[float, float] | None
    median_speedup: NotRequired[float | None]
    """Median of the speedups over the units of the interval. It and the next two fields are None
    and 0 for plain decoding, and for methods without a speedup."""
    num_faster: NotRequired[int]
    """Units in which the method was faster than plain decoding."""
    num_compared: NotRequired[int]
    """Units in which the method was compared with plain decoding."""
    processor_seconds_per_token: NotRequired[float | None]
    """Processor seconds of all threads per token of the answers, prefill included."""
    processor_speedup: NotRequired[float | None]
    """Plain decoding's processor seconds per token over the method's."""
    exceeds: NotRequired[str]
    """The bound that the speedup exceeds: "tokens per step" (an error of measurement), "ceiling",
    or an empty text."""
    outliers: NotRequired[list[dict[str, Any]]]
    """Slow answers in summaries of older versions. Nothing shows them."""
    by_category: dict[str, dict[str, Any]]
    """Figures of each category: those of `stats.count_drafts`, the speedup and its interval."""


class Losslessness(TypedDict):
    """Figures that compare the answers of a method with plain decoding's."""

    lossless: bool | None
    """Whether every answer equals the baseline's, token for token. None where random drafts make it
    a different sample by design."""
    lossless_label: str
    num_mismatched_prompts: int
    num_within_noise: int
    """Mismatched prompts that the audit explains by arithmetic noise (in low precision or in
    samples)."""
    num_unaudited: int
    """Mismatched prompts without a known error whose audit ran out of memory."""
    first_mismatch: dict[str, Any] | None


class Figures(Losslessness, Speeds):
    """Figures of a method.

    None stands for a number that doesn't exist, or that must not be shown.
    """

    num_prompts: int
    num_turns: int
    """Answers in each repeat."""
    num_batches: int
    """Units of the intervals: batches, or prompts at batch size 1."""
    num_skipped: int
    """Turns that were skipped because they exceed the target's context window."""
    num_truncated: int
    """Answers (of all repeats) that ended at the token limit."""
    num_loops: NotRequired[int]
    """Answers (of all repeats) that end in a repeated cycle of tokens (`ends_in_a_loop`)."""
    num_tokens: int
    tokens_per_step: float | None
    """Tokens per verify step of one answer."""
    tokens_per_step_ci95: tuple[float, float] | None
    """Bootstrap interval over prompts; None for fewer than two prompts."""
    by_window: NotRequired[list[Window] | None]
    """Tokens per step over the length of the answers; None with records of older versions."""
    mean_accepted: float | None
    accepted_histogram: list[int]
    accepted_by: NotRequired[dict[str, int] | None]
    """Accepted draft tokens by source (`EvalRecord.accepted_by`)."""
    draft_tokens_per_step: float | None
    read_gb_per_token: NotRequired[float | None]
    """Gigabytes of weights read from files per token of the answers, prefill included; None for a
    target that is in memory."""
    late_draft_seconds: NotRequired[float | None]
    """Seconds by which draft passes during waits delayed the target's passes, over all answers."""
    runs: NotRequired[dict[str, int] | None]
    """Counts of the target's passes (`Runs`), over all answers; None for a target without stages."""
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
    tree_tokens: dict[str, list[float]] | None
    """Draft tokens per step: before and after shared prefixes are merged, and as read
    (`stats.tree_tokens`)."""
    roofline_fraction: float | None
    """Decode tokens per second over the roofline of plain decoding. A plain step reads the weights
    once for a token of every row that is not finished. None for a target in stages."""
    num_repeated: NotRequired[int]
    """Answers (of all repeats) that were decoded again because a timing was disturbed."""
    disturbed: NotRequired[list[dict[str, Any]]]
    """Answers that are still disturbed in the attempt that counts: `prompt_ids` of the batch,
    `turn`, `repeat`, `side` ("method" or "baseline"), and `ratio` to the usual time (0 where the
    clock jumped, so that there is no positive time)."""
    stalls_judged: NotRequired[bool]
    """Whether there were enough answers, or processor seconds, to detect stalls (`are_judged`)."""
    timeless: NotRequired[bool]
    """Whether there are no speeds only because no answer has a positive time on both sides."""
    out_of_memory: bool
    """Whether the method or plain decoding ran out of memory here, so that there are no figures."""


NO_FIGURES = cast(
    "Figures",
    {
        **{name: 0 if name.startswith("num_") else None for name in Figures.__annotations__ if name != "outliers"},
        "accepted_histogram": [],
        "exceeds": "",
        "disturbed": [],
        "stalls_judged": True,
        "timeless": False,
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

    All figures are those of the attempts that were disturbed least. So the counts of steps belong to
    the times, also where the trees depend on the clock.
    """
    # 1. Split the records: timed answers give the speeds, profiled ones the time split and what
    # follows from it.
    sides = (plain_records, method_records)
    plain, timed = ([record for record in records if not record.profiled] for records in sides)
    pairs = least_disturbed(plain, timed, on_cpu=on_cpu)
    counted = pairs.counted
    profiled_plain, profiled = ([record for record in records if record.profiled] for records in sides)
    steady_plain, steady = steady_profiles(plain, profiled_plain), steady_profiles(timed, profiled)

    # 2. Compare the method with plain decoding.
    is_baseline = counted[0].method == BASELINE
    verdict = judge(method_records, mismatches)
    tau = stats.tokens_per_step(counted)
    rho = None if is_baseline else stats.relative_draft_cost(steady_plain, steady)
    histogram = stats.accepted_histogram(counted)

    # 3. The row.
    return {
        "num_prompts": stats.num_prompts(counted),
        "num_turns": len({(record.prompt_id, record.turn) for record in counted}),
        "num_batches": len({record.unit for record in counted}),
        "num_skipped": num_skipped,
        "num_truncated": sum(record.truncated for record in counted),
        "num_loops": sum(map(_ends_in_a_loop, counted)),
        "num_tokens": sum(len(record.token_ids) for record in counted),
        "tokens_per_step": tau,
        "tokens_per_step_ci95": _steps_interval(counted),
        "by_window": by_window(counted),
        "mean_accepted": stats.mean_accepted(histogram),
        "accepted_histogram": histogram,
        "accepted_by": stats.accepted_by(counted),
        "draft_tokens_per_step": stats.draft_tokens_per_step(counted),
        "read_gb_per_token": stats.read_gb_per_token(counted),
        "late_draft_seconds": stats.late_draft_seconds(counted),
        "runs": stats.run_counts(counted),
        "tokens_per_second": stats.tokens_per_second(pairs.method) if pairs.method else None,
        "answer_tokens_per_second": stats.answer_tokens_per_second(pairs.method) if pairs.method else None,
        "decode_tokens_per_second": stats.decode_tokens_per_second(pairs.method),
        "rho": rho,
        "ceiling": None if verdict.broken else stats.ceiling(tau, rho),
        "draft_seconds_per_step": None if is_baseline else stats.draft_seconds_per_step(steady),
        "time_split": stats.time_split(steady),
        "tree_tokens": stats.tree_tokens(profiled),
        "roofline_fraction": _roofline_fraction(pairs.method, roofline),
        **_losslessness(verdict, mismatches),
        "num_repeated": num_repeated(method_records),
        "disturbed": [asdict(answer) for answer in pairs.disturbed],
        "stalls_judged": pairs.judged,
        "timeless": not pairs.method and not verdict.broken,
        **_speeds(counted, pairs, rho, is_broken=verdict.broken, seed=seed),
        "out_of_memory": False,
    }


def _losslessness(verdict: Verdict, mismatches: Sequence[Mismatch]) -> Losslessness:
    """Compare a method's answers with plain decoding's."""
    return {
        "lossless": False if verdict.lossy else None if verdict.by_rule and not mismatches else not mismatches,
        "lossless_label": verdict.label,
        "num_mismatched_prompts": verdict.num_mismatched,
        "num_within_noise": verdict.num_within_noise,
        "num_unaudited": verdict.num_unaudited,
        "first_mismatch": verdict.first,
    }


def _ends_in_a_loop(record: EvalRecord) -> bool:
    """Check whether an answer ends in a repeated cycle; a final stop token doesn't count."""
    return ends_in_a_loop(record.token_ids if record.truncated else record.token_ids[:-1])


def _steps_interval(records: Sequence[EvalRecord]) -> tuple[float, float] | None:
    """Compute the 95 % interval of tokens per step over prompts.

    Returns None if a prompt's answers took no step.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        total = sums[record.prompt_id]
        total[:] = total[0] + record.num_verify_tokens, total[1] + record.num_steps
    counts = np.array(list(sums.values()))
    return stats.bootstrap(counts, stats.ratio, seed=0)[1] if counts[:, 1].all() else None


def _speeds(counted: Sequence[EvalRecord], pairs: Pairs, rho: float | None, *, is_broken: bool, seed: int) -> Speeds:
    """Compare a method's times with plain decoding's.

    A broken method has no speed anywhere, and neither has one without a positive time. The
    baseline's speedup is 1.
    """
    # 1. What every method has.
    seconds, plain_seconds = (
        stats.processor_seconds_per_token(records) if records else None for records in (pairs.method, pairs.plain)
    )
    categories = _without_times(counted) | stats.by_category(pairs.plain, pairs.method, seed=seed)
    is_broken = is_broken or not pairs.method
    speeds: Speeds = {
        "speedup": None if is_broken else 1.0,
        "speedup_ci95": None,
        "median_speedup": None,
        "num_faster": 0,
        "num_compared": 0,
        "exceeds": "",
        "processor_seconds_per_token": seconds,
        "processor_speedup": None if is_broken or not seconds or plain_seconds is None else plain_seconds / seconds,
        "by_category": categories,
    }
    if is_broken:
        for values in categories.values():
            values.update(speedup=None, speedup_ci95=None)
    if is_broken or pairs.method[0].method == BASELINE:
        return speeds
    # 2. The comparison with plain decoding.
    speedup, interval = stats.speedup(pairs.plain, pairs.method, seed=seed)
    by_unit = stats.unit_speedups(pairs.plain, pairs.method)
    return {
        **speeds,
        "speedup": speedup,
        "speedup_ci95": interval,
        "median_speedup": median(by_unit),
        "num_faster": sum(value > 1 for value in by_unit),
        "num_compared": len(by_unit),
        "exceeds": _exceeded_bound(speedup, stats.saved_steps(pairs.plain, pairs.method), rho),
    }


def _without_times(records: Sequence[EvalRecord]) -> dict[str, dict[str, Any]]:
    """Build the figures by category that don't depend on times."""
    categories = {category: [r for r in records if r.category == category] for category in {r.category: None for r in records}}
    return {
        category: {
            **stats.count_drafts(members),
            "speedup": None,
            "speedup_ci95": None,
        }
        for category, members in categories.items()
    }


def _exceeded_bound(speedup: float, saved_steps: float | None, rho: float | None) -> str:
    """Name the bound that a speedup exceeds, if any.

    `saved_steps` is plain decoding's steps per token over the method's: at batch size 1 the tokens
    per step. No step is faster than a plain one, so a higher speedup is an error of measurement.
    """
    if saved_steps is None:
        return ""
    if speedup > TOLERANCE * saved_steps:
        return "tokens per step"
    return "ceiling" if rho is not None and speedup > TOLERANCE * saved_steps / (1 + rho) else ""


def _roofline_fraction(records: Sequence[EvalRecord], roofline: Roofline | None) -> float | None:
    """Compute decoding speed as a share of plain decoding's bound for the same number of rows.

    Returns None if there was no step, and without a roofline.
    """
    if roofline is None:
        return None
    speed, num_rows = stats.decode_tokens_per_second(records), stats.rows_per_step(records)
    return None if speed is None or num_rows is None else speed / (num_rows * roofline.tokens_per_second)
