"""Base class of drafters with a KV cache of their own, whose drafts can be recorded."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int

from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, Counts, Prompts, TargetOutput
from ..llm.tree_cache import CacheSnapshot, TreeCache, extent_step
from .base import TrainableDrafter
from .beams import SearchTree


class CachedDrafter(TrainableDrafter):
    """A drafter with a KV cache.

    Its state has a snapshot of the cache, `text`, and the number of entries of each row that the
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

    def drafted_in(self, text: CacheSnapshot, last_token: Int[torch.Tensor, " batch"]) -> Any:
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
