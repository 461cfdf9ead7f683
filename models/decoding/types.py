"""What the target answers and what an acceptance rule decides."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from ..phases import PhaseSeconds
from .stopping import Finish

NO_NODE = -1
"""Pads node indexes: "no such node"; as a parent it is the last committed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """One forward pass of the target.

    Of `verify`: entry 0 belongs to the last committed token, entry n + 1 to node n of the tree. Of `prefill`: `hidden_states`
    has one entry per prompt token (meaningless on padding) and `logits` only the last one's.
    `hidden_states` are the last layer's, after the final norm: what the target's head reads.
    """

    logits: Float[torch.Tensor, "batch entry vocab"]
    hidden_states: Float[torch.Tensor, "batch hidden_entry hidden"]
    features: Float[torch.Tensor, "batch hidden_entry feature"] | None = None
    """The inputs of the layers that were asked for, side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The path of draft tokens that the target accepts, and the bonus token after it.

    `path[b, d]` is the index of the accepted node at depth d, NO_NODE past the end. `num_accepted` counts draft tokens only,
    so a step emits `num_accepted + 1` tokens.
    """

    path: Int[torch.Tensor, "batch depth"]
    num_accepted: Int[torch.Tensor, " batch"]
    bonus_token: Int[torch.Tensor, " batch"]

    def select(self, rows: Sequence[int]) -> "Acceptance":
        """These rows of the batch only."""
        return Acceptance(path=self.path[rows], num_accepted=self.num_accepted[rows], bonus_token=self.bonus_token[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one turn of the decode loop emitted, already cut where answers end.

    The first step is the prefill: it emits the target's first token and has `is_prefill` set. `rows` are the prompts that were
    still being answered; the other tuples have an entry for each of them.
    """

    rows: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    finishes: tuple[Finish | None, ...]
    """Why the answer ended with this step; None where it goes on."""
    num_accepted: tuple[int, ...]
    """Draft tokens that the target accepted, before any cut."""
    num_nodes: int
    """Draft tokens per row that the target read."""
    drawn: bool
    """Whether its draft tokens were drawn at random (the tree had `child_probs`)."""
    is_prefill: bool
    seconds: PhaseSeconds | None = None
    """None unless timed."""
    links: tuple[Int[torch.Tensor, "batch node"], Int[torch.Tensor, "batch node"]] | None = None
    """The tree's tokens and parents, for whoever studies trees afterwards; None unless timed."""
