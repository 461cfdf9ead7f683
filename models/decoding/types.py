"""The values of a decode step: what the target computes, and what an acceptance rule decides."""

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


@dataclass(frozen=True, slots=True)
class Counts:
    """A number for each row of a batch, as the device and the host know it.

    Both travel together: code on the device must not wait for the host, and the host must not read
    the device to choose shapes.
    """

    device: Int[torch.Tensor, " batch"]
    host: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[int], device: torch.device) -> "Counts":
        """Copy the host's numbers to the device."""
        return cls(torch.tensor(values, dtype=torch.long, device=device), tuple(values))

    def __add__(self, number: int) -> "Counts":
        return Counts(self.device + number, tuple(count + number for count in self.host))

    def __neg__(self) -> "Counts":
        return Counts(-self.device, tuple(-count for count in self.host))

    def select(self, rows: Sequence[int]) -> "Counts":
        """Return the numbers of these rows only."""
        return Counts(self.device[rows], tuple(self.host[row] for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """The accepted draft tokens of a step, after the host has read how many they are.

    `nodes[b, d]` is the accepted node of row b at depth d, NO_NODE past the end of the row's path.
    It is as wide as the longest of these paths.
    """

    nodes: Int[torch.Tensor, "batch accepted"]
    num_accepted: Counts
    """Draft tokens only: a step emits one token more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The path of draft tokens that the target accepts, and the bonus token after it.

    `path[b, d]` is the index of the accepted node at depth d, NO_NODE past the end. `num_accepted` counts draft tokens only,
    so a step emits `num_accepted + 1` tokens. All of it is on the device: a rule doesn't wait for the host.
    """

    path: Int[torch.Tensor, "batch depth"]
    num_accepted: Int[torch.Tensor, " batch"]
    bonus_token: Int[torch.Tensor, " batch"]

    def select(self, rows: Sequence[int]) -> "Acceptance":
        """Return the decision for these rows of the batch only."""
        return Acceptance(path=self.path[rows], num_accepted=self.num_accepted[rows], bonus_token=self.bonus_token[rows])

    def accepted_path(self, num_accepted: Sequence[int]) -> AcceptedPath:
        """Return the path, given `num_accepted` as the host has read it."""
        longest = max(num_accepted)
        nodes = self.path if longest == self.path.shape[1] else self.path[:, :longest]
        return AcceptedPath(nodes=nodes, num_accepted=Counts(self.num_accepted, tuple(num_accepted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one turn of the decode loop emitted, already cut where answers end.

    The first step is the prefill: it emits the target's first token and has `is_prefill` set. `rows` are the prompts that were
    still being answered; the other tuples have an entry for each of them.
    """

    rows: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    finishes: tuple[Finish | None, ...]
    """Why the answer ended with this step; None where it hasn't ended."""
    num_accepted: tuple[int, ...]
    """Draft tokens that the target accepted, before any cut."""
    num_nodes: int
    """Draft tokens per row that the target read."""
    drawn: bool
    """Whether its draft tokens were drawn at random (`DraftTree.drawn`)."""
    is_prefill: bool
    seconds: PhaseSeconds | None = None
    """None unless timed."""
    links: tuple[Int[torch.Tensor, "batch node"], Int[torch.Tensor, "batch node"]] | None = None
    """The tree's tokens and parents, for studies of trees; None unless timed."""

    @property
    def unfinished(self) -> list[int]:
        """The places in `rows` of the answers that haven't ended."""
        return [place for place, finish in enumerate(self.finishes) if finish is None]
