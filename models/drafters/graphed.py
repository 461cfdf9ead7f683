"""Drafters that are recorded and replayed as CUDA graphs."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int

from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import Counts, Prompts, TargetOutput
from ..llm.cuda_graphs import GraphedFunction, Output, Recorder
from ..llm.tree_cache import TreeCache
from .base import CachedDrafter
from .beams import SearchTree, pack_likeliest
from .merged import MergedDrafter


@runtime_checkable
class RecordableDrafter(Drafter[torch.Tensor, None], Protocol):
    """A drafter whose `propose` is `trim(draft(...))`, and whose `draft` can be recorded.

    Its state is one tensor, and its `advance` needs only the accepted path. `draft` and `search`
    depend only on their arguments, sample nothing, and return trees whose sizes don't depend on their
    values. `trim` may read values, to cut padding.
    """

    def draft(self, state: torch.Tensor, last_token: Int[torch.Tensor, " batch"]) -> DraftTree: ...

    def search(self, state: torch.Tensor, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, None]: ...

    def skip(self, state: torch.Tensor, last_token: Int[torch.Tensor, " batch"]) -> None: ...

    def trim(self, tree: DraftTree) -> DraftTree: ...


class GraphedDrafter:
    """Wrapper that replays a recordable drafter, such as ReDrafter, as a CUDA graph.

    The next proposal overwrites the tree. The drafter's settings must not change.
    """

    def __init__(self, drafter: RecordableDrafter, recorder: Recorder | None = None) -> None:
        self.drafter = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.init_state, self.advance, self.select = drafter.init_state, drafter.advance, drafter.select
        self.meanwhile, self.skip = drafter.meanwhile, drafter.skip
        self._draft = GraphedFunction(self._draft_now, recorder)
        self._search = GraphedFunction(self._search_now, recorder)

    def propose(self, state: torch.Tensor, last_token: torch.Tensor, *, generator: Randomness = None) -> tuple[DraftTree, None]:
        return self.drafter.trim(self._draft(state, last_token)), None

    def search(self, state: torch.Tensor, last_token: torch.Tensor) -> tuple[SearchTree, None]:
        return self._search(state, last_token), None

    def _draft_now(self, state: torch.Tensor, last_token: torch.Tensor) -> DraftTree:
        return self.drafter.draft(state, last_token).fixed()

    def _search_now(self, state: torch.Tensor, last_token: torch.Tensor) -> SearchTree:
        return self.drafter.search(state, last_token)[0].joined()


class GraphedCachedDrafter:
    """Wrapper that replays a drafter with a KV cache as a CUDA graph.

    The cache stays at its address: the next batch that fits takes it over, and the states of the
    batch before are then gone. The next proposal overwrites the tree.
    """

    def __init__(self, drafter: CachedDrafter, recorder: Recorder | None = None) -> None:
        self.drafter = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.select, self.meanwhile, self.skip = drafter.select, drafter.meanwhile, drafter.skip
        # Whole paths: the next draft reads as many entries at each step.
        self.advance = drafter.follow
        self._cache: TreeCache | None = None
        self._num_moves = 0
        self._draft = GraphedFunction(self._draft_now, recorder)
        self._search = GraphedFunction(lambda *inputs: self._search_now(*inputs).joined(), recorder)

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        capacity = prompts.input_ids.shape[1] + max_new_tokens + self.drafter.draft_columns
        if self._cache is not None and self._cache.fits(len(prompts.lengths), capacity):
            self._cache.restart()
        else:
            self._cache = None  # free its memory before the next cache is allocated
            self._forget()
            self._cache = self.drafter.new_cache(prompts, max_new_tokens=max_new_tokens, is_fixed=True)
            self._num_moves = 0
        return self.drafter.begin(self._cache, prompts, prefill)

    def propose(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Any]:
        if not self._can_replay(state):
            return self.drafter.propose(state, last_token, generator=generator)
        return self._replayed(self._draft, state, last_token)

    def search(self, state: Any, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, Any]:
        if not self._can_replay(state):
            return self.drafter.search(state, last_token)
        return self._replayed(self._search, state, last_token)

    def _can_replay(self, state: Any) -> bool:
        """Return whether the state's unread entries have room."""
        return max(self._num_kept(state)) <= self.drafter.draft_entries

    def _num_kept(self, state: Any) -> list[int]:
        """Return how many entries a draft adds to each row's text."""
        return [count + self.drafter.keeps_last_token for count in state.num_unread.host]

    def _replayed(
        self, recordings: GraphedFunction[Output], state: Any, last_token: Int[torch.Tensor, " batch"]
    ) -> tuple[Output, Any]:
        cache: TreeCache = state.text
        extent = cache.reserve_columns(self.drafter.draft_columns)
        if cache.num_moves > self._num_moves:
            self._forget()
            self._num_moves = cache.num_moves
        counts = cache.lengths.device, state.num_unread.device
        output = recordings(last_token, *counts, *self.drafter.draft_inputs(state), key=extent)
        cache.count(self._num_kept(state))
        return output, self.drafter.drafted_in(cache, last_token)

    def _forget(self) -> None:
        self._draft.forget()
        self._search.forget()

    def _draft_now(self, *inputs: torch.Tensor) -> DraftTree:
        return pack_likeliest(self._search_now(*inputs), self.drafter.max_nodes).fixed()

    def _search_now(
        self,
        last_token: Int[torch.Tensor, " batch"],
        lengths: Int[torch.Tensor, " batch"],
        num_unread: Int[torch.Tensor, " batch"],
        *inputs: torch.Tensor,
    ) -> SearchTree:
        """Search after texts of these `lengths`, which the cache has at first."""
        assert self._cache is not None, "init_state must come before propose"
        self._cache.lengths.device.copy_(lengths)  # a recording runs several times
        # With these numbers the host's lengths stay as they are: `_replayed` counts.
        counts = Counts(num_unread, (-int(self.drafter.keeps_last_token),) * len(num_unread))
        return self.drafter.search_in(self._cache, last_token, counts, *inputs)


def graphed(drafter: Drafter[Any, Any], recorder: Recorder | None = None) -> Drafter[Any, Any]:
    """Return a drafter that is replayed as CUDA graphs; the drafter itself if it can't be recorded.

    Of a merged drafter, the searches of its trained sources are.
    """
    if isinstance(drafter, RecordableDrafter):
        return GraphedDrafter(drafter, recorder)
    if isinstance(drafter, CachedDrafter) and drafter.can_be_recorded:
        return GraphedCachedDrafter(drafter, recorder)
    if isinstance(drafter, MergedDrafter):
        return drafter.recorded(lambda source: graphed(source, recorder))
    return drafter
