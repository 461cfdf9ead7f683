"""The seams: what a drafter, a target and an acceptance rule promise to the decode loop and to training.

A drafter's state is a value: it is passed in and handed back, never kept inside, so that it can be forked, dropped, batched and
replayed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import nn

from ..data.types import DrafterBatch
from .decoding.prompts import Prompts
from .decoding.sampling import Randomness
from .decoding.tree import DraftTree
from .decoding.types import Acceptance, TargetOutput

if TYPE_CHECKING:
    from .drafters.objective import Objective
    from .hf_target import HFTarget

State = TypeVar("State")
Own = TypeVar("Own", bound="TrainableDrafter")


@runtime_checkable
class Target(Protocol):
    """The frozen large model, with its own KV cache."""

    @property
    def context_length(self) -> int:
        """Tokens, prompt and answer together, that the target can hold."""

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether each new shape of a pass is compiled or recorded first, so that few batch sizes
        are worth some padding."""

    @property
    def num_prefills(self) -> int:
        """How often it has started anew. There is one KV cache, so only the last start can go on."""

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Start anew: read the prompts, and keep room for `max_new_tokens` behind each and trees of `max_nodes`.

        From now on outputs have the `features` of these layers.

        Raises ValueError where a prompt fills the context window.
        """

    def verify(self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree) -> TargetOutput:
        """One forward over the last committed token and all nodes, each attending to its own path only."""

    def commit(self, tree: DraftTree, acceptance: Acceptance, num_accepted: Sequence[int]) -> None:
        """Keep each row's last committed token and accepted path in the KV cache; forget the other nodes.

        `num_accepted` is the acceptance's own, as the host knows it.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only. They ascend; the last one may be named again, to fill
        the batch up."""


@runtime_checkable
class Drafter(Protocol[State]):
    """Proposes draft trees. Trained or not."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that a tree of its can have: what the target's KV cache keeps room for."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads besides the last hidden states."""

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> State:
        """Return the state behind the prompts, with room for `max_new_tokens` behind each."""

    def propose(self, state: State, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None) -> DraftTree: ...

    def advance(
        self, state: State, tree: DraftTree, acceptance: Acceptance, output: TargetOutput, num_accepted: Sequence[int]
    ) -> State:
        """The state after the step. `num_accepted` is the acceptance's own, as the host knows it."""

    def select(self, state: State, rows: Sequence[int]) -> State:
        """The state of these rows of the batch only."""


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides which path of a tree the target accepts."""

    @property
    def lossless(self) -> bool:
        """Whether the output's distribution is the target's own. Printed in every table."""

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Sums and counts by depth, never a mean: whoever adds batches or processes together divides once, at the end.

    `depth` counts draft tokens from 0. `hits[d, k]` counts positions whose label is among the k + 1 likeliest tokens at depth
    d; `joint_hits[d]` those whose labels at depths 0..d are all the likeliest token, which is what a chain would have
    accepted. `sums` are of the depths that are trained, which are the first ones and may be fewer: their mean is over the
    labels of those depths alone.
    """

    sums: Float[torch.Tensor, " trained_depth"]
    counts: Int[torch.Tensor, " depth"]
    hits: Int[torch.Tensor, "depth rank"]
    joint_hits: Int[torch.Tensor, " depth"]


class TrainableDrafter(nn.Module, ABC):
    """Base class of drafters that are trained. Parameters of the target that it reads are not registered with it."""

    Config: ClassVar[type[Any]]
    """Dataclass of this kind's options; its RUNTIME_FIELDS may be changed when trained weights are loaded."""
    recordable: ClassVar[bool] = True
    """Whether a CUDA graph can replay its drafting (see `RecordableDrafter`)."""
    config: Any

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TrainableDrafter":
        """Move and cast as every module does, but let buffers keep their type, whoever casts (`.bfloat16()`, DeepSpeed).

        Rounded to bf16, the frequencies of rotary embeddings would turn a token at position 2,000 by wrong angles, and training
        and decoding would disagree.
        """
        before = dict(self.named_buffers(remove_duplicate=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(remove_duplicate=False):
            if buffer.dtype != before[name].dtype:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, before[name].to(buffer.device))
        return self

    @classmethod
    @abstractmethod
    def for_target(cls, config: Any, target: "HFTarget") -> "TrainableDrafter":
        """A drafter with fresh weights that reads the target's frozen ones where it needs them."""

    @classmethod
    def from_pretrained(
        cls: type[Own], name_or_path: str | Path, target: "HFTarget", *, revision: str | None = None, **runtime_options: Any
    ) -> Own:
        """A trained drafter of this kind (of any, where it is asked of `TrainableDrafter`), of a directory or of the Hub: see
        `load_drafter`. Raises ValueError as that does, and for a drafter of another kind."""
        from .drafters.checkpoint import load_drafter  # it knows all kinds, and each of them this class

        drafter = load_drafter(name_or_path, target, revision=revision, **runtime_options)
        if not isinstance(drafter, cls):
            raise ValueError(
                f"{name_or_path} holds a {type(drafter).__name__} and no {cls.__name__}; call {type(drafter).__name__}."
                "from_pretrained, or TrainableDrafter.from_pretrained, which reads every kind"
            )
        return drafter

    @classmethod
    def require_horizon(cls, config: Any, horizon: int) -> None:
        """Raise ValueError where labels of `horizon` tokens are too short for a drafter with this config to learn from."""
        if horizon < 2:
            raise ValueError(f"distill.horizon is {horizon}; a drafter needs labels of at least 2 tokens to learn from")

    @classmethod
    def starting_weights(cls, config: Any) -> str | None:
        """Digest of the weights that training starts from, where those are a model's other than the target."""
        return None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads besides the last hidden states: batches then have `features`."""
        return ()

    @property
    def reads_hidden_states(self) -> bool:
        """Whether training reads the target's last hidden states, whatever the objective: batches then have them."""
        return True

    @property
    def context_length(self) -> int | None:
        """Tokens, prompt and answer together, that the drafter can read; None where the target's own limit is enough."""
        return None

    @property
    def wants_token_counts(self) -> bool:
        """Whether the drafter has a reduced vocabulary that isn't chosen yet: `choose_draft_vocabulary` does that first."""
        return False

    def choose_draft_vocabulary(self, token_counts: Int[torch.Tensor, " vocab"]) -> None:
        """Choose the tokens of a reduced vocabulary by how often the target wrote each. Without one, nothing."""

    def check_weights(self) -> None:
        """Raise ValueError where loaded weights have the right shapes, but values that can't be."""

    def checkpoint_activations(self) -> None:
        """In training, keep of decoder layers only what goes into them, and recompute the rest for the gradient: the
        same gradient (on a CPU the same bits) in less memory. By default nothing: a drafter without such layers has little to
        spare, as its loss is computed in chunks anyway."""

    def has_unused_parameters(self, horizon: int) -> bool:
        """Whether labels of `horizon` tokens leave some parameters without a gradient. By default they leave none.

        Data parallelism exchanges gradients faster where none is ever missing. A batch without labels must give zeros.
        """
        return False

    @abstractmethod
    def loss(self, batch: DrafterBatch, objective: "Objective") -> Loss:
        """What `objective` says of one batch. Raises ValueError where the batch lacks what this drafter needs."""

    def calibrate(self, measured: Loss) -> None:
        """Take in how often the drafter is right, over all processes, before it decodes. By default nothing.

        Called when training ends, and before each measurement of what decoding accepts.
        """
