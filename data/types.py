"""What passes between the stages: frozen, keyword-only values, checked where they are made.

Dimension names, here and everywhere: `batch`, `seq` (tokens of a text), `horizon` (tokens labelled after a position), `node`
(draft tokens of a tree), `depth`, `vocab`, `hidden`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int

from .roles import Role as Role
from .states import StoredStates

UNKNOWN = -1
"""Label of a continuation token that is not known: beyond the end of the text, after a stop token, or not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as its source gave it.

    `id` is unique within a data set and survives every stage; `source` says where it came from.
    """

    id: str
    source: str
    turns: tuple[Turn, ...]


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
        assert self.input_ids.shape == self.loss_mask.shape == (len(self.input_ids),), self.id

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
    `hidden_states` are the target's last hidden states (after its final norm), `layers` the inputs of some of its layers, by
    number: what isn't there, training recomputes. `top` are its likeliest next tokens at the positions that may be asked for.
    """

    example: Example
    continuations: Int[torch.Tensor, "seq horizon"]
    hidden_states: StoredStates | None = None
    layers: Mapping[int, StoredStates] = field(default_factory=dict)
    top: "TopTokens | None" = None

    def __post_init__(self) -> None:
        num_tokens = len(self.example.input_ids)
        values = {"continuations": self.continuations, "hidden_states": self.hidden_states, "top": self.top}
        for name, value in (values | {f"layer {number}": states for number, states in self.layers.items()}).items():
            if value is not None and len(value) != num_tokens:
                raise ValueError(f"example {self.example.id!r}: {name} has {len(value)} rows; it must have {num_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The target's likeliest next tokens after each token of a text, the likeliest first, and their log-probabilities.

    Where they weren't asked for stand UNKNOWN and minus infinity.
    """

    tokens: Int[torch.Tensor, "seq top"]
    log_probs: Float[torch.Tensor, "seq top"]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReads:
    """What is read of the target beside its tokens: its last hidden states, the inputs of `layers`, its likeliest tokens."""

    hidden_states: bool = False
    layers: tuple[int, ...] = ()
    top: bool = False


TOKENS_ONLY = TargetReads()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBatch:
    """Distilled examples, as a drafter's `loss` takes them: one in a row, right-padded, or several behind each other.

    `attention_mask` is True on real tokens. `positions` is True where the drafter is to be trained: a subset of the labelled
    positions. `hidden_states` are those of the target's last layer after its final norm, `features` the inputs of the target's
    layers that the drafter reads besides, side by side; None where neither shards nor trainer filled them in. `top_tokens` and
    `top_log_probs` are those of `TopTokens`, padded likewise. `starts` says of each token in which column its text begins,
    where rows hold several (padding counts as a text); None where each holds one.
    """

    input_ids: Int[torch.Tensor, "batch seq"]
    attention_mask: Bool[torch.Tensor, "batch seq"]
    positions: Bool[torch.Tensor, "batch seq"]
    continuations: Int[torch.Tensor, "batch seq horizon"]
    hidden_states: Float[torch.Tensor, "batch seq hidden"] | None = None
    features: Float[torch.Tensor, "batch seq feature"] | None = None
    top_tokens: Int[torch.Tensor, "batch seq top"] | None = None
    top_log_probs: Float[torch.Tensor, "batch seq top"] | None = None
    starts: Int[torch.Tensor, "batch seq"] | None = None

    @property
    def position_ids(self) -> Int[torch.Tensor, "rows seq"]:
        """Where in its text each token stands, from 0 on; a single row where all rows are alike."""
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        return columns if self.starts is None else columns - self.starts
