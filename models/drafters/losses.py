"""The losses that a drafter can be trained with, by name. `objective` computes them."""

from enum import StrEnum, auto

WEIGHTS = ("uniform", "reached", "dpace", "missed_by")
MISSED_BY = "missed_by:"
"""Beginning of `train.label_weights` before the name of another drafter."""
DPACE_FLOOR = 0.5
"""Least confidence that D-PACE takes a draft token to have (alpha in the paper, which found values
from 0.3 to 0.7 about as good)."""
LEAST_WEIGHT = 0.1
"""Least weight of a label under `missed_by`.

The other drafter may miss a token that it proposes here: in decoding it has another text. And where
both propose, the trained drafter's probabilities must not become arbitrary."""
TEACHERS = ("full", "top_k")


class LossKind(StrEnum):
    """A loss of one label.

    p is the target's distribution, q the drafter's. The overlap is sum min(p, q). It is the
    probability that speculative sampling accepts the draft token (arXiv 2211.17192, section 3.3).
    `reverse_kl` prefers to miss parts of p rather than to propose tokens that p lacks (arXiv
    2306.08543, section 2). The two blends weight their parts by the label's current overlap, as a
    constant: KL dominates where the drafter is weak. No weight is a mean over a batch, so a loss
    doesn't depend on how a step is split into micro-batches.
    """

    cross_entropy = auto()
    """-log q(label)"""
    kl = auto()
    """KL(p || q)"""
    reverse_kl = auto()
    """KL(q || p)"""
    tv = auto()
    """1 - overlap: the total variation distance of p and q"""
    acceptance = auto()
    """-log overlap"""
    kl_tv = auto()
    """overlap x tv + (1 - overlap) x kl"""
    kl_acceptance = auto()
    """overlap x acceptance + (1 - overlap) x kl"""

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads p, not just the label."""
        return self is not LossKind.cross_entropy

    @property
    def reads_overlap(self) -> bool:
        """Whether the overlap is a part of the loss."""
        return self.is_total_variation or self in (LossKind.acceptance, LossKind.kl_acceptance)

    @property
    def is_total_variation(self) -> bool:
        """Whether the overlap's term is 1 - overlap; otherwise it is -log overlap."""
        return self in (LossKind.tv, LossKind.kl_tv)

    @property
    def is_blend(self) -> bool:
        """Whether the loss blends KL with a term of the overlap."""
        return self in (LossKind.kl_tv, LossKind.kl_acceptance)
