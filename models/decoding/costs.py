"""What passes cost: running medians of measured seconds, and the number of nodes that is worth them.

All costs are medians, so that a stall moves nothing. Nothing here reads a clock or random numbers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median_low

WIDTHS = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255, 383, 511)
"""Numbers of nodes that are considered, besides the largest.

A pass reads one token more, and the costs of kernels jump after powers of two.
"""
WINDOW = 5
"""Measurements that a median is taken of."""
REVISIT_STEPS = 48
"""After so many steps a width next to the best one is measured again."""
STALL = 3.0
"""A step that takes more than this times its expected seconds counts as this much. A measurement that
is below the median by this factor shows that those before it were stalls."""


def widths_up_to(max_nodes: int) -> tuple[int, ...]:
    """Return the numbers of nodes that are considered."""
    return (*(width for width in WIDTHS if width < max_nodes), max_nodes)


@dataclass(slots=True)
class Seconds:
    """Running median of one cost."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    median: float = 0.0

    def add(self, seconds: float) -> None:
        # A measurement is never far too low by chance.
        if STALL * seconds < self.median:
            self.samples.clear()
        self.samples.append(seconds)
        self.median = median_low(self.samples)


class StepSeconds:
    """T(n): seconds of a step after drafting, by the number of nodes that are verified.

    `like` are those of another batch size: until a width is measured, its seconds are the other's,
    times the ratio of those that both have. `table` has T(n) for n = 0, 1, ..., `max_nodes`; it is
    zero before the first measurement.
    """

    def __init__(self, max_nodes: int, like: "StepSeconds | None" = None) -> None:
        self.widths = widths_up_to(max_nodes)
        self.measured = [Seconds() for _ in self.widths]
        self.nodes = [Seconds() for _ in self.widths]
        """The number of nodes of the measurements: between the width below and this one."""
        self.last_steps = [-REVISIT_STEPS - 1] * len(self.widths)
        """The step in which each width was measured last."""
        self.borrowed: list[float] = [] if like is None else like.table
        self.table: list[float] = [0.0] * (max_nodes + 1) if like is None else like.table

    def index(self, num_nodes: int) -> int:
        """Return the index of the smallest width of at least so many nodes."""
        return next(index for index, width in enumerate(self.widths) if width >= num_nodes)

    def add(self, num_nodes: int, seconds: float, step: int) -> None:
        """Add a measurement, and compute the table anew if a median has changed."""
        index = self.index(num_nodes)
        before = self.measured[index].median, self.nodes[index].median
        self.measured[index].add(seconds)
        self.nodes[index].add(float(num_nodes))
        self.last_steps[index] = step
        if before != (self.measured[index].median, self.nodes[index].median):
            self.table = interpolated(self._points(), len(self.table))

    def revisited(self, best: int, most: int, step: int) -> int:
        """Return the best width; now and then one next to it that wasn't measured for long.

        `most` is the number of nodes that there are.
        """
        if step % (REVISIT_STEPS // 3) == 0:
            index = self.index(best)
            for other in (index + 1, index - 1):
                if 0 <= other < len(self.widths) and step - self.last_steps[other] > REVISIT_STEPS:
                    return min(self.widths[other], most)
        return best

    def _points(self) -> list[tuple[int, float]]:
        """Return nodes and seconds of each width: measured, else borrowed, else left out."""
        measured = {
            width: (int(nodes.median), cost.median)
            for width, nodes, cost in zip(self.widths, self.nodes, self.measured, strict=True)
            if cost.samples
        }
        if not self.borrowed:
            return list(measured.values())
        scale = median_low(seconds / max(self.borrowed[nodes], 1e-9) for nodes, seconds in measured.values())
        return [measured.get(width, (width, scale * self.borrowed[width])) for width in self.widths]


def interpolated(points: Sequence[tuple[int, float]], length: int) -> list[float]:
    """Return the costs of 0, 1, ... nodes from measured points (nodes, seconds), in order.

    More nodes never cost less: a point above a later one was disturbed and is lowered to it. Behind
    the last point the costs rise as before it.
    """
    # 1. Lower the points that are above a later one.
    lowest, falling = points[-1][1], []
    for nodes, seconds in reversed(points):
        lowest = min(lowest, seconds)
        falling.append((nodes, lowest))
    points = falling[::-1]
    # 2. Interpolate between the points.
    table = [points[0][1]] * min(points[0][0] + 1, length)
    slope = 0.0
    for (left, low), (right, high) in pairwise(points):
        if right > left:
            slope = (high - low) / (right - left)
            table += [low + slope * step for step in range(1, right - left + 1)]
    # 3. Extrapolate.
    table += [table[-1] + slope * step for step in range(1, length - len(table) + 1)]
    return table[:length]


def lowest_slopes(table: Sequence[float]) -> list[float]:
    """Return, for each number of nodes, the least seconds per further node of any larger tree.

    The last number has no larger tree: infinity.
    """
    # The lower convex hull from the right: its first edge from each point is the lowest slope.
    slopes, hull = [float("inf")] * len(table), [len(table) - 1]
    for n in range(len(table) - 2, -1, -1):
        while (slope := (table[hull[-1]] - table[n]) / (hull[-1] - n)) >= slopes[hull[-1]]:
            hull.pop()
        slopes[n] = slope
        hull.append(n)
    return slopes


def mean_sums(rows: Sequence[Sequence[float]], *, initial: float = 0.0) -> list[float]:
    """Return the sums of the first n numbers of a row, n = 0, 1, ..., averaged over rows."""
    sums = [list(accumulate(row, initial=initial)) for row in rows]
    if len(sums) == 1:
        return sums[0]
    longest = max(map(len, sums))
    return [sum(row[min(n, len(row) - 1)] for row in sums) / len(sums) for n in range(longest)]


def best_width(gains: Sequence[float], table: Sequence[float], rate: float, widths: Sequence[int]) -> tuple[int, float]:
    """Return the number of nodes that maximises tokens - rate x seconds, and the maximum.

    `gains[n]` are the expected tokens of the n likeliest nodes, and the last entry is that of all
    nodes. `table[n]` are the seconds of n nodes, and `widths` the numbers of nodes to consider.
    """
    most = len(gains) - 1
    best, value = 0, gains[0] - rate * table[0]
    for width in widths:
        nodes = min(width, most)
        if gains[nodes] - rate * table[nodes] > value:
            best, value = nodes, gains[nodes] - rate * table[nodes]
        if width >= most:
            break
    return best, value
