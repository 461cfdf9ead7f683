"""Search trees, the choice of their nodes, and beam search with a recurrent drafter.

Beam search and its merged prefixes are those of arXiv 2403.09919, sections 3.2 and 3.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch.nn.functional import pad

from ..decoding.sampling import Randomness, foreseen
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE
from .vocabulary import DraftVocabulary


@runtime_checkable
class RecurrentDrafter(Protocol):
    """A drafter as the beam search uses it; see `Redrafter`."""

    @property
    def vocabulary(self) -> DraftVocabulary: ...
    def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def first_state(self, embedding: torch.Tensor) -> torch.Tensor: ...
    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTree:
    """All nodes that a search had at any depth, such as the beams of a beam search.

    Paths share prefixes, so they form a tree.
    Nodes are ordered by depth, so parents come before their children. `level_sizes` counts the
    nodes of each depth. `scores` are log-probabilities of the whole path; a child's score never
    exceeds its parent's.
    """

    tokens: Int[torch.Tensor, "batch node"]
    parents: Int[torch.Tensor, "batch node"]
    scores: Float[torch.Tensor, "batch node"]
    level_sizes: tuple[int, ...]
    numbers: Float[torch.Tensor, "batch number"] | None = None
    """Tokens, parents and scores side by side, for one transfer to the host; None if not yet `joined`."""
    cache_entries: Int[torch.Tensor, "batch node"] | None = None
    """See `DraftTree.cache_entries`."""

    def joined(self) -> "SearchTree":
        """Return the tree with its `numbers`: float32 holds every whole number up to 2**24 exactly."""
        if self.numbers is not None:
            return self
        return replace(self, numbers=torch.cat([self.tokens.float(), self.parents.float(), self.scores.float()], dim=1))

    @classmethod
    def of(cls, levels: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> "SearchTree":
        """Join the tokens, parents and scores of each depth."""
        tokens, parents, scores = (torch.cat(values, dim=1) for values in zip(*levels, strict=True))
        return cls(tokens=tokens, parents=parents, scores=scores, level_sizes=tuple(level[0].shape[1] for level in levels))


def beam_search(
    drafter: RecurrentDrafter,
    hidden: Float[torch.Tensor, "batch depth hidden"],
    last_token: Int[torch.Tensor, " batch"],
    *,
    width: int,
    top_k: int | None = None,
    generator: Randomness = None,
) -> SearchTree:
    """Search for the `width` most probable continuations, with a token for each `hidden` vector.

    With a `generator` that shows its draws, for those that the target is likely to draw.

    A vocabulary smaller than `width`, or a smaller `top_k` (see `likeliest_successors`), gives fewer
    beams. All beams advance together: there is no loop over
    beams, and the host doesn't wait.
    """
    length = hidden.shape[1]
    state = drafter.first_state(drafter.embed(last_token))[:, None]  # [batch, beam, hidden]
    scores = torch.zeros(state.shape[:2], device=state.device)  # log-probability of each beam
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    first_node = NO_NODE  # the node of the first beam; the other beams' nodes follow it
    for depth in range(length):
        # 1. Rank the successors of all beams, and keep the best.
        logits = drafter.logits(hidden[:, depth, None].expand_as(state), state)  # [batch, beam, vocab]
        logits = foreseen(logits, range(depth, depth + 1), generator, drafter.vocabulary.target_tokens)
        outputs, beam, scores = likeliest_successors(logits, scores, width, top_k)
        token = drafter.vocabulary.target_tokens(outputs)
        # 2. Record them as nodes, with back-pointers to their parents.
        levels.append((token, beam + first_node, scores))
        first_node += state.shape[1]
        # 3. Advance the recurrent states.
        if depth + 1 < length:
            state = state.gather(1, beam[..., None].expand(-1, -1, state.shape[-1]))
            state = drafter.next_state(state, drafter.embed(token))
    return SearchTree.of(levels)


def likeliest_successors(
    logits: Float[torch.Tensor, "batch beam vocab"],
    scores: Float[torch.Tensor, "batch beam"],
    width: int,
    top_k: int | None = None,
) -> tuple[Int[torch.Tensor, "batch next"], Int[torch.Tensor, "batch next"], Float[torch.Tensor, "batch next"]]:
    """Return the most probable successors of all beams: outputs, beams, and scores.

    There are `width` of them, or fewer if the vocabulary is smaller. With `top_k`, only the `top_k`
    most probable tokens of each beam are successors, with probabilities that sum to 1.
    """
    if top_k is None or top_k >= logits.shape[-1]:
        return likeliest_steps(logits.log_softmax(-1, dtype=torch.float32), scores, width)
    logits, kept = largest(logits, top_k)  # [batch, beam, kept]
    step, beam, scores = likeliest_steps(logits.log_softmax(-1, dtype=torch.float32), scores, width)
    return kept.flatten(1).gather(1, beam * top_k + step), beam, scores


def likeliest_steps(
    log_probs: Float[torch.Tensor, "batch path step"], scores: Float[torch.Tensor, "batch path"], width: int
) -> tuple[Int[torch.Tensor, "batch next"], Int[torch.Tensor, "batch next"], Float[torch.Tensor, "batch next"]]:
    """Return the `width` most probable steps of all paths: steps, paths, and scores."""
    # A log-probability is never above 0, so rounding can't lift a child above its parent.
    candidates = (scores[..., None] + log_probs).flatten(1)
    scores, chosen = largest(candidates, min(width, candidates.shape[1]))
    num_steps = log_probs.shape[-1]
    return chosen % num_steps, chosen // num_steps, scores


# --- the choice of nodes


def pack_survivors(search: SearchTree) -> DraftTree:
    """Return the final beams as a tree with each shared prefix once, as in the paper.

    The tree of section 3.3:

        beams  A B C        depth 1: A        parents  -1
               A B D   ->   depth 2: B E               0 0
               A E F        depth 3: C D F             1 1 2

    The paper compares beams to find shared prefixes; here the search has back-pointers. All rows
    are padded to the largest number of nodes that a tree could have, so the host reads nothing.
    `DraftTree.trimmed` cuts the padding.
    """
    alive = torch.zeros_like(search.tokens, dtype=torch.bool).scatter_(1, final_beams(search), True)
    return pack(search, alive, alive.shape[1])


def final_beams(search: SearchTree) -> Int[torch.Tensor, "batch path_node"]:
    """Return the nodes of the final beams: those at depth 1 of all beams, then at depth 2, ..."""
    num_nodes = search.tokens.shape[1]
    last = torch.arange(num_nodes - search.level_sizes[-1], num_nodes, device=search.tokens.device)
    nodes = [last.expand(len(search.tokens), -1)]
    for _ in search.level_sizes[1:]:
        nodes.insert(0, search.parents.gather(1, nodes[0]))
    return torch.cat(nodes, dim=1)


def pack_likeliest(search: SearchTree, num_nodes: int) -> DraftTree:
    """Return the `num_nodes` most probable nodes of the search, dropped beams included.

    This is EAGLE-2's choice (arXiv 2406.16858, section 4.2). If the drafter's probabilities are
    right, no other tree of `num_nodes` of these nodes has a greater expected number of accepted
    tokens. All rows have the same number of nodes (all nodes, if there are fewer), so the host
    reads nothing.
    """
    if num_nodes >= search.tokens.shape[1]:
        return DraftTree(
            tokens=search.tokens, parents=search.parents, max_depth=len(search.level_sizes), cache_entries=search.cache_entries
        )
    return take(search, likeliest_nodes(search, num_nodes))


def likeliest_nodes(search: SearchTree, num_nodes: int) -> Int[torch.Tensor, "batch kept"]:
    """Return the `num_nodes` most probable nodes, or all if there are fewer, in the search's order.

    Parents come before their children and have at least their probability, so a stable sort never
    takes a child without its parent.
    """
    order = search.scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :num_nodes].sort(dim=1).values


def take(search: SearchTree, nodes: Int[torch.Tensor, "batch kept"]) -> DraftTree:
    """Return the tree of some nodes, which ascend and whose parents are among them."""
    # With NO_NODE in front, a parent's position is its new number plus one; 0 is the last committed token.
    place = torch.searchsorted(pad(nodes, (1, 0), value=NO_NODE), search.parents.gather(1, nodes))
    entries = None if search.cache_entries is None else search.cache_entries.gather(1, nodes)
    tokens, depth = search.tokens.gather(1, nodes), len(search.level_sizes)
    return DraftTree(tokens=tokens, parents=place - 1, max_depth=depth, cache_entries=entries)


def pack(search: SearchTree, kept: Bool[torch.Tensor, "batch node"], num_nodes: int) -> DraftTree:
    """Return the kept nodes as a tree, in order, padded to `num_nodes`.

    The parents of kept nodes must be kept too. The tree has no `cache_entries`: a drafter that has read its
    nodes reads the accepted path again.
    """
    index = kept.cumsum(1) - 1  # new number of each kept node
    # Nodes that aren't kept write to a dummy last column, which is cut off below.
    column = torch.where(kept, index, num_nodes)
    parents = torch.where(search.parents == NO_NODE, NO_NODE, index.gather(1, search.parents.clamp(min=0)))
    blank = torch.full((len(kept), num_nodes + 1), NO_NODE, device=kept.device)
    return DraftTree(
        tokens=blank.scatter(1, column, search.tokens)[:, :num_nodes],
        parents=blank.scatter(1, column, parents)[:, :num_nodes],
        max_depth=len(search.level_sizes),
        largest=kept.sum(1).max(),
    )


# --- selection of the few largest of many values


BLOCK_SIZE = 32
"""Number of values in a block. They lie apart, so that a processor compares neighbouring blocks at once."""
MIN_VALUES = 2**15
"""Fewest values, of the whole batch, of which blocks are ranked first: of fewer, `topk` alone is
faster on a CPU."""


def largest(
    values: Float[torch.Tensor, "*batch value"], count: int
) -> tuple[Float[torch.Tensor, "*batch count"], Int[torch.Tensor, "*batch count"]]:
    """Return the `count` largest values in descending order, and their indexes, like `topk`.

    On a CPU `topk` takes longer than computing the values. So only the maxima of blocks are ranked
    there, and then the values in the best `count` blocks. No other block can have one of the
    largest values. Equal values may come in another order than from `topk`.
    """
    num_values = values.shape[-1]
    if values.device.type != "cpu" or values.numel() < MIN_VALUES or num_values < BLOCK_SIZE * count:
        return values.topk(count, dim=-1)
    if missing := -num_values % BLOCK_SIZE:
        values = pad(values, (0, missing), value=-torch.inf)
    blocks = values.unflatten(-1, (BLOCK_SIZE, -1))  # a block is a column
    best = blocks.amax(-2).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(-1, best[..., None, :].expand(*best.shape[:-1], BLOCK_SIZE, count)).flatten(-2)
    top, chosen = candidates.topk(count, dim=-1)
    return top, chosen // count * blocks.shape[-1] + best.gather(-1, chosen % count)
