"""Statistics of records: the numbers of a table.

Figures are sums over sums, never means of ratios, with an interval over prompts. The answers of a
batch share its seconds, which are counted once. A batch has as many steps as its longest answer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from ..records.records import BatchKey, EvalRecord

Statistic = Callable[[np.ndarray], np.ndarray]

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95


def tokens_per_step(records: Sequence[EvalRecord]) -> float | None:
    """Compute tokens per verify step of each answer, bonus tokens included.

    The prefill and its token count on neither side. Returns None if there was no step.
    """
    num_steps = sum(record.num_steps for record in records)
    return sum(record.num_verify_tokens for record in records) / num_steps if num_steps else None


def draft_tokens_per_step(records: Sequence[EvalRecord]) -> float | None:
    """Compute draft tokens read by the target per verify step of each answer.

    Padding is included. Returns None if there was no step.
    """
    num_steps = sum(record.num_steps for record in records)
    return sum(record.num_draft_tokens for record in records) / num_steps if num_steps else None


def batches(records: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Select the record with the most steps from each batch.

    It has the batch's seconds, and as many steps as the batch.
    """
    longest: dict[BatchKey, EvalRecord] = {}
    for record in records:
        if record.num_steps >= longest.setdefault(record.batch_key, record).num_steps:
            longest[record.batch_key] = record
    return list(longest.values())


def tokens_per_second(records: Sequence[EvalRecord]) -> float:
    """Compute all tokens of all rows over the whole time, prefill included."""
    return sum(len(record.token_ids) for record in records) / sum(record.seconds for record in batches(records))


def answer_tokens_per_second(records: Sequence[EvalRecord]) -> float:
    """Compute the tokens per second of one answer.

    These are the answer's tokens over the time of its batch, for any number of rows in the batch.
    """
    return sum(len(record.token_ids) for record in records) / sum(record.seconds for record in records)


def rows_per_step(records: Sequence[EvalRecord]) -> float | None:
    """Compute the mean number of answers in a batch's verify step.

    It is below the batch size where a batch is not full, or answers have ended.
    """
    num_steps = sum(record.num_steps for record in batches(records))
    return sum(record.num_steps for record in records) / num_steps if num_steps else None


def decode_tokens_per_second(records: Sequence[EvalRecord]) -> float | None:
    """Compute tokens per second without the prefill; None if there were no verify steps."""
    seconds = sum(record.decode_seconds for record in batches(records) if record.num_steps)
    return sum(record.num_verify_tokens for record in records) / seconds if seconds else None


def accepted_histogram(records: Sequence[EvalRecord]) -> list[int]:
    """Sum the histograms: entry k counts the verify steps that accepted k draft tokens."""
    return [sum(counts) for counts in zip_longest(*(record.accepted_histogram for record in records), fillvalue=0)]


def mean_accepted(histogram: Sequence[int]) -> float | None:
    """Compute the mean number of draft tokens accepted per verify step."""
    return sum(length * count for length, count in enumerate(histogram)) / sum(histogram) if sum(histogram) else None


def accepted_by(records: Sequence[EvalRecord]) -> dict[str, int] | None:
    """Sum the accepted draft tokens by source, each source alone first (`EvalRecord.accepted_by`).

    Returns None if a record lacks the counts.
    """
    counts: Counter[str] = Counter()
    for record in records:
        if record.accepted_by is None:
            return None
        counts.update(record.accepted_by)
    return dict(sorted(counts.items(), key=lambda item: item[0].count("+"))) if records else None


def read_gb_per_token(records: Sequence[EvalRecord]) -> float | None:
    """Compute the gigabytes of weights read per token of the answers; None in memory."""
    counts = [record.streaming for record in batches(records)]
    num_bytes = sum(streaming.bytes_read for streaming in counts if streaming is not None)
    return num_bytes / 1e9 / sum(len(record.token_ids) for record in records) if counts and None not in counts else None


def late_draft_seconds(records: Sequence[EvalRecord]) -> float | None:
    """Sum the seconds by which drafts during waits delayed passes; None in memory."""
    counts = [record.streaming for record in batches(records)]
    seconds = sum(streaming.late_seconds for streaming in counts if streaming is not None)
    return seconds if counts and None not in counts else None


def run_counts(records: Sequence[EvalRecord]) -> dict[str, int] | None:
    """Sum the counts of the target's passes; None for a target without stages."""
    counts = [asdict(record.runs) for record in batches(records) if record.runs is not None]
    return {name: sum(runs[name] for runs in counts) for name in counts[0]} if counts else None


def speedup(
    baseline: Sequence[EvalRecord], records: Sequence[EvalRecord], *, seed: int
) -> tuple[float, tuple[float, float] | None]:
    """Compute the speedup over the baseline, and its 95 % interval.

    The speedup is the baseline's seconds per token over the method's, with the times of whole
    answers. Both sides are sums over the same prompts in the same batches. The interval is the
    percentile bootstrap over prompts, or over batches of them. Each unit keeps all its turns and
    repeats together. Fewer than two units have no interval, since one unit gives no information
    about others.
    """
    return bootstrap(_both_sides(baseline, records), ratio_of_ratios, seed=seed)


def unit_speedups(baseline: Sequence[EvalRecord], records: Sequence[EvalRecord]) -> list[float]:
    """Compute the speedup of each unit: of a prompt, or of a batch of them."""
    return [float(value) for value in ratio_of_ratios(_both_sides(baseline, records))]


def processor_seconds_per_token(records: Sequence[EvalRecord]) -> float | None:
    """Compute the processor seconds of all threads per token, prefill included.

    Returns None if a record lacks them: for a target in stages.
    """
    seconds = [record.processor_seconds for record in batches(records)]
    measured = [value for value in seconds if value is not None]
    return sum(measured) / sum(len(record.token_ids) for record in records) if len(measured) == len(seconds) else None


def bootstrap(
    sums: Shaped[np.ndarray, "*side unit 2"], statistic: Statistic, *, seed: int, num_tested: int = 1
) -> tuple[float, tuple[float, float] | None]:
    """Compute the statistic of the sums over all units, and its 95 % interval.

    The interval is the percentile bootstrap over units. Fewer than two units have none. All of `num_tested` such intervals
    hold together with 95 % (Bonferroni).
    """
    num_units = sums.shape[-2]
    (point,) = statistic(np.ones((1, num_units), dtype=int) @ sums)
    if num_units < 2:
        return float(point), None
    tail = 50 * (1 - CONFIDENCE) / num_tested
    low, high = np.percentile(statistic(_resample_counts(seed, num_units) @ sums), [tail, 100 - tail])
    return float(point), (float(low), float(high))


def ratio(sums: Shaped[np.ndarray, "*side resample 2"]) -> Float[np.ndarray, "*side resample"]:
    """Divide the first sum by the second, for example for tokens per step."""
    quotients: Float[np.ndarray, "*side resample"] = sums[..., 0] / sums[..., 1]
    return quotients


def ratio_of_ratios(sums: Shaped[np.ndarray, "2 resample 2"]) -> Float[np.ndarray, " resample"]:
    """Divide the first side's `ratio` by the second side's."""
    first, second = ratio(sums)
    return first / second


def time_split(profiled: Sequence[EvalRecord]) -> dict[str, float] | None:
    """Compute each phase's share of the decode time in profiled records, prefill excluded.

    Returns None if there was no step.
    """
    runs = batches(profiled)
    phases = [record.phase_seconds for record in runs if record.phase_seconds is not None]
    total = sum(record.decode_seconds for record in runs)
    if not any(record.num_steps for record in runs):
        return None
    shares = {name: sum(getattr(phase, name) for phase in phases) / total for name in ("draft", "verify", "accept")}
    return {**shares, "rest": 1 - sum(shares.values())}


def draft_seconds_per_step(profiled: Sequence[EvalRecord]) -> float | None:
    """Compute the drafter's seconds per verify step of a batch, in profiled records.

    Returns None if there was no step.
    """
    runs = batches(profiled)
    num_steps = sum(record.num_steps for record in runs)
    seconds = sum(record.phase_seconds.draft for record in runs if record.phase_seconds is not None)
    return seconds / num_steps if num_steps else None


def relative_draft_cost(profiled_baseline: Sequence[EvalRecord], profiled: Sequence[EvalRecord]) -> float | None:
    """Compute rho, the drafter's relative cost.

    It is the drafter's seconds per step over the seconds of a plain decode step, both with phase
    timers on.
    """
    plain = batches(profiled_baseline)
    plain_steps = sum(record.num_steps for record in plain)
    draft_seconds = draft_seconds_per_step(profiled)
    if not plain_steps or draft_seconds is None:
        return None
    return draft_seconds / (sum(record.decode_seconds for record in plain) / plain_steps)


def ceiling(tau: float | None, rho: float | None) -> float | None:
    """Compute tau / (1 + rho): the speedup if verifying a tree cost no more than a plain step.

    This value is computed, not measured.
    """
    return None if tau is None or rho is None else tau / (1 + rho)


@lru_cache(maxsize=8)
def _resample_counts(seed: int, num_units: int) -> Int[np.ndarray, "resample unit"]:
    """Sample how often each resample contains each unit.

    All methods use the same resamples, so their comparison is fair.
    """
    return np.random.default_rng(seed).multinomial(num_units, [1 / num_units] * num_units, size=NUM_RESAMPLES)


def by_category(baseline: Sequence[EvalRecord], records: Sequence[EvalRecord], *, seed: int) -> dict[str, dict[str, Any]]:
    """Compute tokens per step and speedup of each category, in the order of first appearance.

    A category that shares a batch with another one can't be timed alone, so it has no speedup.
    """
    categories: dict[BatchKey, set[str]] = defaultdict(set)
    for record in records:
        categories[record.batch_key].add(record.category)
    groups: dict[str, tuple[list[EvalRecord], list[EvalRecord]]] = defaultdict(lambda: ([], []))
    for side, group in enumerate((baseline, records)):
        for record in group:
            groups[record.category][side].append(record)
    result = {}
    for category, (plain, timed) in groups.items():
        is_apart = all(len(categories[record.batch_key]) == 1 for record in timed)
        ratio, interval = speedup(plain, timed, seed=seed) if is_apart else (None, None)
        result[category] = {
            "num_prompts": num_prompts(timed),
            "num_steps": sum(record.num_steps for record in timed),
            "tokens_per_step": tokens_per_step(timed),
            "accepted_by": accepted_by(timed),
            "speedup": ratio,
            "speedup_ci95": interval,
        }
    return result


def num_prompts(records: Iterable[EvalRecord]) -> int:
    return len({record.prompt_id for record in records})


def _both_sides(baseline: Sequence[EvalRecord], records: Sequence[EvalRecord]) -> Float[np.ndarray, "2 unit 2"]:
    """Sum seconds and tokens of both sides by unit: [side, unit, (seconds, tokens)]."""
    return np.stack([_by_unit(baseline, records), _by_unit(records, baseline)])


def _by_unit(records: Sequence[EvalRecord], others: Sequence[EvalRecord]) -> Float[np.ndarray, "unit 2"]:
    """Sum seconds and tokens by prompt, or by batch, in sorted order.

    Both sides must have measured the same answers, in the same batches.
    """
    keys, other_keys = ({(r.suite, r.prompt_id, r.turn, r.batch_size, r.unit) for r in side} for side in (records, others))
    if keys != other_keys or not keys:
        raise ValueError(f"{len(keys ^ other_keys)} generations were measured with only one of the two methods; finish the run")
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in batches(records):
        sums[record.batch_size, str(record.unit)][0] += record.seconds
    for record in records:
        sums[record.batch_size, str(record.unit)][1] += len(record.token_ids)
    return np.array([sums[unit] for unit in sorted(sums)])
