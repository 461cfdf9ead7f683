"""Candidates for draft trees, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates for the draft tree of one row, by one drafter: nodes, and how likely they are."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """See `tree.Links`."""
    scores: Sequence[float]
    """The drafter's estimate that a candidate is accepted if its parent is, between 0 and 1."""
    bins: Sequence[int]
    """The drafter's evidence for each candidate, as a number. Candidates of one bin are about as likely
    to be accepted: calibration counts by bin."""


NO_CANDIDATES = Candidates(tokens=(), parents=(), scores=(), bins=())
