"""A draft model's search at each step: a tree or a chain of one depth, or a drawn chain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from ..decoding.acceptance import last_entry
from ..decoding.sampling import Randomness, Sampling, draw, warp
from ..decoding.tree import DraftTree, Drawn, chain_tree
from ..decoding.types import NO_NODE, AcceptedPath, Counts
from ..target.hf_target import HFTarget
from ..target.tree_cache import CacheSnapshot, TreeCache
from .beams import SearchTree, likeliest_nodes, likeliest_successors, take
from .calibration import Prior
from .small_models import DraftModelConfig
from .unread import MAX_UNREAD, append


@dataclass(frozen=True, slots=True, kw_only=True)
class TextState:
    """State of a batch of texts without their last tokens, which `propose` gets."""

    text: CacheSnapshot
    """Keys and values of the texts without the unread tokens and the last token."""
    tokens: Int[torch.Tensor, "batch unread"]
    """The unread tokens, at least one."""
    num_unread: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTree:
    """Results of drafting a tree."""

    text: CacheSnapshot
    """Keys and values of the texts without their last token; the tree's entries follow them."""
    last_token: Int[torch.Tensor, " batch"]
    entries: Int[torch.Tensor, "batch node"]
    """Entry of each node in the cache after the text. Entry 0 is the last token."""


class FixedSearch:
    """Search of a draft model that begins anew at each step.

    The KV cache holds each text without its last two tokens. Each step begins by reading both,
    although the model may have read the first of them as a draft token. So all steps are alike, and
    drafting `length` tokens deep takes `length` passes. After steps whose tree other drafters have
    made, there are more unread tokens; the first pass reads them all.
    """

    def __init__(self, reader: HFTarget, config: DraftModelConfig) -> None:
        self.reader, self.config = reader, config

    @property
    def max_nodes(self) -> int:
        return self.max_entries if self.config.tree_nodes is None else min(self.max_entries, self.config.tree_nodes)

    @property
    def max_entries(self) -> int:
        """Most nodes of a search."""
        return self.config.length * self.config.top_k

    def use_prior(self, prior: Prior) -> None:
        """Do nothing: the tree's size doesn't depend on how likely its nodes are."""

    def begin(self, text: CacheSnapshot, last_tokens: Int[torch.Tensor, " batch"]) -> TextState:
        """Return the state of texts whose last tokens aren't in the cache."""
        num_unread = Counts(torch.ones_like(last_tokens), (1,) * len(last_tokens))
        return TextState(text=text, tokens=last_tokens[:, None], num_unread=num_unread)

    def propose(
        self, state: TextState, last_token: Int[torch.Tensor, " batch"], generator: Randomness
    ) -> tuple[DraftTree, DraftedTree]:
        """Draft the most probable continuations of a search, or a chain drawn at random."""
        # 1. Read the last tokens of each text: all but the last are kept, the last starts the tree.
        cache, logits = self._read_unread(state, last_token)
        # 2. Draw a chain, or search.
        if self.config.temperature:
            tree = self._draw(cache, logits, last_token, generator)
            entries = torch.arange(1, tree.num_nodes + 1, device=last_token.device).expand_as(tree.tokens)
        else:
            search = self._search(cache, logits, last_token)
            nodes = likeliest_nodes(search, self.max_nodes)
            tree, entries = take(search, nodes), 1 + nodes  # entry 0 is the last token
        return tree, DraftedTree(text=cache.snapshot(), last_token=last_token, entries=entries)

    def search(self, state: TextState, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, TextState]:
        cache, logits = self._read_unread(state, last_token)
        return self._search(cache, logits, last_token), self.begin(cache.snapshot(), last_token)

    def skip(self, state: TextState, last_token: Int[torch.Tensor, " batch"]) -> TextState:
        """Leave the last token unread as well, unless there are many such tokens."""
        if max(state.num_unread.host) < MAX_UNREAD:
            tokens = append(state.tokens, state.num_unread, last_token[:, None])
            return TextState(text=state.text, tokens=tokens, num_unread=state.num_unread + 1)
        cache, _ = self._read_unread(state, last_token)
        return self.begin(cache.snapshot(), last_token)

    def _read_unread(
        self, state: TextState, last_token: Int[torch.Tensor, " batch"]
    ) -> tuple[TreeCache, Float[torch.Tensor, "batch 1 vocab"]]:
        """Read the last tokens, keep all but the last, and return the logits after the last."""
        cache = state.text.writable()
        tokens = append(state.tokens, state.num_unread, last_token[:, None])
        if self.reader.has_fixed_shapes:  # few lengths: each is compiled or recorded
            num_nodes = tokens.shape[1] - 1
            tokens = pad(tokens, (0, (1 << (num_nodes - 1).bit_length()) - num_nodes))
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        last = state.num_unread.device[:, None, None].expand(-1, 1, logits.shape[-1])
        cache.keep(None, state.num_unread)
        return cache, logits.gather(1, last)

    def _search(
        self, cache: TreeCache, logits: Float[torch.Tensor, "batch 1 vocab"], last_token: Int[torch.Tensor, " batch"]
    ) -> SearchTree:
        """Search for the most probable continuations by depth; all but the last depth are read."""
        width, length = self.config.top_k, self.config.length
        scores = torch.zeros(logits.shape[:2], device=logits.device)  # log-probability of each path
        nodes = torch.full_like(last_token, NO_NODE)[:, None]  # at the end of each path
        tokens, parents, all_scores = (nodes[:, :0], nodes[:, :0], scores[:, :0])
        sizes: list[int] = []
        while True:
            # 1. Extend each path by its most probable tokens, and keep the most probable paths.
            new, path, scores = likeliest_successors(logits, scores, width)
            tokens, parents = torch.cat([tokens, new], dim=1), torch.cat([parents, nodes.gather(1, path)], dim=1)
            all_scores = torch.cat([all_scores, scores], dim=1)
            nodes = torch.arange(sum(sizes), sum(sizes) + new.shape[1], device=new.device).expand_as(new)
            sizes.append(new.shape[1])
            if len(sizes) == length:
                return SearchTree(tokens=tokens, parents=parents, scores=all_scores, level_sizes=tuple(sizes))
            # 2. Read the new nodes.
            tree = DraftTree(tokens=tokens, parents=parents, max_depth=len(sizes))
            logits = self.reader.read_tree(cache, last_token, tree, num_read=1 + sum(sizes[:-1])).logits

    def _draw(
        self,
        cache: TreeCache,
        logits: Float[torch.Tensor, "batch 1 vocab"],
        last_token: Int[torch.Tensor, " batch"],
        generator: Randomness,
    ) -> DraftTree:
        """Draw a chain from the model's distribution."""
        sampling = Sampling(temperature=self.config.temperature)
        probs, tokens = [warp(logits, sampling)], [draw(warp(logits, sampling)[:, 0], generator)]
        while len(tokens) < self.max_nodes:
            chain = chain_tree(torch.stack(tokens, dim=1))
            logits = self.reader.read_tree(cache, last_token, chain, num_read=len(tokens)).logits
            probs.append(warp(logits, sampling))
            tokens.append(draw(probs[-1][:, 0], generator))
        chain = chain_tree(torch.stack(tokens, dim=1))
        drawn_from = pad(torch.cat(probs, dim=1), (0, 0, 0, 1))  # the last node has no children
        return replace(chain, drawn=Drawn(probs=drawn_from, max_children=1))

    def meanwhile(self, drafted: DraftedTree | TextState) -> None:
        """Return None: the next step searches anew."""

    def advance(self, drafted: DraftedTree | TextState, tree: DraftTree, accepted: AcceptedPath) -> TextState:
        """Keep all but the last two tokens of the new text in the cache.

        These are the last token and all accepted nodes except one. Of a tree that isn't its own,
        the drafter keeps nothing: the next draft reads the accepted tokens.
        """
        if isinstance(drafted, TextState):
            accepted_tokens = tree.tokens.gather(1, accepted.nodes.clamp(min=0)).clamp(min=0)
            tokens = append(drafted.tokens, drafted.num_unread, accepted_tokens)
            return TextState(text=drafted.text, tokens=tokens, num_unread=drafted.num_unread + accepted.num_accepted)
        cache, entries = drafted.text.writable(), drafted.entries
        # A cache that isn't the newest is a copy of the texts without the tree: read the tree
        # again.
        if not drafted.text.is_newest:
            self.reader.read_tree(cache, drafted.last_token, tree)
            entries = torch.arange(1, tree.num_nodes + 1, device=entries.device).expand_as(tree.tokens)
        kept = None
        if num_kept := accepted.nodes.shape[1]:
            kept = pad(entries.gather(1, accepted.nodes.clamp(min=0)), (1, 0))[:, :num_kept]
        cache.keep(kept, accepted.num_accepted)
        tokens = torch.cat([drafted.last_token[:, None], tree.tokens], dim=1)
        return self.begin(cache.snapshot(), tokens.gather(1, last_entry(accepted)[:, None])[:, 0])

    def select(self, state: TextState, rows: Sequence[int]) -> TextState:
        """Return the state of these rows of the batch only."""
        return TextState(text=state.text.select(rows), tokens=state.tokens[rows], num_unread=state.num_unread.select(rows))
