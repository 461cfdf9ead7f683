"""SuffixDecoding: trees of what followed the last tokens wherever they occurred before.

Paper: SuffixDecoding (arXiv 2411.04975). For each length n of a match, the continuations of all
positions of the last n tokens are counted. A tree is grown from the likeliest continuations: the
longer the match, the more nodes. Of these trees, the one with the most expected tokens is drafted.

The paper keeps a suffix tree of all texts. Ours keeps the positions of n-grams (see `NgramIndex`)
and counts the continuations of the latest MAX_POSITIONS of them when it drafts. So memory grows by
a few entries for each token, whatever the depth, and recent text decides where there is much of it.
As in prompt lookup, a position near the end of the text is taken to repeat.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic.dataclasses import dataclass as options

from ...data.fields import OPTIONS, PositiveInt
from ..decoding.types import NO_NODE
from .training_free import NO_CANDIDATES, NOWHERE, Candidates, NgramIndex, TrainingFreeDrafter, continuation, ngram_keys

INDEXED_NGRAM = 4
"""Longest n-gram that is indexed. The positions of longer ones are filtered from its positions."""
MAX_POSITIONS = 16
"""Most positions of an n-gram whose continuations are counted: the latest ones."""
NODES_PER_TOKEN = 8
"""Most nodes of a tree for each token of the match. In modules of Python's library, 8 gave 4% more
tokens per step than 4, with 7 nodes per step instead of 4."""
MIN_PROB = 0.1
"""Least probability of a path: the product of its tokens' shares of the positions."""
PRIOR = (
    (0.07, 0.13, 0.26, 0.26, 0.54),
    (0.07, 0.18, 0.37, 0.57, 0.79),
    (0.11, 0.18, 0.41, 0.68, 0.86),
    (0.11, 0.30, 0.41, 0.87, 0.87),
    (0.19, 0.40, 0.41, 0.95, 0.98),
)
"""Estimates that a node is accepted, by the length of the match with the node's parent (1, 2, to 4,
to 8, longer) and by its share of the positions (below a quarter, below a half, not all, the only
position, all of several). Measured on answers of the demo's target; where the measured share fell
with the length of the match, the estimates of these lengths are set equal."""


@options(kw_only=True, config=OPTIONS)
class SuffixConfig:
    """Options of SuffixDecoding."""

    tree_nodes: PositiveInt = 24
    """Most nodes of a tree."""
    depth: PositiveInt = 24
    """Most tokens of a match, and of a path."""


@dataclass(slots=True)
class Growth:
    """A tree grown from positions.

    `counts[i]` is how many of its parent's positions have node i next, and how many there are.
    """

    match: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    score: float = 0.0
    """Expected number of accepted tokens, if shares were probabilities."""

    def candidates(self) -> Candidates:
        """Return the nodes as candidates, with the estimates of PRIOR."""
        bins = [
            length_class(self.match + depth - 1) * len(PRIOR[0]) + share_class(*counts)
            for depth, counts in zip(self.depths, self.counts, strict=True)
        ]
        scores = [PRIOR[number // len(PRIOR[0])][number % len(PRIOR[0])] for number in bins]
        return Candidates(tokens=self.tokens, parents=self.parents, scores=scores, bins=bins)


class Suffix(TrainingFreeDrafter):
    """Proposes a tree of the likeliest continuations of the longest good match."""

    Config = SuffixConfig
    config: SuffixConfig

    def new_store(self) -> NgramIndex:
        return NgramIndex(INDEXED_NGRAM)

    def candidates_of(self, store: NgramIndex, tokens: Sequence[int]) -> Candidates:
        best, config = Growth(0), self.config
        query = [*store.text[-config.depth :], *tokens][-config.depth :]
        for n, positions in reversed(matches(store, query)):
            budget = min(config.tree_nodes, NODES_PER_TOKEN * n)
            if budget <= best.score:  # a tree of k nodes can't score above k
                break
            length = min(config.depth, budget)
            growth = grow(n, [continuation(store.text, position, tokens, length) for position in positions], budget)
            best = max(best, growth, key=lambda grown: grown.score)  # of equal ones the longer match
        return best.candidates() if best.tokens else NO_CANDIDATES


def matches(index: NgramIndex, query: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the latest positions of the query's end in a text.

    One entry (n, positions) for each n whose positions differ from those of n + 1, in ascending
    order.
    """
    text, keys = index.text, ngram_keys(query, INDEXED_NGRAM)
    by_length: list[tuple[int, list[int]]] = []
    positions: list[int] = []
    for n in range(1, len(query) + 1):
        if n <= INDEXED_NGRAM and (n == 1 or len(positions) == MAX_POSITIONS):
            longer = latest_positions(index, n, keys[n - 1])
        else:
            longer = [position for position in positions if position >= n - 1 and text[position - n + 1] == query[-n]]
        if not longer:
            break
        if by_length and longer == positions:
            by_length.pop()
        by_length.append((n, longer))
        positions = longer
    return by_length


def latest_positions(index: NgramIndex, n: int, key: int) -> list[int]:
    """Return the latest MAX_POSITIONS positions of an n-gram."""
    earlier, position = index.earlier[n - 1], index.latest.get(key, NOWHERE)
    positions: list[int] = []
    while position != NOWHERE and len(positions) < MAX_POSITIONS:
        positions.append(position)
        position = earlier[position]
    return positions


def grow(match: int, windows: list[list[int]], budget: int) -> Growth:
    """Grow a tree from the tokens that followed each position, the likeliest node next.

    A child's probability is its parent's, times the child's share of those positions of the parent
    that have a next token.
    """
    growth = Growth(match)
    # Of equal probability the one that was pushed first comes first.
    heap: list[tuple[float, int, int, int, list[list[int]], int]] = []
    num_pushed, parent, prob, depth, members = 0, NO_NODE, 1.0, 0, windows
    while len(growth.tokens) < budget:
        # 1. Push the children of the newest node.
        groups: dict[int, list[list[int]]] = {}
        for window in members:
            if depth < len(window):
                groups.setdefault(window[depth], []).append(window)
        total = sum(map(len, groups.values()))
        for token, group in groups.items():
            if (child_prob := prob * len(group) / total) >= MIN_PROB:
                num_pushed += 1
                heapq.heappush(heap, (-child_prob, num_pushed, parent, token, group, total))
        # 2. The likeliest node of all joins the tree.
        if not heap:
            break
        negative, _, parent, token, members, total = heapq.heappop(heap)
        prob, depth = -negative, 1 + (growth.depths[parent] if parent != NO_NODE else 0)
        growth.tokens.append(token)
        growth.parents.append(parent)
        growth.depths.append(depth)
        growth.counts.append((len(members), total))
        growth.score += prob
        parent = len(growth.tokens) - 1
    return growth


def length_class(length: int) -> int:
    """Return the row of PRIOR for a match of this length: 1, 2, to 4, to 8, longer."""
    return min((length - 1).bit_length(), len(PRIOR) - 1)


def share_class(count: int, total: int) -> int:
    """Return the column of PRIOR for a token at `count` of `total` positions."""
    if count == total:
        return 3 if count == 1 else 4
    return min(4 * count // total, 2)
