"""Base classes of trained drafters: all, and those of the target's last state (see `cached_drafter` for the others)."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, Prompts, TargetOutput
from ..llm.hf_target import HFTarget
from .beams import SearchTree, pack_likeliest
from .objective import Loss, Objective
from .vocabulary import DraftVocabulary


class TrainableDrafter(nn.Module, Drafter[Any, Any]):
    """Base class of drafters that are trained.

    The target's parameters that a drafter reads are not registered as its parameters.
    """

    Config: ClassVar[type[Any]]
    """Dataclass of this kind's options. Its RUNTIME_FIELDS may be changed when a trained drafter is
    loaded."""
    DEPTH_OPTION: ClassVar[str | None] = None
    """Option with the depth of the search, for a drafter that learns as many depths as labels
    have."""
    config: Any
    vocab_size: int
    """Number of the target's tokens."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TrainableDrafter":
        """Move and cast like every module, but never cast buffers (`.bfloat16()`, DeepSpeed).

        In bf16 the frequencies of rotary embeddings would be rounded. At position 2,000 they would
        then rotate by wrong angles, and training and decoding would disagree.
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
        """Return a drafter with fresh weights that reads the target's frozen weights."""

    @classmethod
    def require_horizon(cls, config: Any, horizon: int) -> None:
        """Raise ValueError if labels of `horizon` tokens are too short to train this drafter."""
        if horizon < 2:
            raise ValueError(f"distill.horizon is {horizon}; a drafter needs labels of at least 2 tokens to learn from")

    # --- decoding: see `Drafter`

    @abstractmethod
    def search(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[SearchTree, Any]:
        """Return all nodes that a search for draft tokens had, and what `advance` needs of it.

        This is a kind's only way to draft. A proposal has some of these nodes (`pack`), and a merge
        takes others. After `search` or `skip`, the tree given to `advance` may have any other nodes:
        several drafters share it.
        """

    @abstractmethod
    def skip(self, state: Any, last_token: Int[torch.Tensor, " batch"]) -> Any:
        """Return what `advance` needs in a step without drafts of this drafter, which reads nothing now."""

    def pack(self, search: SearchTree) -> DraftTree:
        """Return the proposal, by default the `max_nodes` likeliest nodes. The host reads nothing, so it can be recorded."""
        return pack_likeliest(search, self.max_nodes)

    def trim(self, tree: DraftTree) -> DraftTree:
        """Cut padding from a proposal, for which the host may read values. By default cut nothing."""
        return tree

    def propose(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Any]:
        search, drafted = self.search(state, last_token, generator=generator)
        return self.trim(self.pack(search)), drafted

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the drafter reads; batches then have `features`."""
        return ()

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that its outputs stand for: by default all of the target's."""
        return DraftVocabulary(size=self.vocab_size)

    # --- training

    @property
    def reads_hidden_states(self) -> bool:
        """Whether training always reads the target's last hidden states; batches then have them."""
        return True

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and answer together; None if the target's limit suffices."""
        return None

    @property
    def wants_token_counts(self) -> bool:
        """Whether a reduced vocabulary is still to be chosen, by `choose_draft_vocabulary`."""
        return False

    def choose_draft_vocabulary(self, token_counts: Int[torch.Tensor, " vocab"]) -> None:
        """Choose the tokens of a reduced vocabulary by how often the target wrote each token.

        A drafter without a reduced vocabulary does nothing.
        """

    def check_weights(self) -> None:
        """Raise ValueError for loaded weights with the right shapes but impossible values."""

    def checkpoint_activations(self) -> None:
        """Recompute decoder layers in the backward pass instead of keeping their activations.

        The gradient is the same (on a CPU bit by bit), with less memory. A drafter without such
        layers does nothing: its loss is computed in chunks anyway, so it has little to save.
        """

    def has_unused_parameters(self, horizon: int) -> bool:
        """Return whether labels of `horizon` tokens leave some parameters without a gradient.

        By default they leave none. Data parallelism exchanges gradients faster if every parameter
        always has one. A batch without labels must give zero gradients.
        """
        return False

    def growing(self) -> Any:
        """Return this drafter as a source of growing trees (see `growing_draft`), or None if it can't be one."""
        return None

    def hidden_states_of(self, source: TargetOutput | DrafterBatch) -> Float[torch.Tensor, "batch seq hidden"]:
        """Return the target's last hidden states. Raises ValueError if there are none."""
        if source.hidden_states is None:
            raise ValueError(
                f"the drafter {type(self).__name__} reads the target's hidden states, and the batch has none; distil them or "
                "recompute them"
            )
        return source.hidden_states

    @abstractmethod
    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the loss of one batch. Raises ValueError if the batch lacks required inputs."""

    def calibrate(self, measured: Loss) -> None:
        """Store how often the drafter is right, summed over all processes, for decoding.

        Called when training ends, and before each measurement of accepted tokens. By default
        nothing.
        """


HiddenState = Float[torch.Tensor, "batch hidden"]


class LastStateDrafter(TrainableDrafter):
    """Base class of drafters whose state is the last hidden state at the last accepted token.

    Their search depends on its arguments alone, and a CUDA graph can record it.
    """

    def skip(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> None:
        return None

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> HiddenState:
        return prompts.last(prefill.hidden_states)

    def advance(self, drafted: None, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> HiddenState:
        entry = accepted.entry[:, None, None].expand(-1, 1, output.hidden_states.shape[-1])
        return output.hidden_states.gather(1, entry)[:, 0]

    def select(self, state: HiddenState, rows: Sequence[int]) -> Float[torch.Tensor, "kept hidden"]:
        return state[rows]
