"""Runs: passes of a target that are under way at the same time.

A target in stages reads several pieces of a draft tree at once: while its last stage reads one run,
its first stage reads the next. The **window** is the root (the last committed token, entry 0) and
the nodes that were sent. Each run first drops entries of the window, then appends its own.

    window before      run                                        window after
    0 ── 1 ── 2        keep (0, 1, 2), of which 2 are committed   0 ── 1 ── 2
          └── 3        tokens of 2 new entries, num_read 1        (0 was entry 2)

Every stage executes the same runs in the same order. Pure data.
"""

from dataclasses import dataclass, fields
from itertools import count

from .types import TargetOutput

run_numbers = count()
"""Numbers of the runs of this process: no two runs share one, whichever target reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What happens to the window before a run is read. All other entries are dropped."""

    entries: tuple[int, ...]
    """Old entries in their new order: the committed ones, then those that stay in the window."""
    num_committed: int
    """How many of `entries`, from the first on, join the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass of the target over new entries of the window."""

    number: int
    """From `run_numbers`. A later run has a larger number, also over texts."""
    keep: Keep | None
    """None: the window stays as it is."""
    tokens: tuple[int, ...]
    """Tokens of the new entries. The first one is the root if `num_read` is 0."""
    parents: tuple[int, ...]
    """Parents of all nodes of the window, those of entries 1, 2, ..., after `keep`. They are
    indexes of nodes as in `DraftTree`: the parent of entry e + 1 is entry `parents[e] + 1`, and
    NO_NODE is the root."""
    num_read: int
    """Entries that earlier runs read, after `keep`. The new entries follow them."""

    def __post_init__(self) -> None:
        assert self.tokens
        assert 1 + len(self.parents) == self.num_read + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The target's answer to a run."""

    number: int
    """The run's number."""
    output: TargetOutput | None
    """Output of the run's new entries, [1, entry, ...]; None if the run was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """Counts of a target's runs so far, over all texts."""

    num_runs: int = 0
    num_entries: int = 0
    """New entries of all runs."""
    num_cancelled: int = 0
    """Runs that were answered without an output."""
    num_cancelled_entries: int = 0

    def __add__(self, other: "RunCounts") -> "RunCounts":
        return RunCounts(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __sub__(self, earlier: "RunCounts") -> "RunCounts":
        return RunCounts(**{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)})
