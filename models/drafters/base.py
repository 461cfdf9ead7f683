"""Base classes of trained drafters: all, those of the last state, and those with a KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn.functional import pad

from ...data.types import DrafterBatch
from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import MAX_UNREAD, AcceptedPath, Counts, Prompts, TargetOutput, append, to_width
from ..llm.hf_target import HFTarget
from ..llm.tree_cache import TreeCache, extent_step
from .beams import SearchTree, pack_likeliest
from .group_search import pack_groups
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

    @property
    @abstractmethod
    def max_nodes(self) -> int: ...

    @abstractmethod
    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any: ...

    @abstractmethod
    def advance(self, drafted: Any, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> Any: ...

    @abstractmethod
    def select(self, state: Any, rows: Sequence[int]) -> Any: ...

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

    @property
    def can_be_recorded(self) -> bool:
        """Whether drafting samples nothing: a recording would repeat its random numbers."""
        return True

    def pack(self, search: SearchTree) -> DraftTree:
        """Return the proposal; the host reads nothing, so that a recording can repeat it.

        By default it has the `max_nodes` likeliest nodes, or whole groups of drawn siblings.
        """
        pack = pack_likeliest if search.drawn_from is None else pack_groups
        return pack(search, self.max_nodes)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedText:
    """State of a batch of texts without their last tokens, which come with the next draft."""

    cache: TreeCache
    """Keys and values of the texts without the unread tokens."""
    unread_tokens: Int[torch.Tensor, "batch unread"]
    """Committed tokens that the drafter hasn't read. Each row has at least one; what follows its last
    one is arbitrary."""
    unread_features: Float[torch.Tensor, "batch unread feature"] | None
    """The target's features at the unread tokens; None if the drafter reads none."""
    num_unread: Counts
    batch_number: int = 0
    """Which batch of a recorded drafter it belongs to: all batches share a cache, and the next ends it."""

    def select(self, rows: Sequence[int]) -> "CachedText":
        """Return the state of these rows only."""
        self.cache.select(rows)
        return replace(self._with_unread(lambda values: values[rows]), num_unread=self.num_unread.select(rows))

    def to_width(self, width: int) -> "CachedText":
        """Return the same state with the unread tokens padded or cut to a width, `num_unread` at least."""
        return self._with_unread(lambda values: to_width(values, width))

    def with_last(self, last_token: Int[torch.Tensor, " batch"]) -> Int[torch.Tensor, "batch unread_and_last"]:
        """Return the unread tokens, and the last token behind them."""
        return pad(self.unread_tokens, (0, 1)).scatter(1, self.num_unread.device[:, None], last_token[:, None])

    def followed_by(self, other: "CachedText") -> "CachedText":
        """Return the state with the unread tokens of another one behind its own."""
        features = other.unread_features
        if self.unread_features is not None and features is not None:
            features = append(self.unread_features, self.num_unread, features)
        return replace(
            self,
            unread_tokens=append(self.unread_tokens, self.num_unread, other.unread_tokens),
            unread_features=features,
            num_unread=self.num_unread + other.num_unread,
        )

    def _with_unread(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "CachedText":
        features = None if self.unread_features is None else change(self.unread_features)
        return replace(self, unread_tokens=change(self.unread_tokens), unread_features=features)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDraft:
    """What `advance` needs of a draft, or of a skipped step."""

    state: CachedText
    """The state before. Its cache has the unread tokens now, unless the step was skipped."""
    last_token: Int[torch.Tensor, " batch"]
    is_skipped: bool = False
    """Whether nothing was read."""
    proposed: DraftTree | None = None
    """The proposal: only of this tree do `entries` belong to the drafter's cache. None if the search was
    for a merge."""


class CachedDrafter(TrainableDrafter):
    """A drafter with a KV cache.

    A draft first reads the tokens that the target has committed since the draft before. This class
    decides which tokens these are. It pads them to `read_width`, or in a recording to `draft_entries`.
    A kind reads them and searches (`search_after`).
    """

    @property
    @abstractmethod
    def num_cache_layers(self) -> int:
        """Number of layers that write to the cache."""

    @property
    @abstractmethod
    def draft_entries(self) -> int:
        """Most tokens that a step adds to a text with the drafter's own tree: the last one and a path.

        A recording reads as many. A draft that must read more, after skipped steps or a longer path of
        another drafter, isn't replayed.
        """

    @property
    @abstractmethod
    def draft_columns(self) -> int:
        """Most columns that a draft writes after the cached text, if it reads at most `draft_entries`.

        The unread tokens and the nodes that the search reads are in these columns.
        """

    def read_width(self, num_unread: int) -> int:
        """Return the width, at least `num_unread`, to which a draft pads the unread tokens.

        `num_unread` is the number of the fullest row. By default it is the width.
        """
        return num_unread

    def target_features(self, source: TargetOutput) -> Float[torch.Tensor, "batch entry feature"] | None:
        """Return the features that the drafter reads in the target's output; by default None."""
        return None

    @abstractmethod
    def search_after(self, state: CachedText, last_token: Int[torch.Tensor, " batch"], generator: Randomness) -> SearchTree:
        """Read the unread tokens, which the cache keeps, and search for what follows `last_token`.

        The tokens are padded: row b has `num_unread[b]`. The tree has `entries` if the cache has its
        nodes behind the kept tokens, as the target would read them. Shapes depend on nothing but the
        shapes of the arguments and the cache's extent, so that a recording can repeat it. The host's
        numbers in `num_unread` serve only what the cache counts.
        """

    def search(
        self, state: CachedText, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[SearchTree, CachedDraft]:
        state = state.to_width(self.read_width(max(state.num_unread.host)))
        return self.search_after(state, last_token, generator), CachedDraft(state=state, last_token=last_token)

    def propose(
        self, state: CachedText, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, CachedDraft]:
        tree, drafted = super().propose(state, last_token, generator=generator)
        return tree, replace(drafted, proposed=tree)

    def skip(self, state: CachedText, last_token: Int[torch.Tensor, " batch"]) -> CachedDraft:
        """Leave the tokens unread, unless there are many of them."""
        if max(state.num_unread.host) < MAX_UNREAD:
            return CachedDraft(state=state, last_token=last_token, is_skipped=True)
        return self.search(state, last_token)[1]

    def advance(self, drafted: CachedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> CachedText:
        # 1. The cache may have the nodes of the drafter's own tree: keep those of the path, but not the last.
        if tree is drafted.proposed and tree.entries is not None:
            return _after_own_tree(drafted, tree, tree.entries, accepted.cut())
        # 2. Otherwise the next draft reads all that the target has committed.
        features = self.target_features(output)
        if features is not None:
            features = features.gather(1, accepted.entries[..., None].expand(-1, -1, features.shape[-1]))
        tokens = torch.cat([drafted.last_token[:, None], accepted.drafts], dim=1)
        state = replace(drafted.state, unread_tokens=tokens, unread_features=features, num_unread=accepted.num_read)
        return drafted.state.followed_by(state) if drafted.is_skipped else state

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

    @abstractmethod
    def begin(self, cache: TreeCache, prompts: Prompts, prefill: TargetOutput) -> Any:
        """Read prompts without their last tokens into an empty cache, and return the state."""

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        return self.begin(self.new_cache(prompts, max_new_tokens=max_new_tokens), prompts, prefill)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return state.select(rows)


def read_prompts(
    cache: TreeCache,
    prompts: Prompts,
    features: Float[torch.Tensor, "batch seq feature"],
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
) -> CachedText:
    """Read prompts without their last tokens into an empty cache, and return the state.

    `write` is called once, with tokens [batch, entry], features [batch, entry, feature] and positions
    [1, entry]. It adds an entry for each feature; the entry's token is the one after the feature's.
    """
    batch, num_tokens = prompts.input_ids.shape
    # At least one entry, which isn't kept: the cache then has its memory before anything is recorded.
    num_read = max(1, num_tokens - 1)
    cache.begin_prefill(batch, num_read)
    write(prompts.input_ids[:, -num_read:], features[:, :num_read], torch.arange(num_read, device=features.device)[None])
    cache.keep(None, Counts.of([length - 1 for length in prompts.lengths], features.device))
    return CachedText(
        cache=cache,
        unread_tokens=prompts.last(prompts.input_ids)[:, None],
        unread_features=prompts.last(features)[:, None],
        num_unread=Counts.of([1] * batch, features.device),
    )


def _after_own_tree(
    drafted: CachedDraft, tree: DraftTree, entries: Int[torch.Tensor, "batch node"], accepted: AcceptedPath
) -> CachedText:
    """Return the state with all of an accepted path in the cache but its last token, which may be unread."""
    kept = None
    if num_kept := accepted.path.shape[1]:
        kept = pad(entries.gather(1, accepted.path.clamp(min=0)), (1, 0))[:, :num_kept]
    drafted.state.cache.keep(kept, accepted.num_accepted)
    tokens = torch.cat([drafted.last_token[:, None], tree.tokens], dim=1).gather(1, accepted.entry[:, None])
    ones = Counts(torch.ones_like(drafted.last_token), (1,) * len(drafted.last_token))
    return replace(drafted.state, unread_tokens=tokens, unread_features=None, num_unread=ones)
