"""Reading of prompts and draft trees by a model's layers, without its embeddings and head."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..decoding.tree import depths
from ..decoding.types import Counts
from .frozen_model import context_length
from .recurrent_states import Mixer, RecurrentStates, find_mixers
from .split_attention import choose_num_parts
from .tree_attention import (
    KINDS_WITHOUT_MASK,
    attention_kinds,
    grouped_heads,
    keeps_keys,
    masks_by_kind,
    require_tree_attention,
)
from .tree_cache import TreeCache, extent_step

Output = TypeVar("Output")

MAX_GRAPHS = 32
"""Most graphs that are compiled of a model; PyTorch's default is 8."""


def compile_passes(model: PreTrainedModel) -> Any:
    """Compile a model for the passes of a `TreeReader`.

    One or several rows, tokens and parts of the keys, and a cache that is full or not, make a graph
    each. Beyond PyTorch's limit, further passes would run eagerly, with no more than a warning.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    return torch.compile(model)


class TreeReader:
    """Preparation of passes over prompts and draft trees: positions, masks and cache.

    The caller's `run` is the pass itself: a whole model, or some of its layers. It is called with
    the position ids, masks and cache of one pass, under the names that transformers' models use.
    The caller passes the caches in, and decides with `TreeCache.keep` which entries a cache keeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_fixed: bool,
        num_present: int | None = None,
        layer_devices: Sequence[torch.device] = (),
    ) -> None:
        self.model, self.is_fixed = model, is_fixed
        self.layer_devices = layer_devices
        """Device of each layer; empty if all are on one device."""
        self.num_present = num_present
        """How many of the model's layers are in this process; None: all."""
        self.kinds: dict[str, int | None] = {}
        self.dtype = torch.float32
        self.mixers: list[Mixer] = []
        self._last_position = context_length(model) - 1

    def require_trees(self) -> None:
        """Raise ValueError if the model's configuration shows that it can't read draft trees."""
        require_tree_attention(self.model)
        self.mixers = find_mixers(self.model)
        if self.mixers and self.is_fixed:
            raise ValueError(
                f"{type(self.model).__name__} has recurrent layers, whose passes depend on the tree's shape, so they can't be "
                "compiled or recorded; leave target.compiled and target.cuda_graphs out"
            )
        self.kinds, self.dtype = attention_kinds(self.model), self.model.dtype

    def new_cache(self, batch: int, capacity: int, device: torch.device) -> TreeCache:
        """Return an empty cache, with room for `capacity` tokens in each row."""
        with_keys = keeps_keys(self.model)
        return TreeCache(
            self.model.config.get_text_config().num_hidden_layers,
            batch,
            capacity,
            device,
            extent_step=extent_step(device, is_fixed=self.is_fixed),
            is_fixed=self.is_fixed,
            num_present=sum(with_keys) if self.num_present is None else self.num_present,
            layer_devices=[*compress(self.layer_devices, with_keys)],
            recurrent=RecurrentStates(self.mixers) if self.mixers else None,
        )

    def read_prompts(
        self, cache: TreeCache, lengths: Sequence[int], device: torch.device, run: Callable[..., Output]
    ) -> Output:
        """Read prompts, right-padded to the longest, into an empty cache."""
        cache.begin_prefill(len(lengths), max(lengths))
        positions = torch.arange(max(lengths), device=device)[None]
        # No mask: under causal attention no token sees the padding on its right.
        with nullcontext() if cache.recurrent is None else cache.recurrent.reading_prompts(lengths):
            output = run(position_ids=positions, attention_mask=None, past_key_values=cache, use_cache=True)
        cache.keep(None, Counts.of(lengths, device))
        cache.trim()
        return output

    def begin(self, cache: TreeCache, num_nodes: int, num_read: int = 0) -> bool:
        """Prepare a pass over the last token and a tree, except the first `num_read` entries.

        Those entries were read since the last `keep`. Returns whether the cache has moved (see
        `TreeCache.begin_pass`).
        """
        is_masked = self._needs_mask(cache, num_nodes)
        return cache.begin_pass(1 + num_nodes - num_read, offset=num_read, is_masked=is_masked)

    def num_parts(self, cache: TreeCache) -> int:
        """Return in how many parts the pass that began reads its keys, if it has a mask."""
        return choose_num_parts(self.model, cache)

    def read(self, cache: TreeCache, lineage: Int[torch.Tensor, "batch node depth"], run: Callable[..., Output]) -> Output:
        """Read the entries that `begin` has prepared. A CUDA graph can record this method."""
        # 1. Positions: a node's depth after the committed text. Tokens beyond the context window
        # are never emitted; their positions are clamped only to stay inside a position table.
        cache.locate()
        num_nodes, lengths = lineage.shape[1], cache.lengths.device
        positions = lengths[:, None]
        if num_nodes:
            positions = positions + pad(depths(lineage), (1, 0))
        positions = positions.clamp(max=self._last_position)
        # 2. Run the pass over the unread entries, with a mask if they don't all see the same
        # columns.
        unread = slice(1 + num_nodes - cache.num_written, None)
        arguments = {"position_ids": positions[:, unread], "past_key_values": cache, "use_cache": True}
        reading = nullcontext() if cache.recurrent is None else cache.recurrent.reading_tree(lineage)
        if not self._needs_mask(cache, num_nodes):
            with reading, grouped_heads(self.model) if self._folds_one_query(cache) else nullcontext():
                return run(attention_mask=None, **arguments)
        num_parts = self.num_parts(cache)
        masks = masks_by_kind(self.kinds, lineage, lengths, cache.extent, self.dtype, unread, num_parts)
        if isinstance(masks, dict):
            masks = dict.fromkeys(KINDS_WITHOUT_MASK) | masks
        with reading, grouped_heads(self.model):
            return run(attention_mask=masks, **arguments)

    def _folds_one_query(self, cache: TreeCache) -> bool:
        """Return whether our attention is faster than transformers' for one query that sees all columns.

        It is so on a CPU in 16 bits (see `has_grouped_kernel`). Transformers hides the columns outside a window.
        """
        if cache.lengths.device.device.type != "cpu" or self.dtype.itemsize >= 4:
            return False
        return not any(window is not None and window < cache.extent for window in self.kinds.values())

    def _needs_mask(self, cache: TreeCache, num_nodes: int) -> bool:
        """Return whether a pass needs a mask.

        Plain decoding of equally long rows needs none, and kernels without a mask are faster.
        """
        return num_nodes > 0 or not cache.is_even or cache.is_fixed
