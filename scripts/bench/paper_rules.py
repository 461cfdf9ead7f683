"""Rules of papers, as baselines for the library's: when to verify (LLMCad), and what to send (PipeInfer).

offload.py and pipelining.py run them. They see probabilities only, so the tokens are those of plain
decoding, as with the library's rules.
"""

from collections.abc import Sequence

from outrider.models.decoding.growing_tree import GrowingTree
from outrider.models.decoding.speculation import MAX_NODES
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import NO_NODE, AcceptedPath, TargetOutput
from outrider.models.decoding.window import DraftRun, Window
from outrider.models.drafters.growing_draft import LEAST_PROB
from outrider.models.drafters.merge_sources import MergedDraft, MergedState
from outrider.models.drafters.merged import MergedDrafter, MergedProposal, PacedStep
from outrider.models.drafters.merging import MergedRow

BRANCH_THRESHOLD = 0.3
"""A token starts a branch of its own if the draft model gives it more than this (section 3.1)."""
FIRST_CONFIDENCE = 0.01
"""The threshold alpha of the first step (section 3.3)."""
FALLING = 0.5
"""Factor of alpha after a step without errors: the confidence of 3 to 5 tokens (section 3.3)."""


class ConfidenceMerge(MergedDrafter):
    """A growing draft model with LLMCad's rule: verify when the surest branch is less likely than a threshold, alpha.

    See arXiv 2309.04255, sections 3.2 and 3.3. Each draft pass reads one node, that of the branch
    that is owed most. Alpha rises after errors and falls after none. The rule is blind to costs.
    `tree_nodes` bounds the tree, for which the paper has no bound.
    """

    alpha = FIRST_CONFIDENCE

    def _paced(self, draft: MergedDraft, step: PacedStep) -> int:
        (index,) = draft.grown
        self.merge.rank(draft)
        while any(reads := self._reads(draft, index, self.alpha)):
            self.merge.read(draft, index, reads)
            self.merge.rank(draft)
        draft.rows = tuple(of_nodes(row, branch_nodes(row.tree())) for row in draft.rows)
        return self.max_nodes

    def _grow_on(self, draft: MergedDraft, seconds: float) -> bool:
        (index,) = draft.grown
        (nodes,) = self._reads(draft, index, LEAST_PROB)
        if nodes:
            self.merge.read(draft, index, [nodes])
            self.merge.rank(draft)
        return bool(nodes)

    def _reads(self, draft: MergedDraft, index: int, least: float) -> list[list[int]]:
        """Return the node of each row that the next pass reads; none where the surest branch is less likely than `least`."""
        open_nodes = self.merge.unread(draft, index, self.max_nodes)
        if open_nodes[0] == [NO_NODE]:
            return open_nodes
        return [self._read_of(row.tree(), {*nodes}, least) for row, nodes in zip(draft.rows, open_nodes, strict=True)]

    def _read_of(self, tree: GrowingTree, open_nodes: set[int], least: float) -> list[int]:
        nodes = branch_nodes(tree)
        ends = [end for end in branch_ends(tree, nodes) if end in open_nodes]
        # Tree-cumulative confidence T_c: that of the surest branch.
        if len(nodes) >= self.max_nodes or max((tree.probs[end] for end in ends), default=0.0) < least:
            return []
        return [owed_most(tree, ends, len(nodes))]

    def advance(self, drafted: MergedProposal, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        for row, tokens in zip(drafted.draft.rows, accepted.tokens, strict=True):
            self._learn(row.tree(), tokens)
        return super().advance(drafted, tree, accepted, output)

    def _learn(self, tree: GrowingTree, tokens: Sequence[int]) -> None:
        nodes = branch_nodes(tree)
        if nodes:
            # The best matching branch is the surest one of those that follow the accepted path.
            ends, path = branch_ends(tree, nodes), tree.follow(tokens)
            last = path[-1] if path else NO_NODE
            best = max((end for end in ends if is_above(tree, last, end)), key=tree.probs.__getitem__)
            confidence = max(tree.probs[end] for end in ends)
            self.alpha = next_alpha(self.alpha, confidence, len(path), tree.depths[best])


def of_nodes(row: MergedRow, nodes: Sequence[int]) -> MergedRow:
    """Return a row of these nodes only, which have their parents among them."""
    places = {NO_NODE: NO_NODE} | {node: place for place, node in enumerate(nodes)}
    kept = ([values[node] for node in nodes] for values in (row.tokens, row.probs, row.origins, row.depths, row.places))
    tokens, probs, origins, depths, spots = kept
    children = {places[node]: found for node, found in row.children.items() if node in places}
    return MergedRow(tokens, [places[row.parents[node]] for node in nodes], probs, origins, depths, children, spots)


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


class PaperSpeculation:
    """PipeInfer's rule: chains of likely tokens, cut off by a threshold.

    See arXiv 2407.11798, section IV-B. A run takes the next `micro_batch` tokens of the likeliest
    chain, and ends before a token that the drafter gives less than the cutoff. The cutoff rises by
    `recovery` with each run since the last acceptance, and falls by `decay` with each attempt in
    vain. The default numbers are those of the authors' code.
    """

    def __init__(
        self,
        *,
        micro_batch: int = 4,
        cutoff: float = 0.5,
        recovery: float = 0.0,
        decay: float = 0.0,
    ) -> None:
        self.micro_batch, self.cutoff, self.recovery, self.decay = micro_batch, cutoff, recovery, decay
        self.max_nodes = MAX_NODES
        self._num_runs = self._num_vain = 0

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        cutoff = self.cutoff + self.recovery * self._num_runs - self.decay * self._num_vain
        # 1. Walk down the likeliest chain, past the nodes that were sent.
        size = min(self.micro_batch, self.max_nodes - len(window))
        sent, above = window.sent(drafts), NO_NODE
        nodes: list[int] = []
        while len(nodes) < size and (children := drafts.children(above)):
            above = max(children, key=drafts.probs.__getitem__)
            if drafts.depths[above] > max_depth or (above not in sent and drafts.estimates[above] < cutoff):
                break
            if above not in sent:
                nodes.append(above)
        else:
            # 2. The chain isn't drafted to its end yet: wait for a full run.
            if len(nodes) < size and has_more:
                return ()
        self._num_vain += not nodes
        return nodes

    def add_run(self, run: DraftRun) -> None:
        self._num_runs += 1

    def add_answer(self, number: int, num_tokens: int) -> None:
        if num_tokens:
            self._num_runs = self._num_vain = 0
