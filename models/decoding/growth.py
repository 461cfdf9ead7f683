"""When a growing draft tree is verified, and which of its nodes are drafted from first.

A step drafts in passes of the draft model, each of which reads some nodes and appends their
children, and verifies the tree in one pass of the target. A rule decides after each draft pass
whether another one is worth its time. Rules see probabilities and measured seconds only: they read
neither a clock nor random numbers, so the tokens are those of plain decoding.

`ConfidenceRule` is LLMCad's (arXiv 2309.04255, sections 3.2 and 3.3), for comparison: verify when
the surest branch is unlikely. It is blind to costs. `ExpectedRule` compares costs and gains: see
`pacing` for the reasoning, which this module applies to draft passes instead of sources.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

from .pacing import STALL, Seconds, StepSeconds, TokenRate, best_width
from .types import NO_NODE

BRANCH_THRESHOLD = 0.3
"""A token starts a branch of its own if the draft model gives it more than this (section 3.1)."""
FIRST_CONFIDENCE = 0.01
"""The threshold alpha of the first step (section 3.3)."""
FALLING = 0.5
"""Factor of alpha after a step without errors: the confidence of 3 to 5 tokens (section 3.3)."""

COLD_PROB = 0.5
"""The first step drafts until the unread nodes that it would read hold less than this: nothing is
known of costs."""
LEAST_PROB = 0.001
"""Less likely nodes aren't read, even if that costs nothing."""
CHILDREN_WEIGHT = 20.0
"""Nodes that were read before the mean of what their children hold follows later ones."""


@runtime_checkable
class Growing(Protocol):
    """The part of a growing tree that rules read."""

    @property
    def parents(self) -> Sequence[int]:
        """Parent of each node, or NO_NODE for a child of the root. Parents come first."""

    @property
    def probs(self) -> Sequence[float]:
        """q of each node: the probability that it is accepted. It never rises along a path."""

    def unread(self, count: int) -> list[int]:
        """Return the likeliest nodes that the draft model hasn't read, but whose path it has."""


@runtime_checkable
class GrowthRule(Protocol):
    """Decides how a growing tree is drafted and verified. A batch has one tree for each row.

    A tree without nodes is one whose root isn't read: its only unread node is the root, NO_NODE.
    """

    def reads(self, trees: Sequence[Growing]) -> list[list[int]]:
        """Return each row's nodes to read in the next draft pass; all empty: verify now."""

    def spare_reads(self, tree: Growing, seconds: float) -> list[int]:
        """Return the nodes to read while the target's pass waits for so many seconds."""

    def sends(self, trees: Sequence[Growing]) -> list[list[int]]:
        """Return each row's nodes to verify, in ascending order; a node's parent is among them."""

    def add_draft(self, trees: Sequence[Growing], reads: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn from a draft pass that read these nodes, whose children are the last of the trees."""

    def add_step(
        self,
        trees: Sequence[Growing],
        sent: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        draft_seconds: float,
        pass_seconds: float,
    ) -> None:
        """Learn from a step: each row's nodes that were verified, and those that were accepted.

        Trees may have grown since. `draft_seconds` are those before the pass.
        """


class ConfidenceRule:
    """LLMCad's rule: verify when the surest branch is less likely than a threshold, alpha.

    Each draft pass reads one node, that of the branch that is owed most. Alpha rises after errors
    and falls after none. `max_nodes` bounds the tree, for which the paper has no bound.
    """

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes, self.alpha = max_nodes, FIRST_CONFIDENCE

    def reads(self, trees: Sequence[Growing]) -> list[list[int]]:
        return [self._reads(tree, self.alpha) for tree in trees]

    def spare_reads(self, tree: Growing, seconds: float) -> list[int]:
        return self._reads(tree, LEAST_PROB)

    def _reads(self, tree: Growing, least: float) -> list[int]:
        if not len(tree.parents):
            return [NO_NODE]
        branches = Branches.of(tree)
        if len(branches.nodes) >= self.max_nodes or branches.confidence < least:
            return []
        return [branches.owed_most()]

    def sends(self, trees: Sequence[Growing]) -> list[list[int]]:
        return [Branches.of(tree).nodes[: self.max_nodes] for tree in trees]

    def add_draft(self, trees: Sequence[Growing], reads: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn nothing: the rule doesn't know costs."""

    def add_step(
        self,
        trees: Sequence[Growing],
        sent: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        draft_seconds: float,
        pass_seconds: float,
    ) -> None:
        for tree, nodes, path in zip(trees, sent, accepted, strict=True):
            if nodes:
                # 1. The surest branch, and the surest one of those that follow the accepted path.
                leaves = leaves_of(tree, nodes)
                confidence = max(leaf.prob for leaf in leaves)
                last = path[-1] if path else NO_NODE
                matching = [leaf for leaf in leaves if last in (NO_NODE, leaf.node) or last in above(tree, leaf.node)]
                length = max(matching, key=lambda leaf: leaf.prob).depth
                # 2. Formula (3).
                self.alpha = next_alpha(self.alpha, confidence, len(path), length)


def next_alpha(alpha: float, confidence: float, num_correct: int, num_all: int) -> float:
    """Return the threshold after a step: formula (3), and at most 1.

    `confidence` is that of the surest branch; the numbers are tokens of the best matching branch.
    """
    if num_correct == num_all:
        return FALLING * alpha
    # A confidence may be too small for a float.
    factor = confidence ** ((num_all - num_correct) / num_all)
    return min(alpha / factor, 1.0) if factor > 0.0 else 1.0


class Leaf(NamedTuple):
    """The end of a branch."""

    node: int
    depth: int
    """Tokens of the branch."""
    prob: float
    """Cumulative confidence: the product of the probabilities of the branch's tokens."""


class Branches(NamedTuple):
    """The branches of a tree (section 3.2)."""

    nodes: list[int]
    """The nodes of all branches, ascending."""
    leaves: list[Leaf]

    @classmethod
    def of(cls, tree: Growing) -> "Branches":
        """Return the branches: of a node's children the likeliest, and those above the threshold."""
        # 1. The likeliest child of each node.
        best: dict[int, int] = {}
        for node, (parent, prob) in enumerate(zip(tree.parents, tree.probs, strict=True)):
            if parent not in best or prob > tree.probs[best[parent]]:
                best[parent] = node
        # 2. Follow the branches from the root.
        kept = {NO_NODE: 1.0}
        for node, (parent, prob) in enumerate(zip(tree.parents, tree.probs, strict=True)):
            if parent in kept and (best[parent] == node or prob > BRANCH_THRESHOLD * kept[parent]):
                kept[node] = prob
        nodes = [node for node in kept if node != NO_NODE]
        return cls(nodes, leaves_of(tree, nodes))

    @property
    def confidence(self) -> float:
        """Tree-cumulative confidence T_c: that of the surest branch."""
        return max(leaf.prob for leaf in self.leaves)

    def owed_most(self) -> int:
        """Return the end of the branch that is owed most tokens: the arg-max of formula (1).

        A branch's fair share of all tokens is in proportion to its confidence.
        """
        total = sum(leaf.prob for leaf in self.leaves)
        share = len(self.nodes) / total if total > 0.0 else 0.0
        return max(self.leaves, key=lambda leaf: share * leaf.prob - leaf.depth).node


def leaves_of(tree: Growing, nodes: Sequence[int]) -> list[Leaf]:
    """Return the ends of the branches of these nodes, which ascend and whose parents are there."""
    depths = {NO_NODE: 0}
    for node in nodes:
        depths[node] = depths[tree.parents[node]] + 1
    inner = {tree.parents[node] for node in nodes}
    return [Leaf(node, depths[node], tree.probs[node]) for node in nodes if node not in inner]


def above(tree: Growing, node: int) -> list[int]:
    """Return the nodes on the path to a node, the nearest first."""
    path = []
    while (node := tree.parents[node]) != NO_NODE:
        path.append(node)
    return path


class ExpectedRule:
    """Rule that maximises tokens per second: the expected gain of a choice against its cost.

    With R tokens per second, a draft pass that reads nodes of total probability q costs R times its
    seconds, and adds g q tokens on average, where g is what the children of nodes that were read
    held. The tree's n likeliest nodes are verified where n is best. `max_nodes` are the most nodes
    that are verified, `top_k` the most that a draft pass reads.
    """

    def __init__(self, max_nodes: int, top_k: int) -> None:
        self.max_nodes, self.top_k = max_nodes, top_k
        self.verify, self.draft = StepSeconds(max_nodes), StepSeconds(top_k)
        self.drafting, self.mean = Seconds(), TokenRate()
        self.step = 0
        self._drafts = 0
        self._read, self._held = CHILDREN_WEIGHT, CHILDREN_WEIGHT

    @property
    def rate(self) -> float:
        """Tokens per second of a row so far; 0 before the first step."""
        return self.mean.of(self.verify.table) if self.step else 0.0

    def reads(self, trees: Sequence[Growing]) -> list[list[int]]:
        # 1. What each row would read, and the probability of the n likeliest of these nodes.
        nodes = [tree.unread(self.top_k) if len(tree.parents) else [NO_NODE] for tree in trees]
        probs = [[probability(tree, node) for node in row] for tree, row in zip(trees, nodes, strict=True)]
        read = mean_sums(probs)
        # 2. The number of nodes whose children add most, less what the pass costs.
        if not self.step:
            best = len(read) - 1 if read[-1] >= COLD_PROB else 0
        else:
            scale = self.mean.share * self._held / self._read
            best, value = best_width([scale * prob for prob in read], self.draft.table, self.rate, self.draft.widths)
            best = best if value > 0.0 else 0
        return [row[:best] for row in nodes]

    def spare_reads(self, tree: Growing, seconds: float) -> list[int]:
        if self.draft.table[-1] > seconds:
            return []
        nodes = tree.unread(self.top_k) if len(tree.parents) else [NO_NODE]
        return [node for node in nodes if probability(tree, node) >= LEAST_PROB]

    def sends(self, trees: Sequence[Growing]) -> list[list[int]]:
        # A parent is before its children and has at least their probability: a stable sort keeps
        # that order.
        orders = [sorted(range(len(tree.probs)), key=tree.probs.__getitem__, reverse=True) for tree in trees]
        probs = [[tree.probs[node] for node in order[: self.max_nodes]] for tree, order in zip(trees, orders, strict=True)]
        gains = self.mean.trusted([1.0 + total for total in mean_sums(probs)])
        best = len(gains) - 1
        if self.step:
            best, _ = best_width(gains, self.verify.table, self.rate, self.verify.widths)
            best = self.verify.revisited(best, len(gains) - 1, self.step)
        return [sorted(order[:best]) for order in orders]

    def add_draft(self, trees: Sequence[Growing], reads: Sequence[Sequence[int]], seconds: float) -> None:
        self.draft.add(max(map(len, reads)), seconds, self._drafts)
        self._drafts += 1
        # What the children of the read nodes hold: they are the last ones of each tree.
        kept = 1.0 - 1.0 / CHILDREN_WEIGHT
        self._read, self._held = kept * self._read, kept * self._held
        for tree, row in zip(trees, reads, strict=True):
            nodes, node = set(row), len(tree.parents) - 1
            self._read += sum(probability(tree, node) for node in row)
            while node >= 0 and tree.parents[node] in nodes:
                self._held += tree.probs[node]
                node -= 1

    def add_step(
        self,
        trees: Sequence[Growing],
        sent: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        draft_seconds: float,
        pass_seconds: float,
    ) -> None:
        # 1. The pass. The seconds of the first one tell nothing of the next ones.
        num_nodes = max(map(len, sent))
        usual_seconds = self.verify.table[num_nodes]
        self.verify.add(num_nodes, pass_seconds, self.step)
        self.drafting.add(draft_seconds)
        self.step += 1
        if self.step == 1:
            return
        # 2. The tokens.
        num_rows = len(trees)
        tokens = 1.0 + sum(map(len, accepted)) / num_rows
        expected = 1.0 + sum(tree.probs[node] for tree, row in zip(trees, sent, strict=True) for node in row) / num_rows
        seconds = min(draft_seconds, STALL * self.drafting.median) + min(pass_seconds, STALL * usual_seconds)
        self.mean.add(tokens, expected, seconds)


def probability(tree: Growing, node: int) -> float:
    return 1.0 if node == NO_NODE else tree.probs[node]


def mean_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums of the first n probabilities of a row, n = 0, 1, ..., averaged over rows."""
    sums = [list(accumulate(row, initial=0.0)) for row in rows]
    if len(sums) == 1:
        return sums[0]
    longest = max(map(len, sums))
    return [sum(row[min(n, len(row) - 1)] for row in sums) / len(sums) for n in range(longest)]
