"""Sources of the tokens that a merged drafter's steps emitted, in words and shares.

A merged drafter combines the proposals of several sources. A draft token may be proposed by one of
them alone, or by several together. The last token of each step is the target's: the bonus token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..records.labels import title_of
from .rows import Row

SEVERAL, BONUS = "several", "bonus"
"""Names of the shares of draft tokens that several sources proposed, and of bonus tokens."""


def source_shares(values: Mapping[str, Any]) -> dict[str, float] | None:
    """Compute the shares of the emitted tokens by source, for a row or for one of its categories.

    The keys are the names of the sources, then SEVERAL, then BONUS. Tokens that an answer's end cut
    off count too. Returns None for a drafter that isn't merged, and if there was no step.
    """
    counts = values["accepted_by"]
    if counts is None or not (num_steps := _num_steps(values)):
        return None
    total = sum(counts.values()) + num_steps
    alone = {name: count / total for name, count in counts.items() if "+" not in name}
    together = sum(count for name, count in counts.items() if "+" in name)
    shared = {SEVERAL: together / total} if len(alone) > 1 else {}
    return {**alone, **shared, BONUS: num_steps / total}


def shares_text(row: Row) -> str:
    """Format the shares of a row: `ReDrafter 31 %, suffix 20 %, several 9 %, bonus 40 %`."""
    shares = source_shares(row) or {}
    return ", ".join(f"{title_of(name)} {100 * share:.0f} %" for name, share in shares.items())


def merged_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the rows of merged drafters whose records have the sources."""
    return [row for row in rows if source_shares(row) is not None]


def _num_steps(values: Mapping[str, Any]) -> int:
    """Count the verify steps of a row, or of a category."""
    return int(values["num_steps"]) if "num_steps" in values else sum(values["accepted_histogram"])
