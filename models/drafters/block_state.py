"""Decoding state of a block drafter: the context that its layers have read, and unread features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch.nn.functional import pad

from ..decoding.prompts import Prompts
from ..decoding.types import AcceptedPath, Counts
from ..target.tree_attention import visible_columns
from ..target.tree_cache import CacheSnapshot, TreeCache, extent_step
from .unread import append


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """State of a batch of texts. At least the features of each row's last token are unread."""

    text: CacheSnapshot
    """Keys and values of the tokens that the layers have read."""
    features: Float[torch.Tensor, "batch unread feature"]
    num_unread: Counts

    def select(self, rows: Sequence[int]) -> "BlockState":
        """Return the state of these rows only."""
        return BlockState(text=self.text.select(rows), features=self.features[rows], num_unread=self.num_unread.select(rows))


@runtime_checkable
class BlockReader(Protocol):
    """A drafter as decoding uses it; see `Block`."""

    config: Any

    def context(self, features: torch.Tensor) -> torch.Tensor: ...
    def write_context(self, context: torch.Tensor, positions: torch.Tensor, cache: Any) -> None: ...
    def read_slots(
        self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache_of: Callable[[int], Any]
    ) -> torch.Tensor: ...


def read_prompts(
    drafter: BlockReader, prompts: Prompts, features: Float[torch.Tensor, "batch seq feature"], *, max_new_tokens: int
) -> BlockState:
    """Read all tokens of the prompts except the last."""
    batch, num_tokens = prompts.input_ids.shape
    room = num_tokens + max_new_tokens + drafter.config.block
    step = extent_step(features.device, is_fixed=False)
    cache = TreeCache(drafter.config.num_layers, batch, room, features.device, extent_step=step)
    cache.begin_prefill(batch, num_tokens - 1)
    if num_tokens > 1:
        positions = torch.arange(num_tokens - 1, device=features.device)[None]
        drafter.write_context(drafter.context(features[:, :-1]), positions, cache)
    cache.keep(None, Counts.of([length - 1 for length in prompts.lengths], features.device))
    last = prompts.last(features)[:, None]
    return BlockState(text=cache.snapshot(), features=last, num_unread=Counts.of([1] * batch, features.device))


def read_unread(drafter: BlockReader, cache: TreeCache, state: BlockState) -> Float[torch.Tensor, "batch hidden"]:
    """Read the unread tokens of each row, and return the context at the last of them."""
    num_entries = max(state.num_unread.host)
    context = drafter.context(state.features[:, :num_entries])
    cache.begin_pass(num_entries)
    cache.locate()
    steps = torch.arange(num_entries, device=context.device)
    drafter.write_context(context, cache.lengths.device[:, None] + steps, cache)
    cache.keep(None, state.num_unread)
    last = state.num_unread.device[:, None, None] - 1
    return context.gather(1, last.expand(-1, -1, context.shape[-1]))[:, 0]


def slot_pass(
    drafter: BlockReader, cache: TreeCache, inputs: Float[torch.Tensor, "batch slot hidden"]
) -> Float[torch.Tensor, "batch slot hidden"]:
    """Return the outputs of a block after the texts of the cache, which keeps nothing of it."""
    batch, num_slots, _ = inputs.shape
    cache.begin_pass(num_slots)
    cache.locate()
    lengths = cache.lengths.device
    all_slots = torch.ones(batch, num_slots, num_slots, dtype=torch.bool, device=inputs.device)
    mask = visible_columns(all_slots, lengths, cache.extent)[:, None]
    positions = lengths[:, None] + torch.arange(num_slots, device=inputs.device)
    return drafter.read_slots(inputs, positions, mask, lambda _: cache)


def advanced(
    drafted: CacheSnapshot | BlockState, accepted: AcceptedPath, features: Float[torch.Tensor, "batch entry feature"]
) -> BlockState:
    """Return the state after an accepted path, whose features are those of the verified entries.

    `drafted` is the text that has been read, or a state that wasn't read.
    """
    entries = pad(accepted.nodes.clamp(min=0) + 1, (1, 0))[..., None]  # the last committed token, then the path
    new, counts = features.gather(1, entries.expand(-1, -1, features.shape[-1])), accepted.num_accepted + 1
    if isinstance(drafted, CacheSnapshot):
        return BlockState(text=drafted, features=new, num_unread=counts)
    features = append(drafted.features, drafted.num_unread, new)
    return BlockState(text=drafted.text, features=features, num_unread=drafted.num_unread + counts)
