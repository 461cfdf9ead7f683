"""Base classes of trained drafters: all, those of the last state, and those with a KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, Counts, Prompts, TargetOutput
from ..llm.hf_target import HFTarget
from ..llm.tree_cache import TreeCache, extent_step
from .beams import SearchTree
from .objective import Loss, Objective


class TrainableDrafter(nn.Module, Drafter[Any, Any], ABC):
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
    def search(self, state: Any, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, Any]:
        """Return all nodes that a search for draft tokens had, and what `advance` needs of it.

        `propose` returns some of these nodes as a tree. After `search` or `skip`, the tree given to
        `advance` may have any other nodes: several drafters share it.
        """

    @abstractmethod
    def skip(self, state: Any, last_token: Int[torch.Tensor, " batch"]) -> Any:
        """Return what `advance` needs in a step without drafts of this drafter."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the drafter reads; batches then have `features`."""
        return ()

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

    Each is also a `RecordableDrafter`.
    """

    @abstractmethod
    def draft(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> DraftTree:
        """Draft a tree without sampling, by operations that a CUDA graph can record."""

    @abstractmethod
    def search(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, None]: ...

    def skip(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> None:
        return None

    def trim(self, tree: DraftTree) -> DraftTree:
        """Cut padding from the tree. By default there is none."""
        return tree

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> HiddenState:
        return prompts.last(prefill.hidden_states)

    def propose(
        self, state: HiddenState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, None]:
        return self.trim(self.draft(state, last_token)), None

    def advance(self, drafted: None, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> HiddenState:
        entry = accepted.entry[:, None, None].expand(-1, 1, output.hidden_states.shape[-1])
        return output.hidden_states.gather(1, entry)[:, 0]

    def select(self, state: HiddenState, rows: Sequence[int]) -> Float[torch.Tensor, "kept hidden"]:
        return state[rows]


class CachedDrafter(TrainableDrafter):
    """A drafter with a KV cache.

    Its state has the cache, `text`, and the number of entries of each row that the
    cache still lacks, `num_unread`. A draft reads these entries first. Proposals are the `max_nodes`
    likeliest nodes of a search, if nothing is drawn.
    """

    @property
    @abstractmethod
    def can_be_recorded(self) -> bool:
        """Whether drafting samples nothing."""

    @property
    @abstractmethod
    def num_cache_layers(self) -> int:
        """Number of layers that write to the cache."""

    @property
    @abstractmethod
    def draft_entries(self) -> int:
        """Most entries that a recorded draft adds to the text: those of a longest accepted path."""

    @property
    @abstractmethod
    def draft_columns(self) -> int:
        """Columns that a recorded draft writes after the text, at most."""

    @abstractmethod
    def begin(self, cache: TreeCache, prompts: Prompts, prefill: TargetOutput) -> Any:
        """Read the prompts into an empty cache, and return the state."""

    @property
    def keeps_last_token(self) -> bool:
        """Whether a draft adds the last token to the text, besides the unread entries."""
        return False

    @abstractmethod
    def draft_inputs(self, state: Any) -> tuple[torch.Tensor, ...]:
        """Return what the state knows of the unread entries, in tensors whose shapes are fixed.

        There is room for all entries of a longest accepted path.
        """

    @abstractmethod
    def search_in(
        self, cache: TreeCache, last_token: Int[torch.Tensor, " batch"], num_unread: Counts, *inputs: torch.Tensor
    ) -> SearchTree:
        """Read the unread entries and search, as `search` does.

        `inputs` are those of `draft_inputs`. Shapes depend on nothing but the shapes of the arguments
        and the cache's extent. Of `num_unread` the host's numbers only tell what the cache counts.
        """

    def drafted_in(self, text: TreeCache, last_token: Int[torch.Tensor, " batch"]) -> Any:
        """Return what `follow` needs after `search_in`; `text` is the cache's text then."""
        return text

    @abstractmethod
    def follow(self, drafted: Any, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> Any:
        """Return the state after the accepted path, as wide as `accepted` is."""

    def advance(self, drafted: Any, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> Any:
        return self.follow(drafted, tree, accepted.cut(), output)

    def new_cache(self, prompts: Prompts, *, max_new_tokens: int, is_fixed: bool = False) -> TreeCache:
        """Return an empty cache with room for the prompts, the answers and a draft."""
        batch, num_tokens = prompts.input_ids.shape
        device = prompts.input_ids.device
        return TreeCache(
            self.num_cache_layers,
            batch,
            num_tokens + max_new_tokens + self.draft_columns,
            device,
            extent_step=extent_step(device, is_fixed=is_fixed),
            is_fixed=is_fixed,
        )

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        return self.begin(self.new_cache(prompts, max_new_tokens=max_new_tokens), prompts, prefill)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return state.select(rows)
