"""Statistics of a finished distillation, `stats.json`: figures for readers."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .fields import RecordedCount

STATS_FILE = "stats.json"
Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTotals:
    """Content of `distill/stats.json`. `process_seconds` are summed over the processes."""

    num_examples: RecordedCount
    num_text_tokens: RecordedCount
    num_positions: RecordedCount
    agreement: Measured
    """Share of the texts' tokens that are the target's greedy ones."""
    num_branch_tokens: RecordedCount
    process_seconds: Measured
    positions_per_process_second: Measured
    peak_memory_bytes: RecordedCount | None
    dropped: dict[str, RecordedCount]
    """Number of records that couldn't be used, by reason."""
