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
from math import inf
from typing import Protocol, runtime_checkable

from .growing_tree import GrowingTree
from .pacing import MAX_PATIENCE, NUM_TRIALS, PATIENCE, STALL, Seconds, StepSeconds, TokenRate, best_width
from .types import NO_NODE

BRANCH_THRESHOLD = 0.3
"""A token starts a branch of its own if the draft model gives it more than this (section 3.1)."""
FIRST_CONFIDENCE = 0.01
"""The threshold alpha of the first step (section 3.3)."""
FALLING = 0.5
"""Factor of alpha after a step without errors: the confidence of 3 to 5 tokens (section 3.3)."""

LEAST_PROB = 0.001
"""Less likely nodes aren't read, even if that costs nothing."""
CHILDREN_WEIGHT = 20.0
"""Nodes that were read before the mean of what their children hold follows later ones."""


@runtime_checkable
class GrowthRule(Protocol):
    """Decides how a growing tree is drafted and verified. A batch has one tree for each row.

    A tree without nodes is one whose root isn't read: its only unread node is the root, NO_NODE.
    """

    def reads(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        """Return each row's nodes to read in the next draft pass; all empty: verify now."""

    def spare_reads(self, tree: GrowingTree, seconds: float) -> list[int]:
        """Return the nodes to read while the target's pass waits for so many seconds."""

    def sends(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        """Return each row's nodes to verify, in ascending order; a node's parent is among them."""

    def add_draft(self, trees: Sequence[GrowingTree], reads: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn from a draft pass that read these nodes, whose children are the last of the trees."""

    def add_step(
        self,
        trees: Sequence[GrowingTree],
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

    def reads(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        return [self._reads(tree, self.alpha) for tree in trees]

    def spare_reads(self, tree: GrowingTree, seconds: float) -> list[int]:
        return self._reads(tree, LEAST_PROB)

    def _reads(self, tree: GrowingTree, least: float) -> list[int]:
        if not len(tree):
            return [NO_NODE]
        nodes = branch_nodes(tree)
        ends = branch_ends(tree, nodes)
        # Tree-cumulative confidence T_c: that of the surest branch.
        if len(nodes) >= self.max_nodes or max(tree.probs[end] for end in ends) < least:
            return []
        return [owed_most(tree, ends, len(nodes))]

    def sends(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        return [branch_nodes(tree)[: self.max_nodes] for tree in trees]

    def add_draft(self, trees: Sequence[GrowingTree], reads: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn nothing: the rule doesn't know costs."""

    def add_step(
        self,
        trees: Sequence[GrowingTree],
        sent: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        draft_seconds: float,
        pass_seconds: float,
    ) -> None:
        for tree, nodes, path in zip(trees, sent, accepted, strict=True):
            if nodes:
                # The best matching branch is the surest one of those that follow the accepted path.
                ends = branch_ends(tree, nodes)
                last = path[-1] if path else NO_NODE
                best = max((end for end in ends if is_above(tree, last, end)), key=tree.probs.__getitem__)
                confidence = max(tree.probs[end] for end in ends)
                self.alpha = next_alpha(self.alpha, confidence, len(path), tree.depths[best])


def next_alpha(alpha: float, confidence: float, num_correct: int, num_all: int) -> float:
    """Return the threshold after a step: formula (3), and at most 1.

    `confidence` is that of the surest branch; the numbers are tokens of the best matching branch.
    """
    if num_correct == num_all:
        return FALLING * alpha
    # A confidence may be too small for a float.
    factor = confidence ** ((num_all - num_correct) / num_all)
    return min(alpha / factor, 1.0) if factor > 0.0 else 1.0


def branch_nodes(tree: GrowingTree) -> list[int]:
    """Return the nodes of all branches, in ascending order.

    Of a node's children the likeliest extends the branch, and others above the threshold start one.
    """
    nodes, ends = [], [NO_NODE]
    while ends:
        children = tree.children(ends.pop())
        best = max(children, key=tree.probs.__getitem__, default=NO_NODE)
        kept = [node for node in children if node == best or tree.estimates[node] > BRANCH_THRESHOLD]
        nodes += kept
        ends += kept
    return sorted(nodes)


def branch_ends(tree: GrowingTree, nodes: Sequence[int]) -> list[int]:
    """Return those of the nodes that have no child among them."""
    inner = {tree.parents[node] for node in nodes}
    return [node for node in nodes if node not in inner]


def is_above(tree: GrowingTree, node: int, end: int) -> bool:
    """Return whether a path from the root (NO_NODE) to `end` goes through a node."""
    while end > node:
        end = tree.parents[end]
    return end == node


def owed_most(tree: GrowingTree, ends: Sequence[int], num_tokens: int) -> int:
    """Return the end of the branch that is owed most tokens: the arg-max of formula (1).

    A branch's fair share of all `num_tokens` is in proportion to its cumulative confidence, the
    product of the probabilities of its tokens.
    """
    total = sum(tree.probs[end] for end in ends)
    share = num_tokens / total if total > 0.0 else 0.0
    return max(ends, key=lambda end: share * tree.probs[end] - tree.depths[end])


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
        self._drafts = self._skipped = 0
        self._read, self._held = CHILDREN_WEIGHT, [CHILDREN_WEIGHT, *[0.0] * (top_k - 1)]

    @property
    def rate(self) -> float:
        """Tokens per second of a row so far; 0 before the first step."""
        return self.mean.of(self.verify.table) if self.step else 0.0

    def reads(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        # The first steps read the root only, so that the cost of a small tree is known.
        begins = not any(map(len, trees))
        if self.step < NUM_TRIALS:
            return [[NO_NODE] if begins else [] for _ in trees]
        # 1. What each row would read, and the tokens that its children are expected to add.
        nodes = [tree.unread(self.top_k) if len(tree) else [NO_NODE] for tree in trees]
        profile = [held / self._read for held in self._held]
        added = [
            [children_gain(probability(tree, node), profile, floor) for node in row]
            for tree, row, floor in zip(trees, nodes, self._floors(trees), strict=True)
        ]
        # 2. The number of nodes whose children add most, less what the pass costs.
        gains = [self.mean.share * total for total in mean_sums(added)]
        best, value = best_width(gains, self.draft.table, self.rate, self.draft.widths)
        if value > 0.0:
            best = max(self.draft.revisited(best, len(gains) - 1, self._drafts), 1)
        else:
            best = int(begins and self._is_due(self.rate * self.draft.table[1]))
        return [row[:best] for row in nodes]

    def _is_due(self, cost: float) -> bool:
        """Return whether to draft in vain, at a cost in tokens: costs change, and so do texts."""
        self._skipped += 1
        if self._skipped <= min(PATIENCE * cost, MAX_PATIENCE):
            return False
        self._skipped = 0
        return True

    def _floors(self, trees: Sequence[GrowingTree]) -> list[float]:
        """Return the probability that a new node of each row gains nothing by.

        It is what one more node costs in time, or the least likely node that it would replace.
        """
        probs = [sorted(tree.probs, reverse=True) for tree in trees]
        best = self._best(probs)
        table, widths = self.verify.table, self.verify.widths
        slope = min(((table[width] - table[best]) / (width - best) for width in widths if width > best), default=inf)
        cost = self.rate * slope / self.mean.share
        return [min(cost, row[best - 1]) if 0 < best <= len(row) else cost for row in probs]

    def _best(self, probs: Sequence[Sequence[float]]) -> int:
        """Return the best number of nodes to verify; `probs` are each row's, the likeliest first."""
        gains = self.mean.trusted([1.0 + total for total in mean_sums([row[: self.max_nodes] for row in probs])])
        return best_width(gains, self.verify.table, self.rate, self.verify.widths)[0]

    def spare_reads(self, tree: GrowingTree, seconds: float) -> list[int]:
        if self.draft.table[-1] > seconds:
            return []
        nodes = tree.unread(self.top_k) if len(tree) else [NO_NODE]
        return [node for node in nodes if probability(tree, node) >= LEAST_PROB]

    def sends(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        # A parent is before its children and has at least their probability: a stable sort keeps
        # that order.
        orders = [sorted(range(len(tree)), key=tree.probs.__getitem__, reverse=True) for tree in trees]
        best = self._best([[tree.probs[node] for node in order] for tree, order in zip(trees, orders, strict=True)])
        most = min(max(map(len, trees)), self.max_nodes)
        best = self.verify.revisited(best, most, self.step) if self.step else most
        return [sorted(order[:best]) for order in orders]

    def add_draft(self, trees: Sequence[GrowingTree], reads: Sequence[Sequence[int]], seconds: float) -> None:
        self.draft.add(max(map(len, reads)), seconds, self._drafts)
        self._drafts += 1
        # What the children of the read nodes hold: they are the last ones of each tree.
        kept = 1.0 - 1.0 / CHILDREN_WEIGHT
        self._read, self._held = kept * self._read, [kept * held for held in self._held]
        for tree, row in zip(trees, reads, strict=True):
            for node in row:
                self._read += probability(tree, node)
                for rank, child in enumerate(tree.children(node)[: len(self._held)]):
                    self._held[rank] += tree.probs[child]

    def add_step(
        self,
        trees: Sequence[GrowingTree],
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


def children_gain(prob: float, profile: Sequence[float], floor: float) -> float:
    """Return the tokens that the children of a node are expected to add.

    `profile` are the shares of a node's probability that its children have, the likeliest first. A
    child gains what its probability exceeds the floor by.
    """
    total = 0.0
    for share in profile:
        if prob * share <= floor:
            break
        total += prob * share - floor
    return total


def probability(tree: GrowingTree, node: int) -> float:
    return 1.0 if node == NO_NODE else tree.probs[node]


def mean_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums of the first n probabilities of a row, n = 0, 1, ..., averaged over rows."""
    sums = [list(accumulate(row, initial=0.0)) for row in rows]
    if len(sums) == 1:
        return sums[0]
    longest = max(map(len, sums))
    return [sum(row[min(n, len(row) - 1)] for row in sums) / len(sums) for n in range(longest)]
