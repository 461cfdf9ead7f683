"""Answers that took oddly long: a busy machine's, most of the time. They are told, and stay in every figure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..records.records import EvalRecord
from .stats import batches

MIN_BATCHES = 5
"""Fewer say nothing about what is usual."""
NUM_DEVIATIONS = 5
"""Robust standard deviations above the median from which on something is odd."""
MIN_RATIO = 1.5
"""And at least this many times the median: a long text alone takes somewhat longer than a short one."""
MAD_TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation (1 / 0.6745)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """An answer, or a batch of them, whose seconds per step are far above those of the same method's others."""

    prompt_ids: list[str]
    turn: int
    """0 for a prompt's first turn."""
    repeat: int
    seconds_per_step: float
    """Of decoding, the prefill excluded."""
    ratio: float
    """Over the median of the method on this suite, at this temperature and batch size."""


def find_outliers(records: Sequence[EvalRecord]) -> list[Outlier]:
    """Those of one method on one suite at one temperature and batch size, the worst first.

    Robust: median and median absolute deviation, which the outliers themselves hardly move. Records with phase timers are left
    out.
    """
    timed = [record for record in records if not record.profiled]
    values = {
        record.batch_key: (record, record.decode_seconds / record.num_steps) for record in batches(timed) if record.num_steps
    }
    if len(values) < MIN_BATCHES:
        return []
    median = statistics.median(value for _, value in values.values())
    deviation = MAD_TO_DEVIATION * statistics.median(abs(value - median) for _, value in values.values())
    limit = max(median + NUM_DEVIATIONS * deviation, MIN_RATIO * median)
    found = [
        Outlier(
            prompt_ids=[other.prompt_id for other in timed if other.batch_key == key],
            turn=record.turn,
            repeat=record.repeat,
            seconds_per_step=value,
            ratio=value / median,
        )
        for key, (record, value) in values.items()
        if value > limit
    ]
    return sorted(found, key=lambda outlier: outlier.ratio, reverse=True)
