"""Base class of drafters with a KV cache, and their state: a text of which some tokens aren't read yet."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import MAX_UNREAD, AcceptedPath, Counts, Prompts, TargetOutput, append, to_width
from ..llm.tree_cache import TreeCache, extent_step
from .base import TrainableDrafter
from .beams import SearchTree


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
    """The proposal: only of this tree do `cache_entries` belong to the drafter's cache. None if the search was
    for a merge."""


class CachedDrafter(TrainableDrafter):
    """A drafter with a KV cache.

    A draft first reads the tokens that the target has committed since the draft before. This class
    decides which tokens these are. It pads them to `read_width`, or in a recording to `draft_entries`.
    A kind reads them and searches (`search_after`).
    """

    _keep_activations: bool = True

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

        The tokens are padded: row b has `num_unread[b]`. The tree has `cache_entries` if the cache has its
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
        if tree is drafted.proposed and tree.cache_entries is not None:
            return _after_own_tree(drafted, tree, tree.cache_entries, accepted.cut())
        # 2. Otherwise the next draft reads all that the target has committed.
        features = self.target_features(output)
        if features is not None:
            features = features.gather(1, accepted.entries[..., None].expand(-1, -1, features.shape[-1]))
        tokens = torch.cat([drafted.last_token[:, None], accepted.drafts], dim=1)
        state = replace(drafted.state, unread_tokens=tokens, unread_features=features, num_unread=accepted.num_read)
        return drafted.state.followed_by(state) if drafted.is_skipped else state

    def checkpoint_activations(self) -> None:
        self._keep_activations = False

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
