"""Decoding state of a block drafter: the context that its layers have read, and unread features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int

from ..decoding.types import AcceptedPath, Counts, Prompts, append
from ..llm.tree_attention import visible_columns
from ..llm.tree_cache import TreeCache


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """State of a batch of texts. At least the features of each row's last token are unread."""

    text: TreeCache
    """Keys and values of the tokens that the layers have read."""
    features: Float[torch.Tensor, "batch unread feature"]
    num_unread: Counts

    def select(self, rows: Sequence[int]) -> "BlockState":
        """Return the state of these rows only."""
        self.text.select(rows)
        return BlockState(text=self.text, features=self.features[rows], num_unread=self.num_unread.select(rows))


@runtime_checkable
class BlockReader(Protocol):
    """A drafter as decoding uses it; see `Block`."""

    config: Any

    def context(self, features: torch.Tensor) -> torch.Tensor: ...
    def write_context(self, context: torch.Tensor, positions: torch.Tensor, cache: Any) -> None: ...
    def slot_inputs(self, first_token: torch.Tensor, latest: torch.Tensor) -> torch.Tensor: ...
    def read_slots(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache_of: Callable[[int], Any],
        *,
        context: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def read_prompts(
    drafter: BlockReader, cache: TreeCache, prompts: Prompts, features: Float[torch.Tensor, "batch seq feature"]
) -> BlockState:
    """Read all tokens of the prompts except the last."""
    batch, num_tokens = prompts.input_ids.shape
    # At least one token, which isn't kept: the cache then has its memory before anything is recorded.
    num_read = max(1, num_tokens - 1)
    cache.begin_prefill(batch, num_read)
    positions = torch.arange(num_read, device=features.device)[None]
    drafter.write_context(drafter.context(features[:, :num_read]), positions, cache)
    cache.keep(None, Counts.of([length - 1 for length in prompts.lengths], features.device))
    last = prompts.last(features)[:, None]
    return BlockState(text=cache, features=last, num_unread=Counts.of([1] * batch, features.device))


def read_unread(drafter: BlockReader, cache: TreeCache, state: BlockState) -> None:
    """Read the unread tokens of each row."""
    num_entries = max(state.num_unread.host)
    cache.begin_pass(num_entries)
    cache.locate()
    positions = cache.lengths.device[:, None] + torch.arange(num_entries, device=state.features.device)
    drafter.write_context(drafter.context(state.features[:, :num_entries]), positions, cache)
    cache.keep(None, state.num_unread)


def draft_pass(
    drafter: BlockReader,
    cache: TreeCache,
    last_token: Int[torch.Tensor, " batch"],
    num_unread: Counts,
    features: Float[torch.Tensor, "batch entry feature"],
) -> Float[torch.Tensor, "batch slot hidden"]:
    """Read the unread tokens of each row and a block after them, and return the block's outputs.

    One pass reads both: a draft's time is mostly that of starting operations and of reading
    weights. The cache keeps the tokens, and nothing of the block.

        row 0   a b c|d e f + +         unread d e f, then the slots
        row 1   k l|m . . + +           unread m: no query sees the padding
    """
    # 1. The unread tokens, and the inputs of the slots.
    num_entries, unread = features.shape[1], num_unread.device
    context = drafter.context(features)
    last = (unread - 1)[:, None, None].expand(-1, -1, context.shape[-1])
    inputs = drafter.slot_inputs(last_token, context.gather(1, last)[:, 0])
    # 2. The pass. All its queries see the same columns. Slots have the positions after the row's tokens.
    size = num_entries + inputs.shape[1]
    cache.begin_pass(size)
    cache.locate()
    entry, lengths = torch.arange(size, device=context.device), cache.lengths.device
    is_slot = entry >= num_entries
    visible = visible_columns((is_slot | (entry < unread[:, None]))[:, None], lengths, cache.extent)[:, None]
    positions = lengths[:, None] + torch.where(is_slot, entry - num_entries + unread[:, None], entry)
    outputs = drafter.read_slots(inputs, positions, visible.expand(-1, -1, size, -1), lambda _: cache, context=context)
    cache.keep(None, num_unread)
    return outputs


def advanced(
    drafted: TreeCache | BlockState, accepted: AcceptedPath, features: Float[torch.Tensor, "batch entry feature"]
) -> BlockState:
    """Return the state after an accepted path, whose features are those of the verified entries.

    `drafted` is the text that has been read, or a state that wasn't read.
    """
    entries, counts = accepted.entries[..., None], accepted.num_read
    new = features.gather(1, entries.expand(-1, -1, features.shape[-1]))
    if isinstance(drafted, TreeCache):
        return BlockState(text=drafted, features=new, num_unread=counts)
    features = append(drafted.features, drafted.num_unread, new)
    return BlockState(text=drafted.text, features=features, num_unread=drafted.num_unread + counts)
