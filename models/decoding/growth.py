"""When a growing draft tree is verified, and which of its nodes are drafted from first.

A step drafts in passes of the draft model. Each draft pass reads some nodes of the tree and appends
their children. Then the target verifies the tree in one pass. `ExpectedRule` decides after each
draft pass whether another one is worth its time. See `pacing` for the reasoning, which this module
applies to draft passes instead of sources.

The rule sees probabilities and measured seconds only: it reads neither a clock nor random numbers,
so the tokens are those of plain decoding.

A batch has one tree for each row. A tree without nodes is one whose root isn't read: its only
unread node is the root, NO_NODE.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from .growing_tree import GrowingTree
from .pacing import MAX_PATIENCE, NUM_TRIALS, PATIENCE, STALL, Seconds, StepSeconds, TokenRate, best_width
from .types import NO_NODE

LEAST_PROB = 0.001
"""Less likely nodes aren't read while the target's pass waits, although that costs no time."""
CHILDREN_WEIGHT = 20.0
"""Draft passes that the shares of children remember. It is also the weight of the first guess: that
the likeliest child has all of its parent's probability."""


class ExpectedRule:
    """Rule that maximises tokens per second: the expected gain of a choice against its cost.

    With R tokens per second, a draft pass that reads nodes of total probability q costs R times its
    seconds. It adds g q tokens on average, where g is the share of their parents' probability that
    children had so far. The tree's n likeliest nodes are verified where n is best. `max_nodes` are
    the most nodes that are verified, `top_k` the most that a draft pass reads.
    """

    def __init__(self, max_nodes: int, top_k: int) -> None:
        self.max_nodes, self.top_k = max_nodes, top_k
        self.verify, self.draft = StepSeconds(max_nodes), StepSeconds(top_k)
        """Seconds of the target's passes by the nodes verified, and of draft passes by the nodes read."""
        self.drafting, self.mean = Seconds(), TokenRate()
        """Seconds of all draft passes of a step, and the mean tokens per second."""
        self.step = 0
        self._drafts = self._skipped = 0
        self._read, self._held = CHILDREN_WEIGHT, [CHILDREN_WEIGHT, *[0.0] * (top_k - 1)]
        """Probability of the nodes that were read, and of their children, the likeliest first."""

    @property
    def rate(self) -> float:
        """Tokens per second of a row so far; 0 before the first step."""
        return self.mean.of(self.verify.table) if self.step else 0.0

    def reads(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        """Return each row's nodes to read in the next draft pass; all empty: verify now."""
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
        """Return whether to draft although it isn't worth its cost, in tokens.

        Costs change, and so do texts, so this happens after some skipped steps: PATIENCE of them for
        each token of the cost, and at most MAX_PATIENCE.
        """
        self._skipped += 1
        if self._skipped <= min(PATIENCE * cost, MAX_PATIENCE):
            return False
        self._skipped = 0
        return True

    def _floors(self, trees: Sequence[GrowingTree]) -> list[float]:
        """Return, for each row, the probability at which a new node gains nothing.

        It is what one more node costs in time, or the probability of the node that it would
        replace, the least likely one that is verified: the lower of the two.
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
        """Return the nodes to read while the target's pass waits for so many seconds."""
        if self.draft.table[-1] > seconds:
            return []
        nodes = tree.unread(self.top_k) if len(tree) else [NO_NODE]
        return [node for node in nodes if probability(tree, node) >= LEAST_PROB]

    def sends(self, trees: Sequence[GrowingTree]) -> list[list[int]]:
        """Return each row's nodes to verify, in ascending order; a node's parent is among them."""
        # A parent is before its children and has at least their probability: a stable sort keeps
        # that order.
        orders = [sorted(range(len(tree)), key=tree.probs.__getitem__, reverse=True) for tree in trees]
        best = self._best([[tree.probs[node] for node in order] for tree, order in zip(trees, orders, strict=True)])
        most = min(max(map(len, trees)), self.max_nodes)
        best = self.verify.revisited(best, most, self.step) if self.step else most
        return [sorted(order[:best]) for order in orders]

    def add_draft(self, trees: Sequence[GrowingTree], reads: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn from a draft pass that read these nodes, whose children are the last of the trees."""
        self.draft.add(max(map(len, reads)), seconds, self._drafts)
        self._drafts += 1
        # Add the probabilities of the nodes that were read, and those of their children by rank.
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
        """Learn from a step: each row's nodes that were verified, and those that were accepted.

        Trees may have grown since. `draft_seconds` are those before the pass.
        """
        # 1. Learn the costs. The first step may take much longer than later ones, so the mean tokens
        # per second leave it out.
        num_nodes = max(map(len, sent))
        usual_seconds = self.verify.table[num_nodes]
        self.verify.add(num_nodes, pass_seconds, self.step)
        self.drafting.add(draft_seconds)
        self.step += 1
        if self.step == 1:
            return
        # 2. Learn how many tokens came, beside those that were expected.
        num_rows = len(trees)
        tokens = 1.0 + sum(map(len, accepted)) / num_rows
        expected = 1.0 + sum(tree.probs[node] for tree, row in zip(trees, sent, strict=True) for node in row) / num_rows
        seconds = min(draft_seconds, STALL * self.drafting.median) + min(pass_seconds, STALL * usual_seconds)
        self.mean.add(tokens, expected, seconds)


def children_gain(prob: float, profile: Sequence[float], floor: float) -> float:
    """Return the tokens that the children of a node are expected to add.

    `profile` are the shares of a node's probability that its children have, the likeliest first. A
    child adds what its probability exceeds the floor by.
    """
    total = 0.0
    for share in profile:
        if prob * share <= floor:
            break
        total += prob * share - floor
    return total


def probability(tree: GrowingTree, node: int) -> float:
    """Return the probability that a node is accepted; the root (NO_NODE) always is."""
    return 1.0 if node == NO_NODE else tree.probs[node]


def mean_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums of the first n probabilities of a row, n = 0, 1, ..., averaged over rows."""
    sums = [list(accumulate(row, initial=0.0)) for row in rows]
    if len(sums) == 1:
        return sums[0]
    longest = max(map(len, sums))
    return [sum(row[min(n, len(row) - 1)] for row in sums) / len(sums) for n in range(longest)]
