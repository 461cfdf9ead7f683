"""A KV cache that holds a committed text and, behind it, the nodes of one draft tree."""

from typing import Any

import torch
from jaxtyping import Int
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [batch, head, capacity, head_dim], allocated once and written in place.

    A forward pass over n tokens writes entries `committed .. committed + n` and sees all entries up to there. Nothing moves
    until the owner commits: what lies behind `committed` is overwritten by the next pass.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.committed = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, num_heads = key_states.shape[:2]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(batch, num_heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(batch, num_heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._buffers()
        end = self.committed + key_states.shape[2]
        assert end <= self.capacity, f"{end} entries in a cache of {self.capacity}: the target reserved too little"
        keys[:, :, self.committed : end] = key_states
        values[:, :, self.committed : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.committed + query_length, 0

    def get_seq_length(self) -> int:
        return self.committed

    def get_max_length(self) -> int:
        return self.capacity

    def keep(self, entries: Int[torch.Tensor, "batch kept"]) -> None:
        """Move the entries `committed + entries` to the end of the committed ones; the caller then advances `committed`."""
        index = entries[:, None, :, None] + self.committed
        for buffer in self._buffers():
            kept = buffer.gather(2, index.expand(-1, buffer.shape[1], -1, buffer.shape[3]))
            buffer[:, :, self.committed : self.committed + entries.shape[1]] = kept

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


class TreeCache(Cache):
    """The layers of a model, growing together."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.tree_layers = [TreeCacheLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))

    @property
    def committed(self) -> int:
        """Number of tokens whose keys and values are final."""
        return self.tree_layers[0].committed

    def advance(self, num_tokens: int) -> None:
        """Commit the `num_tokens` entries behind the committed ones."""
        for layer in self.tree_layers:
            layer.committed += num_tokens

    def keep(self, entries: Int[torch.Tensor, "batch kept"]) -> None:
        """Of the last pass's entries, commit those named, in that order, and forget the others."""
        for layer in self.tree_layers:
            layer.keep(entries)
        self.advance(entries.shape[1])
