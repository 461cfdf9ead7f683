"""Drafters that are recorded and replayed as CUDA graphs."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int

from ..decoding.protocols import Drafter
from ..decoding.sampling import Randomness, RowSeeds, Sampling
from ..decoding.tree import DraftTree
from ..decoding.types import Counts, Prompts, TargetOutput
from ..llm.cuda_graphs import GraphedFunction, Output, Recorder
from ..llm.tree_cache import TreeCache
from .base import LastStateDrafter, TrainableDrafter
from .beams import SearchTree
from .cached_drafter import CachedDraft, CachedDrafter, CachedText
from .merged import MergedDrafter


class GraphedDrafter:
    """Wrapper that replays the search of a drafter, such as ReDrafter, as a CUDA graph.

    The next draft overwrites the tree. The drafter's settings must not change.
    """

    def __init__(self, drafter: TrainableDrafter, recorder: Recorder | None = None) -> None:
        self.drafter: Any = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.advance, self.select, self.skip, self.meanwhile = drafter.advance, drafter.select, drafter.skip, drafter.meanwhile
        self._sampling: Sampling | None = None
        """Of the draws that this call foresees; a part of its key."""
        self._draft = GraphedFunction(lambda *inputs: drafter.pack(self._search_now(*inputs)).fixed(), recorder)
        self._search = GraphedFunction(lambda *inputs: self._search_now(*inputs).joined(), recorder)

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        return self.drafter.init_state(prompts, prefill, max_new_tokens=max_new_tokens)

    def propose(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Any]:
        if not self._can_replay(state):
            return self.drafter.propose(state, last_token, generator=generator)
        tree, drafted = self._replayed(self._draft, state, last_token, generator)
        return self.drafter.trim(tree), drafted

    def search(
        self, state: Any, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[SearchTree, Any]:
        if not self._can_replay(state):
            return self.drafter.search(state, last_token, generator=generator)
        return self._replayed(self._search, state, last_token, generator)

    def _can_replay(self, state: Any) -> bool:
        return True

    def _replayed(
        self,
        recordings: GraphedFunction[Output],
        state: Any,
        last_token: Int[torch.Tensor, " batch"],
        generator: Randomness,
    ) -> tuple[Output, Any]:
        seeds = self._show(generator, last_token.device)
        return recordings(*seeds, state, last_token, key=self._sampling), None

    def _search_now(self, *inputs: torch.Tensor) -> SearchTree:
        generator, inputs = self._shown(inputs)
        return self.drafter.search(*inputs, generator=generator)[0]

    def _show(self, generator: Randomness, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the seeds whose draws a drafter may foresee, as the first input of a recording; nothing if it may not."""
        if not isinstance(generator, RowSeeds) or generator.sampling is None:
            self._sampling = None
            return ()
        self._sampling = generator.sampling
        return (generator.rows(device),)

    def _shown(self, inputs: tuple[torch.Tensor, ...]) -> tuple[Randomness, tuple[torch.Tensor, ...]]:
        """Return the seeds among the inputs of a recording, and the other inputs."""
        if self._sampling is None:
            return None, inputs
        return RowSeeds.of_rows(inputs[0]).shown(self._sampling), inputs[1:]


class GraphedCachedDrafter(GraphedDrafter):
    """Wrapper of a drafter with a KV cache.

    The cache stays at its address, and the next batch that fits takes it over. Any `init_state` ends
    all states that came before it, also if the batch doesn't fit.
    """

    def __init__(self, drafter: CachedDrafter, recorder: Recorder | None = None) -> None:
        super().__init__(drafter, recorder)
        self._cache: TreeCache | None = None
        self._num_moves = 0
        self._num_batches = 0

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Any:
        capacity = prompts.input_ids.shape[1] + max_new_tokens + self.drafter.draft_columns
        if self._cache is not None and self._cache.fits(len(prompts.lengths), capacity):
            self._cache.restart()
        else:
            self._cache = None  # free its memory before the next cache is allocated
            self._forget()
            self._cache = self.drafter.new_cache(prompts, max_new_tokens=max_new_tokens, is_fixed=True)
            self._num_moves = 0
        self._num_batches += 1
        return replace(self.drafter.begin(self._cache, prompts, prefill), batch_number=self._num_batches)

    def _can_replay(self, state: CachedText) -> bool:
        """Return whether a recording reads as many tokens as are unread.

        There may be more after skipped steps, or after a longer path of another drafter's tree.
        """
        assert state.batch_number == self._num_batches, "a later init_state has ended this state"
        return max(state.num_unread.host) <= self.drafter.draft_entries

    def _replayed(
        self,
        recordings: GraphedFunction[Output],
        state: CachedText,
        last_token: Int[torch.Tensor, " batch"],
        generator: Randomness,
    ) -> tuple[Output, CachedDraft]:
        cache, wide = state.cache, state.to_width(self.drafter.draft_entries)
        extent = cache.reserve_columns(self.drafter.draft_columns)
        if cache.num_moves > self._num_moves:
            self._forget()
            self._num_moves = cache.num_moves
        features = () if wide.unread_features is None else (wide.unread_features,)
        inputs = last_token, cache.lengths.device, wide.num_unread.device, wide.unread_tokens, *features
        output = recordings(*self._show(generator, last_token.device), *inputs, key=(extent, self._sampling))
        cache.count(state.num_unread.host)
        return output, CachedDraft(state=state, last_token=last_token)

    def _forget(self) -> None:
        self._draft.forget()
        self._search.forget()

    def _search_now(self, *inputs: torch.Tensor) -> SearchTree:
        """Search after texts of given lengths, which the cache has at first."""
        generator, (last_token, lengths, num_unread, tokens, *features) = self._shown(inputs)
        assert self._cache is not None, "init_state must come before propose"
        self._cache.lengths.device.copy_(lengths)  # a recording runs several times
        # With these numbers the host's lengths stay as they are: `_replayed` counts.
        counts = Counts(num_unread, (0,) * len(num_unread))
        state = CachedText(
            cache=self._cache, unread_tokens=tokens, unread_features=next(iter(features), None), num_unread=counts
        )
        # A recording reads accepted tokens again, so that all steps are alike.
        return replace(self.drafter.search_after(state, last_token, generator), cache_entries=None)


def graphed(drafter: Drafter[Any, Any], recorder: Recorder | None = None) -> Drafter[Any, Any]:
    """Return a drafter that is replayed as CUDA graphs; the drafter itself if it can't be recorded.

    Recorded are trained drafters whose state is a hidden state or has a KV cache. Of a merged drafter,
    the searches of such sources are recorded.
    """
    if isinstance(drafter, MergedDrafter):
        return drafter.recorded(lambda source: graphed(source, recorder) if isinstance(source, TrainableDrafter) else source)
    if isinstance(drafter, LastStateDrafter):
        return GraphedDrafter(drafter, recorder)
    if isinstance(drafter, CachedDrafter):
        return GraphedCachedDrafter(drafter, recorder)
    return drafter
