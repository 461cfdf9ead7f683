"""A draft model's search at each step: a tree or a chain of one depth, or a drawn one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, chain_tree, empty_tree
from ..decoding.types import MAX_UNREAD, NO_NODE, AcceptedPath, Counts, append
from ..llm.hf_target import HFTarget
from ..llm.tree_cache import TreeCache
from .beams import SearchTree, likeliest_nodes, likeliest_successors, take
from .group_search import GroupDrawing, GroupSearch, level_sizes
from .options import DraftModelConfig
from .vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTextState:
    """State of a batch of texts without their last tokens, which `propose` gets."""

    text: TreeCache
    """Keys and values of the texts without the unread tokens and the last token."""
    tokens: Int[torch.Tensor, "batch unread"]
    """The unread tokens, at least one."""
    num_unread: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadTree:
    """A tree of which the next draft reads the accepted tokens."""

    text: TreeCache
    """Keys and values of the texts without their last token."""
    last_token: Int[torch.Tensor, " batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTree(UnreadTree):
    """A tree whose entries follow the text, and of which the accepted ones are kept."""

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
        num_nodes = self.config.length * self.config.top_k
        if self.config.temperature:
            num_nodes = sum(level_sizes(self._num_children, self.config.top_k, self.config.length))
        return num_nodes if self.config.tree_nodes is None else min(num_nodes, self.config.tree_nodes)

    @property
    def max_entries(self) -> int:
        """Most nodes that the cache holds: those that a search reads, or those of a whole tree."""
        return max(self.config.length * self.config.top_k, self.max_nodes)

    @property
    def _num_children(self) -> int:
        """Children of each node of a drawn tree: the same number for all, and at most the tree."""
        num_children = min(self.config.top_k, self.reader.vocab_size)
        return num_children if self.config.tree_nodes is None else min(num_children, self.config.tree_nodes)

    def begin(self, text: TreeCache, last_tokens: Int[torch.Tensor, " batch"]) -> DraftTextState:
        """Return the state of texts whose last tokens aren't in the cache."""
        num_unread = Counts(torch.ones_like(last_tokens), (1,) * len(last_tokens))
        return DraftTextState(text=text, tokens=last_tokens[:, None], num_unread=num_unread)

    def propose(
        self, state: DraftTextState, last_token: Int[torch.Tensor, " batch"], generator: Randomness
    ) -> tuple[DraftTree, DraftedTree]:
        """Draft the most probable continuations of a search, or groups drawn at random."""
        # 1. Read the last tokens of each text: all but the last are kept, the last starts the tree.
        cache, logits = self._read_unread(state, last_token)
        # 2. Draw a tree, or search.
        if self.config.temperature:
            tree, entries = self._draw(cache, logits, last_token, generator)
        else:
            search = self._search(cache, logits, last_token)
            nodes = likeliest_nodes(search, self.max_nodes)
            tree, entries = take(search, nodes), 1 + nodes  # entry 0 is the last token
        return tree, DraftedTree(text=cache, last_token=last_token, entries=entries)

    def search(self, state: DraftTextState, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, DraftTextState]:
        cache, logits = self._read_unread(state, last_token)
        return self._search(cache, logits, last_token), self.begin(cache, last_token)

    def skip(self, state: DraftTextState, last_token: Int[torch.Tensor, " batch"]) -> DraftTextState:
        """Leave the last token unread as well, unless there are many such tokens."""
        if max(state.num_unread.host) < MAX_UNREAD:
            tokens = append(state.tokens, state.num_unread, last_token[:, None])
            return DraftTextState(text=state.text, tokens=tokens, num_unread=state.num_unread + 1)
        cache, _ = self._read_unread(state, last_token)
        return self.begin(cache, last_token)

    def _read_unread(
        self, state: DraftTextState, last_token: Int[torch.Tensor, " batch"]
    ) -> tuple[TreeCache, Float[torch.Tensor, "batch 1 vocab"]]:
        """Read the last tokens, keep all but the last, and return the logits after the last."""
        cache = state.text
        tokens = append(state.tokens, state.num_unread, last_token[:, None])
        if self.reader.has_fixed_shapes:  # few lengths: each is compiled or recorded
            num_nodes = tokens.shape[1] - 1
            tokens = pad(tokens, (0, (1 << (num_nodes - 1).bit_length()) - num_nodes))
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        last = state.num_unread.device[:, None, None].expand(-1, 1, logits.shape[-1])
        cache.keep(None, state.num_unread)
        return cache, logits.gather(1, last)

    def search_in(
        self,
        cache: TreeCache,
        last_token: Int[torch.Tensor, " batch"],
        num_unread: Counts,
        tokens: Int[torch.Tensor, "batch unread"],
    ) -> SearchTree:
        """Search with shapes that don't depend on the texts (see `CachedDrafter.search_in`)."""
        tokens = pad(tokens, (0, 1)).scatter(1, num_unread.device[:, None], last_token[:, None])
        logits = self.reader.read_tree(cache, tokens[:, 0], chain_tree(tokens[:, 1:])).logits
        last = num_unread.device[:, None, None].expand(-1, 1, logits.shape[-1])
        cache.keep(None, num_unread)
        return self._search(cache, logits.gather(1, last), last_token)

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
    ) -> tuple[DraftTree, Int[torch.Tensor, "batch node"]]:
        """Draw a tree from the model's distribution, and return the entries of its nodes."""
        drawing = GroupDrawing(
            temperature=self.config.temperature,
            num_children=self._num_children,
            vocabulary=DraftVocabulary(size=self.reader.vocab_size),
            generator=generator,
        )

        def read(tree: DraftTree, num_read: int) -> Float[torch.Tensor, "batch node vocab"]:
            return self.reader.read_tree(cache, last_token, tree, num_read=num_read).logits

        num_groups = self.max_nodes // self._num_children
        return draw_tree(drawing, logits, read, top_k=self.config.top_k, depth=self.config.length, num_groups=num_groups)

    def advance(self, drafted: UnreadTree | DraftTextState, tree: DraftTree, accepted: AcceptedPath) -> DraftTextState:
        """Keep all but the last two tokens of the new text in the cache.

        These are the last token and all accepted nodes except one. Of a tree that isn't its own, and
        of one drafted in a recording, the drafter keeps nothing: the next draft reads the accepted
        tokens.
        """
        if isinstance(drafted, DraftTextState):
            tokens = append(drafted.tokens, drafted.num_unread, accepted.drafts)
            return DraftTextState(text=drafted.text, tokens=tokens, num_unread=drafted.num_unread + accepted.num_accepted)
        if not isinstance(drafted, DraftedTree):
            tokens = torch.cat([drafted.last_token[:, None], accepted.drafts], dim=1)
            return DraftTextState(text=drafted.text, tokens=tokens, num_unread=accepted.num_read)
        cache, entries = drafted.text, drafted.entries
        kept = None
        if num_kept := accepted.path.shape[1]:
            kept = pad(entries.gather(1, accepted.path.clamp(min=0)), (1, 0))[:, :num_kept]
        cache.keep(kept, accepted.num_accepted)
        tokens = torch.cat([drafted.last_token[:, None], tree.tokens], dim=1)
        return self.begin(cache, tokens.gather(1, accepted.entry[:, None])[:, 0])

    def select(self, state: DraftTextState, rows: Sequence[int]) -> DraftTextState:
        """Return the state of these rows of the batch only."""
        state.text.select(rows)
        return DraftTextState(text=state.text, tokens=state.tokens[rows], num_unread=state.num_unread.select(rows))


def draw_tree(
    drawing: GroupDrawing,
    logits: Float[torch.Tensor, "batch 1 vocab"],
    read: Callable[[DraftTree, int], torch.Tensor],
    *,
    top_k: int,
    depth: int,
    num_groups: int,
) -> tuple[DraftTree, Int[torch.Tensor, "batch node"]]:
    """Draw a tree of `num_groups` groups, and return it with the cache's entries of its nodes.

    `logits` are those after the last committed token. `read` reads a growing tree of the nodes that
    get children, of which so many entries were read before, and returns the logits of the others.
    The entries of nodes without children are arbitrary.
    """
    search, tree = GroupSearch(len(logits), logits.device), empty_tree(len(logits), logits.device)
    expanded, first, width = tree.tokens, NO_NODE, 1  # `first`: the first of the nodes read last
    while True:
        # 1. Draw the children of the nodes read last, at first of the last token.
        search.add(*drawing.children(logits))
        if search.depth == min(depth, num_groups):  # a deeper node has no room
            break
        # 2. Read the most probable ones.
        tokens, nodes, parent = search.expand(top_k)
        num_read = 1 + tree.num_nodes
        tree = DraftTree(
            tokens=torch.cat([tree.tokens, tokens], dim=1),
            parents=torch.cat([tree.parents, first + parent], dim=1),
            max_depth=search.depth,
        )
        expanded, first, width = torch.cat([expanded, nodes], dim=1), first + width, tokens.shape[1]
        logits = read(tree, num_read)
    # 3. Keep whole groups, and find the entries of their nodes.
    found = search.tree()
    groups = drawing.kept_groups(found, num_groups)
    entries = torch.arange(1, tree.num_nodes + 1, device=expanded.device).expand_as(expanded)
    entries = torch.zeros_like(found.tokens).scatter(1, expanded, entries)
    return drawing.tree(found, groups), entries.gather(1, drawing.nodes(groups))
