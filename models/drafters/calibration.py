"""Calibration: how often a draft token is accepted, by its source and the source's evidence.

A drafter's own score is no probability of acceptance: a greedy target accepts the drafter's first
token more often than its probability, and training-free drafters only count. So hits and misses are
counted, in cells of (source, depth, bin of the evidence). Where several sources have tokens after
the same text, a second table counts by the sources that propose a token, the sources that propose
any token there, and the bin of the highest single estimate: agreement is strong evidence.

Each text has its own counts, since texts differ. They start from the drafter's, which all its texts
teach, with the weight of few observations. Counts decide which trees are drafted, never a token.
"""

from bisect import bisect
from collections.abc import Sequence

BIN_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Bounds of the bins of probabilities."""
MAX_DEPTH = 4
"""Deeper draft tokens are counted as if they were at this depth."""
MAX_SOURCES = 8

SCORE_WEIGHT = 8.0
"""How many observations a source's own score counts for."""
AGREEMENT_WEIGHT = 8.0
"""How many observations the estimate from the single sources counts for, where several sources propose."""
MAX_TOTAL = 120.0
"""Cells with more observations are halved, so that the recent text counts most."""
MAX_PRIOR = 30.0
"""Most observations of earlier texts that a cell counts for, so that a text can correct it."""

MAX_ESTIMATE = 0.995
"""No token is sure to be accepted."""

OutcomeCounts = dict[int, tuple[float, float]]
"""Hits and observations of each cell, by its key. A missing cell has none."""
NO_COUNTS = (0.0, 0.0)

BINS_PER_DEPTH = 64
AGREEMENTS = MAX_SOURCES * MAX_DEPTH * BINS_PER_DEPTH
"""First key of the second table."""


def source_key(source: int, depth: int) -> int:
    """Return the key of bin 0 of a source's tokens at a depth; the other bins' keys follow."""
    return (source * MAX_DEPTH + min(depth, MAX_DEPTH) - 1) * BINS_PER_DEPTH


def agreement_key(proposed_by: int, present: int, estimate: float) -> int:
    """Return the key of a cell of the second table. The sources are bitmasks."""
    return AGREEMENTS + ((proposed_by << MAX_SOURCES) + present) * BINS_PER_DEPTH + bisect(BIN_BOUNDS, estimate)


def start_of_text(counts: OutcomeCounts) -> OutcomeCounts:
    """Return the counts that a text starts from: those of earlier texts, of limited weight."""
    return {
        key: (hits, total) if total <= MAX_PRIOR else (hits * MAX_PRIOR / total, MAX_PRIOR)
        for key, (hits, total) in counts.items()
    }


def teach(counts: OutcomeCounts, keys: Sequence[int], was_hit: bool) -> None:
    """Count an observation in each of these cells."""
    for key in keys:
        hits, total = counts.get(key, NO_COUNTS)
        if total >= MAX_TOTAL:
            hits, total = hits / 2, total / 2
        counts[key] = (hits + was_hit, total + 1)
