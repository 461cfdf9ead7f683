"""What training minimises, and what it measures: the same for every kind of drafter (`scoring` computes it)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import nn

from .losses import TEACHERS, WEIGHTS, LossKind

LOSS_DECAY = 0.8
"""Factor of the loss from each depth to the next (Medusa, section 2.2.1; EAGLE-3, section 3.2)."""
HIT_RANKS = 10
"""Training reports how often the label is among the 1..HIT_RANKS most probable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Sums and counts by depth, never means: divide once, after adding batches and processes.

    `depth` counts draft tokens from 0. `counts[d]` is the number of positions with a label at depth d.
    `hits[d, k]` counts positions whose label is among the k + 1 most probable tokens at depth d.
    `joint_hits[d]` counts positions whose labels at depths 0..d are all the most probable token; a
    chain would have accepted them. `sums` cover the trained depths, which are the first ones and may
    be fewer; their mean is over the labels of those depths only. In training, EAGLE counts its
    untrained depths at a sample of the positions.
    """

    sums: Float[torch.Tensor, " trained_depth"]
    counts: Int[torch.Tensor, " depth"]
    hits: Int[torch.Tensor, "depth rank"]
    joint_hits: Int[torch.Tensor, " depth"]

    def decayed(self, objective: "Objective") -> "Loss":
        """Multiply the sum of depth d by LOSS_DECAY to the power of d, unless weights of labels stand for it."""
        if objective.weights == "dpace":
            return self
        return replace(self, sums=self.sums * LOSS_DECAY ** torch.arange(len(self.sums), device=self.sums.device))


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What training minimises, the same for every kind of drafter.

    p is known where a continuation follows the text, since the target has read that. Elsewhere p is
    taken as one-hot at the label. If labels are samples from p, then the one-hot distributions are p on average, so
    cross-entropy and `kl` have the same gradient on average as with p itself.
    """

    loss: LossKind = LossKind.cross_entropy
    weights: str = "uniform"
    """`uniform`, or `dpace`, which weights labels by `dpace_weights`, in place of a drafter's own
    factors of depths."""
    head: nn.Linear | None = None
    """The target's head, frozen: it maps hidden states to p. With `full`, all losses except
    cross-entropy need it."""
    teacher: str = "full"
    """`full`: p of all tokens. `top_k`: p of the top-k tokens in the batch, and of "any other" as
    one more outcome. q is merged in the same way. Merging outcomes makes no divergence larger and
    no overlap smaller. So training minimises a bound of the loss, which is exact if k is the whole
    vocabulary. Nothing constrains how q divides the remaining probability."""

    def __post_init__(self) -> None:
        for name, names in (("weights", WEIGHTS), ("teacher", TEACHERS)):
            if getattr(self, name) not in names:
                raise ValueError(f"the objective has no {name} {getattr(self, name)!r}; choose one of {', '.join(names)}")
