"""Merged trees (SpecInfer, arXiv 2305.09781, section 3): candidates of several drafters in one.

All on the host, for one row. Equal prefixes are one node. A node's probability q is the product of
the calibrated probabilities on its path, so it falls along paths, and the likeliest nodes always
form a tree. The tree grows best-first: only the children of nodes that are in it are looked at.
"""

import heapq
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isnan, log

from ..decoding.growing_tree import GrowingTree
from ..decoding.types import NO_NODE
from .beams import SearchTree
from .calibration import (
    AGREEMENT_WEIGHT,
    BIN_BOUNDS,
    MAX_ESTIMATE,
    NO_COUNTS,
    SCORE_WEIGHT,
    OutcomeCounts,
    agreement_key,
    source_key,
    teach,
)
from .training_free import NO_CANDIDATES, Candidates

DISSENT = 0.65
"""Share of the best single estimate that a token keeps if a source proposes only other tokens there.

Measured with the demo's target and drafters, like all constants of calibration."""


class Proposals:
    """One source's candidates for one row of the batch, by parent."""

    def __init__(self, source: int, candidates: Candidates = NO_CANDIDATES, odds: Sequence[float] | None = None) -> None:
        """`odds` are factors on the odds of the candidates, of a source that didn't look at the draws (see `odds_of_ring`)."""
        self.odds = odds
        self.bit, self.source = 1 << source, source
        self.tokens, self.scores, self.bins = [*candidates.tokens], [*candidates.scores], [*candidates.bins]
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(candidates.parents):
            self.children.setdefault(parent, []).append(node)
        self.attached: dict[int, list[SourceNode]] = {}
        """By candidate: the same node in proposals that didn't propose it, but go on below it."""

    def add(self, parent: int, token: int, score: float, bin_index: int) -> None:
        """Append a candidate."""
        self.children.setdefault(parent, []).append(len(self.tokens))
        self.tokens.append(token)
        self.scores.append(score)
        self.bins.append(bin_index)


MAX_WALKS = 16
"""Most former trees that calibration still compares with the text."""

SourceNode = tuple[Proposals, int]
"""A source's candidates, and the index of one of them; NO_NODE is their root."""
Child = tuple[float, int, int, list[int], list[SourceNode]]
"""A token that some sources propose after a node: the estimate that it is accepted, the token, its sources as a
bitmask, the cells of calibration that learn from it, and its node in each source."""


@dataclass(slots=True)
class MergedRow:
    """The nodes of a row, likeliest first; parents come before their children."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    """q of each node: the probability that it is accepted."""
    origins: list[int]
    """Bitmask of the sources that propose each node."""
    depths: list[int]
    children: dict[int, list[Child]]
    """What the sources propose after each node that was expanded, and after NO_NODE: the root."""
    places: list[list[SourceNode]]
    """Each node in the proposals that have it."""

    def tree(self) -> GrowingTree:
        """Return the nodes as a growing tree, in the same order."""
        tree = GrowingTree()
        for token, parent, prob in zip(self.tokens, self.parents, self.probs, strict=True):
            tree.add(parent, [token], [prob / self.prob(parent)])
        return tree

    def prob(self, node: int) -> float:
        """Return the probability that a node is accepted; the root (NO_NODE) always is."""
        return 1.0 if node == NO_NODE else self.probs[node]

    def number(self, node: int, proposals: Proposals) -> int | None:
        """Return a node's index in a source's proposals, if it is there; the root is in all."""
        if node == NO_NODE:
            return NO_NODE
        return next((number for source, number in self.places[node] if source is proposals), None)

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of a node, or of the root (NO_NODE), with this token, if the tree has it."""
        nodes = range(parent + 1, len(self.tokens))
        return next((node for node in nodes if self.tokens[node] == token and self.parents[node] == parent), None)

    def num_followed(self, tokens: Sequence[int], num_nodes: int) -> int:
        """Return how many of these tokens are a path of the likeliest nodes."""
        node = NO_NODE
        for depth, token in enumerate(tokens):
            child = self.child(node, token)
            if child is None or child >= num_nodes:
                return depth
            node = child
        return len(tokens)


def merge_row(
    sources: Sequence[Proposals],
    counts: OutcomeCounts,
    max_nodes: int,
    floors: Sequence[float] | None = None,
    *,
    is_chain: bool = False,
) -> MergedRow:
    """Return the `max_nodes` likeliest nodes, or fewer; in a chain each is the likeliest child of the one before.

    With `floors`, the tree ends at the first node n whose probability is below `floors[n]`.
    """
    row = MergedRow([], [], [], [], [], {}, [])
    heap: list[tuple[float, int, int, int, int, int, list[SourceNode]]] = []
    serial = 0
    parent, depth, prob = NO_NODE, 0, 1.0
    nodes = [(source, NO_NODE) for source in sources]
    has_attached = any(source.attached for source in sources)
    while True:
        # 1. Look at the children of the node that was added last; `follow` learns from those of the very last, too.
        depth += 1
        row.children[parent] = found = children(nodes, depth, counts)
        for estimate, token, proposed_by, _, nodes in found:
            heapq.heappush(heap, (-prob * min(estimate, MAX_ESTIMATE), serial, token, parent, proposed_by, depth, nodes))
            serial += 1
        # 2. Add the likeliest node that is left.
        num_nodes = len(row.tokens)
        if not heap or num_nodes == max_nodes:
            return row
        negative, _, token, above, proposed_by, depth, nodes = heapq.heappop(heap)
        prob = -negative
        if is_chain:
            heap.clear()
        if floors is not None and prob < floors[num_nodes]:
            return row
        parent = num_nodes
        row.tokens.append(token)
        row.parents.append(above)
        row.probs.append(prob)
        row.origins.append(proposed_by)
        row.depths.append(depth)
        if has_attached:
            nodes = [*nodes, *(more for source, node in nodes for more in source.attached.get(node, ()))]
        row.places.append(nodes)


def children(parents: Sequence[SourceNode], depth: int, counts: OutcomeCounts) -> list[Child]:
    """Return the tokens that sources propose after a node. `parents` is the node in each source that proposed it."""
    present = 0
    by_token: dict[int, Child] = {}
    # 1. The estimate of each source.
    for source, parent in parents:
        siblings = source.children.get(parent)
        if siblings is None:
            continue
        present |= source.bit
        first_key = source_key(source.source, depth)
        tokens, scores, bins = source.tokens, source.scores, source.bins
        for node in siblings:
            key = first_key + bins[node]
            hits, total = counts.get(key, NO_COUNTS)
            estimate = (hits + SCORE_WEIGHT * scores[node]) / (total + SCORE_WEIGHT)
            if source.odds is not None:
                likely = estimate * source.odds[node]
                estimate = likely / (likely + 1 - estimate)
            token = tokens[node]
            if token in by_token:
                best, _, proposed_by, keys, nodes = by_token[token]
                keys.append(key)
                nodes.append((source, node))
                by_token[token] = max(best, estimate), token, proposed_by | source.bit, keys, nodes
            else:
                by_token[token] = estimate, token, source.bit, [key], [(source, node)]
    # 2. Those of several sources are corrected by how often they were right together.
    if present & (present - 1):
        for token, (best, _, proposed_by, keys, nodes) in by_token.items():
            key = agreement_key(proposed_by, present, best)
            hits, total = counts.get(key, NO_COUNTS)
            start = best if proposed_by == present else DISSENT * best
            keys.append(key)
            estimate = (hits + AGREEMENT_WEIGHT * start) / (total + AGREEMENT_WEIGHT)
            by_token[token] = estimate, token, proposed_by, keys, nodes
    return [*by_token.values()]


RING_WEIGHT, RING_POWER = 0.75, 0.45
"""How a clock changes the odds of a draft token: measured with SmolLM2 at temperature 1."""
MAX_LOG_ODDS = 20.0


def odds_of_ring(ring: float, temperature: float) -> float:
    """Return the factor by which a token's clock changes the odds that the target draws the token.

    Where the target gives the token the probability p, it rings at `ring` / p, and none is earlier with probability
    exp(-ring (1 - p) / p) (see `RowSeeds`). An estimate is a mean over places where p is near 1 or near 0, and there
    the odds change by about this factor, (RING_WEIGHT ring^-RING_POWER)^temperature. The lower the temperature, the nearer
    is p to 1 or 0.
    """
    return exp(max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, temperature * (log(RING_WEIGHT) - RING_POWER * log(ring)))))


MergeWalk = tuple[MergedRow, int]
"""A merged row, and the node that the text has reached in it; NO_NODE at its root."""


def follow(walks: Sequence[MergeWalk], token: int, *counts: OutcomeCounts) -> tuple[MergeWalk, ...]:
    """Teach the counts the token that the target chose, and return the walks that go on with it.

    Nodes that weren't verified teach as well: whether a proposal was right shows in the text. Else
    estimates that were too low by chance would never be corrected.
    """
    kept = []
    for row, reached in walks:
        for _, proposed, _, keys, _ in row.children.get(reached, ()):
            for taught in counts:
                teach(taught, keys, proposed == token)
        node = row.child(reached, token)
        if node is not None:
            kept.append((row, node))
    return tuple(kept)


def rows_of_search(search: SearchTree, max_nodes: int) -> list[Candidates]:
    """Return the likeliest nodes of a search as candidates; the host waits for the search.

    A node's score is its probability after its parent, as the drafter sees it. Raises ValueError
    for scores that are not numbers.
    """
    numbers = search.joined().numbers
    assert numbers is not None
    columns = numbers.tolist()
    num_nodes = search.tokens.shape[1]
    return [_row_of_search(row[:num_nodes], row[num_nodes : 2 * num_nodes], row[2 * num_nodes :], max_nodes) for row in columns]


def _row_of_search(tokens: Sequence[float], parents: Sequence[float], scores: Sequence[float], max_nodes: int) -> Candidates:
    if isnan(sum(scores)):
        raise ValueError(
            "the drafter's scores are not numbers (NaN): its weights are damaged, or its type overflows; load another copy, or "
            "load it in another target.dtype"
        )
    # 1. The likeliest nodes. Parents come before their children and have at least their score, so
    # a stable sort never takes a child without its parent.
    kept: Sequence[int] = range(len(scores))
    if len(scores) > max_nodes:
        kept = sorted(sorted(kept, key=scores.__getitem__, reverse=True)[:max_nodes])
    # 2. Their probabilities after their parents.
    number = {NO_NODE: NO_NODE} | {node: index for index, node in enumerate(kept)}
    above = [scores[int(parents[node])] if parents[node] >= 0 else 0.0 for node in kept]
    probs = [exp(scores[node] - score) if scores[node] > -inf else 0.0 for node, score in zip(kept, above, strict=True)]
    return Candidates(
        tokens=[int(tokens[node]) for node in kept],
        parents=[number[int(parents[node])] for node in kept],
        scores=probs,
        bins=[bisect(BIN_BOUNDS, prob) for prob in probs],
    )
