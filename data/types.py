"""What passes between the stages: frozen, keyword-only values, checked where they are made.

Dimension names, here and everywhere: `batch`, `seq` (tokens of a text), `horizon` (tokens labelled after a position), `node`
(draft tokens of a tree), `depth`, `vocab`, `hidden`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int

Role = Literal["system", "user", "assistant"]

UNKNOWN = -1
"""Label of a continuation token that is not known: beyond the end of the text, after a stop token, or not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"unknown role {self.role!r}; a turn's role is one of {', '.join(get_args(Role))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as its source gave it.

    `id` is unique within a data set and survives every stage; `source` says where it came from.
    """

    id: str
    source: str
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"conversation {self.id!r} has no turns; drop it in its source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A conversation as token ids.

    `loss_mask[i]` is True where token i was written by the assistant: the tokens that the target is to be imitated on. So
    position i wants a label (what the target says next) where `loss_mask[i + 1]` is True.
    """

    id: str
    input_ids: Int[torch.Tensor, " seq"]
    loss_mask: Bool[torch.Tensor, " seq"]

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.loss_mask.shape or self.input_ids.ndim != 1:
            raise ValueError(
                f"example {self.id!r}: input_ids {tuple(self.input_ids.shape)} and loss_mask {tuple(self.loss_mask.shape)} "
                "must be vectors of one length"
            )

    @property
    def wanted(self) -> Bool[torch.Tensor, " seq"]:
        """Where a label is wanted: the positions whose next token the assistant wrote."""
        wanted = torch.zeros_like(self.loss_mask)
        wanted[:-1] = self.loss_mask[1:]
        return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilledExample:
    """An example with the target's own answers to it.

    `continuations[i]` holds the target's greedy next tokens after the text up to and including position i: entry 0 follows
    token i, entry 1 follows entry 0, and so on; UNKNOWN where no label was wanted or the target had stopped.
    `hidden_states` are the target's last hidden states (after its final norm), or None where training recomputes them.
    """

    example: Example
    continuations: Int[torch.Tensor, "seq horizon"]
    hidden_states: Float[torch.Tensor, "seq hidden"] | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.example.input_ids)
        for name, value in (("continuations", self.continuations), ("hidden_states", self.hidden_states)):
            if value is not None and (value.ndim != 2 or len(value) != num_tokens):
                raise ValueError(f"example {self.example.id!r}: {name} {tuple(value.shape)} must be [{num_tokens}, ...]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBatch:
    """Right-padded distilled examples, as a drafter's `loss` takes them.

    `attention_mask` is True on real tokens. `positions` is True where the drafter is to be trained: a subset of the labelled
    positions. `hidden_states` are those of the target's last layer after its final norm; None until the trainer fills them in.
    `features` are the inputs of the target's layers that the drafter reads besides, side by side.
    """

    input_ids: Int[torch.Tensor, "batch seq"]
    attention_mask: Bool[torch.Tensor, "batch seq"]
    positions: Bool[torch.Tensor, "batch seq"]
    continuations: Int[torch.Tensor, "batch seq horizon"]
    hidden_states: Float[torch.Tensor, "batch seq hidden"] | None = None
    features: Float[torch.Tensor, "batch seq feature"] | None = None
