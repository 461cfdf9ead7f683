"""The base class of drafters that are trained."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.protocols import Drafter
from ..target.hf_target import HFTarget
from .objective import Loss, Objective


class TrainableDrafter(nn.Module, Drafter[Any, Any], ABC):
    """Base class of drafters that are trained.

    Parameters of the target that it reads are not registered with it.
    """

    Config: ClassVar[type[Any]]
    """Dataclass of this kind's options; its RUNTIME_FIELDS may be changed when trained weights are loaded."""
    DEPTH_OPTION: ClassVar[str | None] = None
    """The option with the depth of the search, of a drafter that learns as many depths as the labels have."""
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
    def for_target(cls, config: Any, target: HFTarget) -> "TrainableDrafter":
        """A drafter with fresh weights that reads the target's frozen ones where it needs them."""

    @classmethod
    def require_horizon(cls, config: Any, horizon: int) -> None:
        """Raise ValueError where labels of `horizon` tokens are too short for a drafter with this config to learn from."""
        if horizon < 2:
            raise ValueError(f"distill.horizon is {horizon}; a drafter needs labels of at least 2 tokens to learn from")

    @classmethod
    def starting_weights(cls, config: Any) -> str | None:
        """Digest of the weights that training starts from, where those are a model's other than the target."""
        return None

    # --- decoding: see `Drafter`

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads besides the last hidden states: batches then have `features`."""
        return ()

    # --- training

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
    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """What `objective` says of one batch. Raises ValueError where the batch lacks what this drafter needs."""

    def calibrate(self, measured: Loss) -> None:
        """Take in how often the drafter is right, over all processes, before it decodes. By default nothing.

        Called when training ends, and before each measurement of what decoding accepts.
        """
