"""The phases of a decode step; apart from the loop, so that whoever reads their times needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Where a step's time went. Taken only on request, since an accelerator must be synchronised after each phase."""

    draft: float
    verify: float
    accept: float
    """Acceptance, the cache's commit, and the drafter's new state."""
