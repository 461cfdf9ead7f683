"""Seconds and counts of decoding, in a module that imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add, sub
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Seconds of a step's phases.

    Measured only on request, because each measurement synchronises the accelerator.
    """

    draft: float
    verify: float
    accept: float
    """Acceptance, the cache's commit, and the drafter's new state."""


class _Counts:
    """Counts that are added, and subtracted: the difference of two counts the time between them."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return self._joined(add, other)

    def __sub__(self, earlier: Self) -> Self:
        return self._joined(sub, earlier)

    def _joined(self, join: Callable[[Any, Any], Any], other: Self) -> Self:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type] # only dataclasses are made of it
        return type(self)(**{name: join(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounts(_Counts):
    """Counts of a target with a memory budget: since its start, or over a batch's decoding, prefill included.

    Bytes that were read ahead count in the batch that was decoded when they arrived.
    """

    passes: int = 0
    """Passes that began, in the order of the first unit that isn't resident."""
    bytes_read: int = 0
    """Bytes of weights read from the files, those read in vain included."""
    read_seconds: float = 0.0
    """Seconds of these reads; most run beside the pass."""
    wait_seconds: float = 0.0
    """Seconds in which passes waited for weights, drafting in them included."""
    drafts: int = 0
    """Draft passes during waits."""
    draft_seconds: float = 0.0
    late_drafts: int = 0
    """Draft passes that took longer than the wait, and so delayed the target's pass."""
    late_seconds: float = 0.0
    """Seconds by which they delayed it."""
    restarts: int = 0
    """Passes that began while the stream expected another unit: passes before them ended early. Old records count none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts(_Counts):
    """Counts of the passes of a target in stages: since its start, or over an answer's verify steps.

    A run is a pass over some entries: draft tokens, and the last token of the text where no earlier
    run has read it.
    """

    num_runs: int = 0
    num_entries: int = 0
    """New entries of all runs."""
    num_cancelled: int = 0
    """Runs that were cancelled before the last stage had read them. Runs that were under way when
    the answer ended don't count."""
    num_cancelled_entries: int = 0
