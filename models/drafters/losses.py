"""The losses that a drafter can be trained with, by name. `scoring` computes them."""

from enum import StrEnum, auto

WEIGHTS = ("uniform", "dpace")
"""Weights of labels: see `Objective.weights`."""
DPACE_FLOOR = 0.5
"""Least confidence that D-PACE takes a draft token to have (alpha in the paper, which found values
from 0.3 to 0.7 about as good)."""
TEACHERS = ("full", "top_k")
"""Distributions of the target to learn from: see `Objective.teacher`."""


class LossKind(StrEnum):
    """A loss of one label.

    p is the target's distribution, q the drafter's. The overlap is sum min(p, q). It is the
    probability that speculative sampling accepts the draft token (arXiv 2211.17192, section 3.3).
    `kl_acceptance` weights its parts by the label's current overlap, as a
    constant: KL dominates where the drafter is weak. No weight is a mean over a batch, so a loss
    doesn't depend on how a step is split into micro-batches.
    """

    cross_entropy = auto()
    """-log q(label)"""
    kl = auto()
    """KL(p || q)"""
    kl_acceptance = auto()
    """overlap x -log overlap + (1 - overlap) x kl"""

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads p, not just the label."""
        return self is not LossKind.cross_entropy
