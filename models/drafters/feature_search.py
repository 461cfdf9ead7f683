"""Decoding of EAGLE-1, -2 and -3: read accepted features, then search for continuations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from ..decoding.prompts import Prompts
from ..decoding.types import NO_NODE, AcceptedPath, Counts
from ..target.tree_attention import visible_columns
from ..target.tree_cache import CacheSnapshot, TreeCache, extent_step
from .beams import SearchTree
from .ranking import largest
from .unread import append
from .vocabulary import DraftVocabulary

STATIC_FIRST_HIT = 0.6
"""Probability that the most probable child is right, in static trees.

The child of rank r (from 0) is assumed to be right with probability STATIC_FIRST_HIT / (r + 1)^2.
With four children and 26 nodes this gives a tree like that of EAGLE-1 (arXiv 2401.15077, appendix):
deep below the most probable child, and wide near the root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureState:
    """State of a batch of texts: entries that the layer has read, and unread features.

    The unread features are those that the target computed since. There are `num_unread + 1` such
    features per row, and one token fewer: the bonus token arrives with `propose`.
    """

    text: CacheSnapshot
    """Keys and values of the entries that the layer has read."""
    tokens: Int[torch.Tensor, "batch unread"]
    features: Float[torch.Tensor, "batch entry feature"]
    num_unread: Counts

    def select(self, rows: Sequence[int]) -> "FeatureState":
        """Return the state of these rows only."""
        return FeatureState(
            text=self.text.select(rows),
            tokens=self.tokens[rows],
            features=self.features[rows],
            num_unread=self.num_unread.select(rows),
        )


@runtime_checkable
class FeatureReader(Protocol):
    """A drafter as decoding uses it; see `FeatureDrafter`."""

    config: Any

    @property
    def vocabulary(self) -> DraftVocabulary: ...
    def fuse(self, features: torch.Tensor) -> torch.Tensor: ...
    def read(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor | None
    ) -> torch.Tensor: ...
    def logits(self, outputs: torch.Tensor) -> torch.Tensor: ...


def read_prompts(
    drafter: FeatureReader, prompts: Prompts, features: Float[torch.Tensor, "batch seq feature"], *, max_new_tokens: int
) -> FeatureState:
    """Read all entries of the prompts except the last, whose token the target chooses."""
    batch, num_tokens = prompts.input_ids.shape
    room = max_new_tokens + drafter.config.depth * drafter.config.top_k
    step = extent_step(features.device, is_fixed=False)
    cache = TreeCache(1, batch, num_tokens + room, features.device, extent_step=step)
    cache.begin_prefill(batch, num_tokens - 1)
    if num_tokens > 1:
        positions = torch.arange(num_tokens - 1, device=features.device)[None]
        drafter.read(prompts.input_ids[:, 1:], drafter.fuse(features[:, :-1]), positions, cache, None)
    cache.keep(None, Counts.of([length - 1 for length in prompts.lengths], features.device))
    return FeatureState(
        text=cache.snapshot(),
        tokens=prompts.input_ids[:, :0],
        features=prompts.last(features)[:, None],
        num_unread=Counts.of([0] * batch, features.device),
    )


def read_committed(
    drafter: FeatureReader, cache: TreeCache, state: FeatureState, last_token: Int[torch.Tensor, " batch"]
) -> Float[torch.Tensor, "batch hidden"]:
    """Read the accepted entries with the target's features, and return the last entry's output."""
    last = state.num_unread.device[:, None]
    tokens = append(state.tokens, state.num_unread, last_token[:, None])
    num_entries = tokens.shape[1]
    cache.begin_pass(num_entries)
    cache.locate()
    lengths = cache.lengths.device
    steps = torch.arange(num_entries, device=tokens.device)
    related = (steps <= steps[:, None]).expand(len(tokens), -1, -1)
    mask = visible_columns(related, lengths, cache.extent)[:, None]
    features = drafter.fuse(state.features[:, :num_entries])
    outputs = drafter.read(tokens, features, lengths[:, None] + steps, cache, mask)
    cache.keep(None, state.num_unread + 1)
    return outputs.gather(1, last[..., None].expand(-1, -1, outputs.shape[-1]))[:, 0]


def completed(
    drafted: CacheSnapshot | FeatureState,
    tokens: Int[torch.Tensor, "batch node"],
    accepted: AcceptedPath,
    features: Float[torch.Tensor, "batch entry feature"],
) -> FeatureState:
    """Return the state after an accepted path, with the path's tokens and features.

    `drafted` is the text that has been read; or a state that wasn't read, with the last token.
    """
    path = accepted.nodes.clamp(min=0)
    entries = pad(path + 1, (1, 0))[..., None]
    tokens = tokens.gather(1, path).clamp(min=0)
    features = features.gather(1, entries.expand(-1, -1, features.shape[-1]))
    if isinstance(drafted, CacheSnapshot):
        return FeatureState(text=drafted, tokens=tokens, features=features, num_unread=accepted.num_accepted)
    return FeatureState(
        text=drafted.text,
        tokens=append(drafted.tokens, drafted.num_unread, tokens),
        features=append(drafted.features, drafted.num_unread, features),
        num_unread=drafted.num_unread + accepted.num_accepted,
    )


def search(drafter: FeatureReader, cache: TreeCache, output: Float[torch.Tensor, "batch hidden"]) -> SearchTree:
    """Search for the most probable paths, and return all children of expanded nodes.

    At each depth the `top_k` most probable nodes are expanded (arXiv 2406.16858, section 4.1).
    `output` is the layer's output at the last committed token.
    """
    lengths = cache.lengths.device
    # States and scores of the nodes to expand, and their indexes.
    hidden, scores = output[:, None], torch.zeros(len(output), 1, device=output.device)
    node = torch.full_like(scores, NO_NODE, dtype=torch.long)
    # For each of these nodes, which of the entries read so far are the node itself or its
    # ancestors.
    related = torch.zeros(*node.shape, 0, dtype=torch.bool, device=output.device)
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    num_nodes = 0
    for depth in range(drafter.config.depth):
        # 1. The most probable children of each node, and the scores of the paths to them.
        tokens, log_probs = children(drafter, hidden)  # [batch, node, child]
        width = tokens.shape[2]
        tokens, candidates = tokens.flatten(1), (scores[..., None] + log_probs).flatten(1)
        levels.append((tokens, node.repeat_interleave(width, dim=1), candidates))
        if depth + 1 == drafter.config.depth:
            break
        # 2. The most probable paths of this depth. A stable sort, unlike `topk`, takes the first of
        # equal scores on every device.
        chosen = candidates.sort(dim=1, descending=True, stable=True).indices[:, : drafter.config.top_k]
        parent = (chosen // width)[..., None]
        itself = torch.eye(chosen.shape[1], dtype=torch.bool, device=chosen.device).expand(len(chosen), -1, -1)
        offset = related.shape[2]
        related = torch.cat([related.gather(1, parent.expand(-1, -1, offset)), itself], dim=2)
        scores, node = candidates.gather(1, chosen), num_nodes + chosen
        num_nodes += tokens.shape[1]
        # 3. Read these nodes.
        cache.begin_pass(chosen.shape[1], offset=offset)
        cache.locate()
        hidden = drafter.read(
            tokens.gather(1, chosen),
            hidden.gather(1, parent.expand(-1, -1, hidden.shape[-1])),
            (lengths + depth)[:, None].expand_as(chosen),
            cache,
            visible_columns(related, lengths, cache.extent)[:, None],
        )
    return SearchTree.of(levels)


def children(
    drafter: FeatureReader, outputs: Float[torch.Tensor, "batch node hidden"]
) -> tuple[Int[torch.Tensor, "batch node child"], Float[torch.Tensor, "batch node child"]]:
    """Return the most probable tokens after each node, and their log-probabilities (at most 0)."""
    logits = drafter.logits(outputs)
    count = min(drafter.config.top_k, logits.shape[-1])
    if drafter.config.tree == "static":
        _, chosen = largest(logits, count)
        rank = torch.arange(1, count + 1, device=chosen.device)
        log_probs = (STATIC_FIRST_HIT / rank**2).log().expand(chosen.shape)
    else:
        log_probs, chosen = largest(logits.log_softmax(-1, dtype=torch.float32), count)
    return drafter.vocabulary.target_tokens(chosen), log_probs
