"""Drafters that are recorded and replayed as CUDA graphs."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int

from ..decoding.prompts import Prompts
from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import Counts, TargetOutput
from ..target.cuda_graphs import GraphedFunction, Recorder
from ..target.tree_cache import TreeCache
from .beams import pack_likeliest
from .cached_drafter import CachedDrafter


@runtime_checkable
class RecordableDrafter(Drafter[torch.Tensor, None], Protocol):
    """A drafter whose `propose` is `trim(draft(...))`, and whose `draft` can be recorded.

    Its state is one tensor, and its `advance` needs only the accepted path. `draft` depends only on
    its arguments, samples nothing, and returns a tree whose size doesn't depend on their values.
    `trim` may read values, to cut padding.
    """

    def draft(self, state: torch.Tensor, last_token: Int[torch.Tensor, " batch"]) -> DraftTree: ...

    def trim(self, tree: DraftTree) -> DraftTree: ...

    @property
    def tree_sizes(self) -> Sequence[int]:
        """Return all sizes of the trees that `trim` returns."""


class GraphedDrafter:
    """Wrapper that replays a recordable drafter, such as ReDrafter, as a CUDA graph.

    A recording is a function of the state, so states are values as usual. But the next proposal
    overwrites the tree. The drafter's settings must not change.
    """

    def __init__(self, drafter: RecordableDrafter, recorder: Recorder | None = None) -> None:
        self.drafter = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.init_state, self.advance, self.select = drafter.init_state, drafter.advance, drafter.select
        self.meanwhile = drafter.meanwhile
        self._draft = GraphedFunction(self._draft_now, recorder)

    @property
    def tree_sizes(self) -> Sequence[int]:
        return self.drafter.tree_sizes

    def propose(self, state: torch.Tensor, last_token: torch.Tensor, *, generator: Randomness = None) -> tuple[DraftTree, None]:
        return self.drafter.trim(self._draft(state, last_token)), None

    def _draft_now(self, state: torch.Tensor, last_token: torch.Tensor) -> DraftTree:
        return self.drafter.draft(state, last_token).fixed()


class GraphedCachedDrafter:
    """Wrapper that replays a drafter with a KV cache as a CUDA graph.

    The cache stays at its address: the next batch that fits takes it over, and the states of the
    batch before are then gone. A state that isn't the newest drafts without a recording, in a copy.
    The next proposal overwrites the tree.
    """

    def __init__(self, drafter: CachedDrafter, recorder: Recorder | None = None) -> None:
        self.drafter = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.select, self.meanwhile = drafter.select, drafter.meanwhile
        # Whole paths: the next draft reads as many entries at each step.
        self.advance = drafter.follow
        self._cache: TreeCache | None = None
        self._num_moves = 0
        self._draft = GraphedFunction(self._draft_now, recorder)

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        capacity = prompts.input_ids.shape[1] + max_new_tokens + self.drafter.draft_columns
        if self._cache is not None and self._cache.fits(len(prompts.lengths), capacity):
            self._cache.restart()
        else:
            self._cache = None  # free its memory before the next cache is allocated
            self._draft.forget()
            self._cache = self.drafter.new_cache(prompts, max_new_tokens=max_new_tokens, is_fixed=True)
            self._num_moves = 0
        return self.drafter.begin(self._cache, prompts, prefill)

    def propose(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Any]:
        # 1. How many entries of each row the draft adds to the text.
        kept = [count + self.drafter.keeps_last_token for count in state.num_unread.host]
        cache: TreeCache = state.text.cache
        if not (cache is self._cache and state.text.is_newest) or max(kept) > self.drafter.draft_entries:
            return self.drafter.propose(state, last_token, generator=generator)
        # 2. A recording of these columns.
        extent = cache.reserve_columns(self.drafter.draft_columns)
        if cache.num_moves > self._num_moves:
            self._draft.forget()
            self._num_moves = cache.num_moves
        counts = cache.lengths.device, state.num_unread.device
        tree = self._draft(last_token, *counts, *self.drafter.draft_inputs(state), key=extent)
        cache.count(kept)
        return tree, self.drafter.drafted_in(cache.snapshot(), last_token)

    def _draft_now(
        self,
        last_token: Int[torch.Tensor, " batch"],
        lengths: Int[torch.Tensor, " batch"],
        num_unread: Int[torch.Tensor, " batch"],
        *inputs: torch.Tensor,
    ) -> DraftTree:
        """Draft after texts of these `lengths`, which the cache has at first."""
        assert self._cache is not None, "init_state must come before propose"
        self._cache.lengths.device.copy_(lengths)  # a recording runs several times
        # The host's numbers are such that the host's lengths stay as they are: `propose` counts.
        counts = Counts(num_unread, (-int(self.drafter.keeps_last_token),) * len(num_unread))
        search = self.drafter.search_in(self._cache, last_token, counts, *inputs)
        return pack_likeliest(search, self.drafter.max_nodes).fixed()


def graphed(drafter: Drafter[Any, Any], recorder: Recorder | None = None) -> Drafter[Any, Any]:
    """Return a drafter that is replayed as a CUDA graph; the drafter itself if it can't be recorded."""
    if isinstance(drafter, RecordableDrafter):
        return GraphedDrafter(drafter, recorder)
    if isinstance(drafter, CachedDrafter) and drafter.can_be_recorded:
        return GraphedCachedDrafter(drafter, recorder)
    return drafter
