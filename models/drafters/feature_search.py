"""Decoding of EAGLE-1, -2 and -3: read accepted features, then search for continuations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int

from ..decoding.types import AcceptedPath, Counts, Prompts, append
from ..llm.tree_attention import visible_columns
from ..llm.tree_cache import TreeCache
from .beams import SearchTree
from .group_search import GroupSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureState:
    """State of a batch of texts: entries that the layer has read, and unread features.

    The unread features are those that the target computed since. There are `num_unread + 1` such
    features per row, and one token fewer: the bonus token arrives with `propose`.
    """

    text: TreeCache
    """Keys and values of the entries that the layer has read."""
    tokens: Int[torch.Tensor, "batch unread"]
    features: Float[torch.Tensor, "batch entry feature"]
    num_unread: Counts

    def select(self, rows: Sequence[int]) -> "FeatureState":
        """Return the state of these rows only."""
        self.text.select(rows)
        return FeatureState(
            text=self.text,
            tokens=self.tokens[rows],
            features=self.features[rows],
            num_unread=self.num_unread.select(rows),
        )


@runtime_checkable
class FeatureReader(Protocol):
    """A drafter as decoding uses it; see `FeatureDrafter`."""

    config: Any

    def fuse(self, features: torch.Tensor) -> torch.Tensor: ...
    def read(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor | None
    ) -> torch.Tensor: ...


def read_prompts(
    drafter: FeatureReader, cache: TreeCache, prompts: Prompts, features: Float[torch.Tensor, "batch seq feature"]
) -> FeatureState:
    """Read all entries of the prompts except the last, whose token the target chooses."""
    batch, num_tokens = prompts.input_ids.shape
    # At least one entry, which isn't kept: the cache then has its memory before anything is recorded.
    num_read = max(1, num_tokens - 1)
    cache.begin_prefill(batch, num_read)
    positions = torch.arange(num_read, device=features.device)[None]
    drafter.read(prompts.input_ids[:, -num_read:], drafter.fuse(features[:, :num_read]), positions, cache, None)
    cache.keep(None, Counts.of([length - 1 for length in prompts.lengths], features.device))
    return FeatureState(
        text=cache,
        tokens=prompts.input_ids[:, :0],
        features=prompts.last(features)[:, None],
        num_unread=Counts.of([0] * batch, features.device),
    )


def read_unread(
    drafter: FeatureReader, cache: TreeCache, state: FeatureState, last_token: Int[torch.Tensor, " batch"]
) -> Float[torch.Tensor, "batch hidden"]:
    """Read the accepted entries of a state, with the bonus token, and return the last entry's output."""
    tokens = append(state.tokens, state.num_unread, last_token[:, None])
    return read_committed(drafter, cache, tokens, state.features[:, : tokens.shape[1]], state.num_unread)


def read_committed(
    drafter: FeatureReader,
    cache: TreeCache,
    tokens: Int[torch.Tensor, "batch entry"],
    features: Float[torch.Tensor, "batch entry feature"],
    num_unread: Counts,
) -> Float[torch.Tensor, "batch hidden"]:
    """Read `num_unread + 1` entries of each row with the target's features; keep them.

    Returns the output of the last of them. What follows it in a row is padding.
    """
    last, num_entries = num_unread.device[:, None], tokens.shape[1]
    cache.begin_pass(num_entries)
    cache.locate()
    lengths = cache.lengths.device
    steps = torch.arange(num_entries, device=tokens.device)
    related = (steps <= steps[:, None]).expand(len(tokens), -1, -1)
    mask = visible_columns(related, lengths, cache.extent)[:, None]
    outputs = drafter.read(tokens, drafter.fuse(features), lengths[:, None] + steps, cache, mask)
    cache.keep(None, num_unread + 1)
    return outputs.gather(1, last[..., None].expand(-1, -1, outputs.shape[-1]))[:, 0]


def completed(
    drafted: TreeCache | FeatureState, accepted: AcceptedPath, features: Float[torch.Tensor, "batch entry feature"]
) -> FeatureState:
    """Return the state after an accepted path, with the path's tokens and features.

    `drafted` is the text that has been read; or a state that wasn't read, with the last token.
    """
    tokens, entries = accepted.drafts, accepted.entries[..., None]
    features = features.gather(1, entries.expand(-1, -1, features.shape[-1]))
    if isinstance(drafted, TreeCache):
        return FeatureState(text=drafted, tokens=tokens, features=features, num_unread=accepted.num_accepted)
    return FeatureState(
        text=drafted.text,
        tokens=append(drafted.tokens, drafted.num_unread, tokens),
        features=append(drafted.features, drafted.num_unread, features),
        num_unread=drafted.num_unread + accepted.num_accepted,
    )


def search(
    drafter: FeatureReader,
    cache: TreeCache,
    output: Float[torch.Tensor, "batch hidden"],
    children: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    *,
    depth: int,
) -> SearchTree:
    """Search for the most probable paths, and return all children of expanded nodes.

    At each depth the `top_k` most probable nodes are expanded (arXiv 2406.16858, section 4.1).
    `output` is the layer's output at the last committed token. `children` returns the tokens after
    each of several outputs, and their log-probabilities.
    """
    lengths = cache.lengths.device
    hidden, result = output[:, None], GroupSearch(len(output), output.device)
    # For each of the nodes to expand, which of the entries read so far are the node itself or its
    # ancestors.
    related = torch.zeros(len(output), 1, 0, dtype=torch.bool, device=output.device)
    while True:
        # 1. The children of each node.
        result.add(*children(hidden))
        if result.depth == depth:
            return result.tree()
        # 2. The most probable paths of this depth.
        tokens, _, parent = result.expand(drafter.config.top_k)
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        offset = related.shape[2]
        related = torch.cat([related.gather(1, parent[..., None].expand(-1, -1, offset)), itself], dim=2)
        # 3. Read these nodes.
        cache.begin_pass(tokens.shape[1], offset=offset)
        cache.locate()
        hidden = drafter.read(
            tokens,
            hidden.gather(1, parent[..., None].expand(-1, -1, hidden.shape[-1])),
            (lengths + result.depth - 1)[:, None].expand_as(tokens),
            cache,
            visible_columns(related, lengths, cache.extent)[:, None],
        )
