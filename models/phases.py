"""The phases of a decode step, in a module that imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Seconds of a step's phases.

    Measured only on request, because each measurement synchronises the accelerator.
    """

    draft: float
    verify: float
    accept: float
    """Acceptance, the cache's commit, and the drafter's new state."""
