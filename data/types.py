"""The data types of the stages: frozen, keyword-only dataclasses that check their values.

Names of dimensions, here and everywhere: `batch`, `seq` (tokens of a text), `horizon` (labelled
tokens after a position), `node` (draft tokens of a tree), `depth`, `vocab`, `hidden`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int

from .states import BatchStates, StoredStates

UNKNOWN = -1
"""Label of an unknown token: beyond the end of the text, after a stop token, or not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A conversation as token ids.

    `loss_mask[i]` is True if the assistant wrote token i: the drafter learns to predict the target
    on these tokens. So position i wants a label (the target's next tokens) if `loss_mask[i + 1]` is
    True.
    """

    id: str
    input_ids: Int[torch.Tensor, " seq"]
    loss_mask: Bool[torch.Tensor, " seq"]

    def __post_init__(self) -> None:
        assert self.input_ids.shape == self.loss_mask.shape == (len(self.input_ids),), self.id

    @property
    def wanted(self) -> Bool[torch.Tensor, " seq"]:
        """Mark the positions that want a label: those whose next token the assistant wrote."""
        wanted = torch.zeros_like(self.loss_mask)
        wanted[:-1] = self.loss_mask[1:]
        return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilledExample:
    """An example with the target's labels.

    `continuations[i]` holds the target's next tokens after the text up to and including position i:
    its greedy tokens, or samples with `distill.label_temperature`. Entry 0 follows token i, entry 1
    follows entry 0, and so on. UNKNOWN marks positions without a label, and tokens after the target
    has stopped. `hidden_states` are the target's last
    hidden states (after its final norm), `layers` the inputs of some layers by number. Training
    recomputes what is missing. `top` are the target's top tokens at the positions that may be
    trained.
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
    """The target's top tokens after each token of a text, and their log-probabilities.

    The most probable token comes first. Positions without top tokens have UNKNOWN and minus
    infinity.
    """

    tokens: Int[torch.Tensor, "seq top"]
    log_probs: Float[torch.Tensor, "seq top"]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReads:
    """Tensors of the target that training reads besides its tokens."""

    hidden_states: bool = False
    layers: tuple[int, ...] = ()
    top: bool = False


TOKENS_ONLY = TargetReads()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBatch:
    """A batch of labelled examples for a drafter's `loss`, one or several per row.

    `attention_mask` is True on real tokens. `positions` marks the positions to train, a subset of
    the labelled ones. `hidden_states` are those of the target's last layer after its final norm.
    `features` are the inputs of further layers that the drafter reads, side by side. Both have the
    target's or the stored type, and are None if neither shards nor trainer provide them. `stored` are
    states of the shards that aren't decoded yet: see `decoded`. `top_tokens` and `top_log_probs` are those of
    `TopTokens`, padded. `starts` is the column where each token's text begins in packed rows
    (padding counts as a text); None if each row holds one text.
    """

    input_ids: Int[torch.Tensor, "batch seq"]
    attention_mask: Bool[torch.Tensor, "batch seq"]
    positions: Bool[torch.Tensor, "batch seq"]
    continuations: Int[torch.Tensor, "batch seq horizon"]
    hidden_states: Float[torch.Tensor, "batch seq hidden"] | None = None
    features: Float[torch.Tensor, "batch seq feature"] | None = None
    stored: BatchStates | None = None
    top_tokens: Int[torch.Tensor, "batch seq top"] | None = None
    top_log_probs: Float[torch.Tensor, "batch seq top"] | None = None
    starts: Int[torch.Tensor, "batch seq"] | None = None

    def to(self, device: torch.device) -> "DrafterBatch":
        """Move the tensors to `device`. From pinned memory, the host doesn't wait for that."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def pinned(self) -> "DrafterBatch":
        """Return a copy in pinned memory, which an accelerator reads by itself."""
        return self._with(torch.Tensor.pin_memory)

    def _with(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "DrafterBatch":
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = {name: move(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, stored=None if self.stored is None else self.stored.moved(move))

    def decoded(self) -> "DrafterBatch":
        """Return the batch with its stored states decoded and padded, on their device."""
        if self.stored is None:
            return self
        stored, shape = self.stored, self.input_ids.shape
        last = [] if stored.hidden_states is None else [stored.hidden_states]
        return replace(
            self, hidden_states=stored.padded(last, shape), features=stored.padded(stored.layers, shape), stored=None
        )

    @property
    def position_ids(self) -> Int[torch.Tensor, "rows seq"]:
        """Position of each token in its text, from 0; a single row if all rows are equal."""
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        return columns if self.starts is None else columns - self.starts
