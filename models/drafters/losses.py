"""The losses that a drafter can be trained with, by name. `objective` computes them."""

from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum, auto
from typing import Any

from pydantic_core import PydanticCustomError

WEIGHTS = ("uniform", "dpace")
DPACE_FLOOR = 0.5
"""Least confidence that D-PACE takes a draft token to have (alpha in the paper, which found values
from 0.3 to 0.7 about as good)."""
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
    def reads(self) -> frozenset[str]:
        """The fields of `LabelLoss` that the loss reads."""
        direct = {"overlap"} if self.is_total_variation or self.is_acceptance else set()
        return frozenset(direct | ({"kl"} if self.is_blend else set()) or {self.value})

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss reads p, not just the label."""
        return self is not LossKind.cross_entropy

    @property
    def is_total_variation(self) -> bool:
        """Whether 1 - overlap is a part of the loss."""
        return self in (LossKind.tv, LossKind.kl_tv)

    @property
    def is_acceptance(self) -> bool:
        """Whether -log overlap is a part of the loss."""
        return self in (LossKind.acceptance, LossKind.kl_acceptance)

    @property
    def is_blend(self) -> bool:
        """Whether the loss blends KL with a term of the overlap."""
        return self in (LossKind.kl_tv, LossKind.kl_acceptance)


LossChoice = LossKind | Mapping[LossKind, float]
"""A loss, or a mixture: the sum of several losses, each times its weight."""
MIXTURE_EXAMPLE = "{cross_entropy: 0.1, tv: 0.9}"
MAX_WEIGHT = 1e6
LOSSES = tuple(kind.value for kind in LossKind)


def terms_of(loss: LossChoice) -> dict[LossKind, float]:
    """Return the weights of the losses whose sum is trained, in the order of `LossKind`.

    The order of a sum changes its rounding, and a mapping's order should change nothing.
    """
    weights = {loss: 1.0} if isinstance(loss, LossKind) else loss
    return {kind: weights[kind] for kind in LossKind if kind in weights}


def needs_teacher(loss: LossChoice) -> bool:
    """Whether a loss, or one of a mixture, reads p."""
    return any(kind.needs_teacher for kind in terms_of(loss))


def describe_loss(loss: LossChoice) -> str:
    """Describe a loss: `kl`, or `0.1 cross_entropy + 0.9 tv`."""
    return loss.value if isinstance(loss, LossKind) else " + ".join(f"{w:g} {kind}" for kind, w in terms_of(loss).items())


def check_loss(value: Any) -> LossKind | dict[LossKind, float]:
    """Return the loss that a name or a mapping of names to weights means.

    A mixture of one loss with weight 1 is that loss. Raises an error for other values.
    """
    names = ", ".join(LOSSES)
    if value in LOSSES:
        return LossKind(value)
    if not isinstance(value, Mapping) or not value:
        raise _wrong(f"must be one of {names}; or a mixture, with a weight for each of its losses: {MIXTURE_EXAMPLE}")
    for name, weight in value.items():
        if name not in LOSSES:
            close = get_close_matches(str(name), LOSSES, 1)
            raise _wrong(f"has {name!r}, which is no loss; {f'did you mean {close[0]}? T' if close else 't'}here are {names}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
            rule = f"a weight must be a number above 0, at most {MAX_WEIGHT:g}"
            raise _wrong(f"gives {name} the weight {weight!r}; {rule} (leave out what has no weight)")
    terms = terms_of({LossKind(name): float(weight) for name, weight in value.items()})
    return next(iter(terms)) if list(terms.values()) == [1.0] else terms


def _wrong(problem: str) -> PydanticCustomError:
    return PydanticCustomError("loss", "{problem}", {"problem": problem})
