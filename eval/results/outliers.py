"""Outliers: answers that took far longer than usual, mostly because the machine was busy.

Summaries list them, and every figure includes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.deviation import median_and_deviation
from ..records.records import EvalRecord
from .stats import batches

MIN_BATCHES = 5
"""Fewest batches from which a usual time can be computed."""
NUM_DEVIATIONS = 5
"""An outlier lies more than this number of robust standard deviations above the median."""
MIN_RATIO = 1.5
"""An outlier also exceeds this multiple of the median: a long text takes somewhat longer than a
short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """Answer, or batch of answers, with far more seconds per step than the method's others."""

    prompt_ids: list[str]
    turn: int
    """0 for a prompt's first turn."""
    repeat: int
    seconds_per_step: float
    """Seconds of decoding per step, prefill excluded."""
    ratio: float
    """Ratio to the median of the method on this suite, at this temperature and batch size."""


def find_outliers(records: Sequence[EvalRecord]) -> list[Outlier]:
    """Find the outliers among one method's answers under one setting, the worst first.

    A setting is a suite, a temperature and a batch size. Records with phase timers are left out.
    """
    timed = [record for record in records if not record.profiled]
    values = {
        record.batch_key: (record, record.decode_seconds / record.num_steps) for record in batches(timed) if record.num_steps
    }
    if len(values) < MIN_BATCHES:
        return []
    median, deviation = median_and_deviation([value for _, value in values.values()])
    limit = max(median + NUM_DEVIATIONS * deviation, MIN_RATIO * median)
    outliers = [
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
    return sorted(outliers, key=lambda outlier: outlier.ratio, reverse=True)
