"""Base class of drafters with a KV cache of their own, whose drafts can be recorded."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int

from ..decoding.prompts import Prompts
from ..decoding.tree import DraftTree
from ..decoding.types import Counts, TargetOutput
from ..target.tree_cache import CacheSnapshot, TreeCache, extent_step
from .base import TrainableDrafter


class CachedDrafter(TrainableDrafter):
    """A drafter with a KV cache.

    Its state has a snapshot of the cache, `text`, and the number of entries of each row that the
    cache still lacks, `num_unread`. A draft reads these entries first.
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

    @abstractmethod
    def draft_inputs(self, state: Any) -> tuple[torch.Tensor, ...]:
        """Return what the state knows of the unread entries: tensors [batch, entry, ...]."""

    @abstractmethod
    def num_kept(self, num_unread: Counts) -> Counts:
        """Return how many entries a draft adds to the text of each row."""

    @abstractmethod
    def draft_in(
        self, cache: TreeCache, last_token: Int[torch.Tensor, " batch"], num_unread: Counts, *inputs: torch.Tensor
    ) -> DraftTree:
        """Read the unread entries and draft a tree, as `propose` does.

        `inputs` are those of `draft_inputs`, padded to `draft_entries` entries. Shapes depend on
        nothing but the shapes of the arguments and the cache's extent.
        """

    def drafted_in(self, text: CacheSnapshot, last_token: Int[torch.Tensor, " batch"]) -> Any:
        """Return what `advance` needs after `draft_in`; `text` is the cache's text then."""
        return text

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
