"""A merged tree that grows while the target reads parts of it, in a pipeline of stages.

It is the tree of `merged`, but nothing is paced: a pass of the drafters costs no time of the target.
At first training-free drafters propose below the last token. Then each call of `grow` extends the tree
where it is likeliest: trained drafters search once, training-free ones propose below its leaves, and
growing models read its nodes.

The tree is a function of the text, of its seed and of what the drafter has learned, and no node changes what is drawn.
So the tokens are those of plain decoding, whenever the target's answers arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decoding.growing_tree import GrowingTree
from ..decoding.loop import NullDrafter
from ..decoding.protocols import Drafter, StreamingDrafter
from ..decoding.sampling import Randomness
from ..decoding.tree import accepted_path, chain_tree
from ..decoding.types import NO_NODE, Prompts, TargetOutput
from .merge_sources import MergedDraft, MergeSources, Source, odds_of_draws
from .merged import MergedDrafter
from .merging import MergedRow, Proposals

MAX_NODES = 256
"""Most nodes of a tree."""
LEAST_PROB = 0.01
"""Less likely nodes aren't in the tree, nor read: they are hardly ever sent to the target."""
LEAST_SHARE = 0.3
"""A pass reads nodes that have at least this share of the likeliest one's probability.

A node that is read besides another one costs a part of the pass: it must be worth this part."""
FLOORS = (LEAST_PROB,) * MAX_NODES
MAX_ASKED = 4
"""Most leaves below which one pass asks training-free drafters, if they have nothing to propose."""
LEAST_ASKED = 0.05
"""Training-free drafters aren't asked below less likely leaves."""


@dataclass(slots=True)
class StreamingDraft:
    """A draft, and its tree as the window of a pipeline sees it."""

    draft: MergedDraft
    tree: GrowingTree
    unasked: list[int]
    """Trained sources that haven't searched below this root."""


class StreamingMerge(StreamingDrafter[StreamingDraft]):
    """A merge as a streaming drafter."""

    def __init__(self, merge: MergeSources) -> None:
        self.merge = merge

    def begin(
        self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int, generator: Randomness = None
    ) -> StreamingDraft:
        state = self.merge.init_state(prompts, prefill, max_new_tokens=max_new_tokens)
        return self._opened(state, last_token, prefill, generator)

    def tree(self, state: StreamingDraft) -> GrowingTree:
        return state.tree

    def grow(self, state: StreamingDraft) -> bool:
        draft = state.draft
        if len(draft.rows[0].tokens) >= MAX_NODES:
            return False
        # 1. Trained drafters search once below each root.
        has_drafted = bool(state.unasked)
        for index in state.unasked:
            self.merge.ask(draft, index)
        state.unasked = []
        # 2. Training-free ones are asked below the likeliest leaf, and each model reads nodes.
        has_drafted |= self._ask_below(draft)
        for index in draft.grown:
            (nodes,) = self.merge.unread(draft, index)
            if nodes := worth_reading(nodes, draft.rows[0]):
                self.merge.read(draft, index, [nodes])
                has_drafted = True
        if has_drafted:
            self._merge(state)
        return has_drafted

    def follow(
        self, state: StreamingDraft, tokens: Sequence[int], output: TargetOutput, generator: Randomness = None
    ) -> StreamingDraft:
        chain = chain_tree(torch.tensor([tokens[:-1]], dtype=torch.long, device=output.logits.device))
        accepted = accepted_path(chain, [range(len(tokens) - 1)])
        return self._opened(self.merge.advance(state.draft, chain, accepted, output), tokens[-1], output, generator)

    def _opened(self, state: Any, last_token: int, output: TargetOutput, generator: Randomness) -> StreamingDraft:
        """Merge what training-free drafters propose below the root, and what models have read."""
        draft = self.merge.open(state, torch.tensor([last_token], device=output.logits.device), [last_token], generator)
        for index in self.merge.free:
            self.merge.ask(draft, index)
        opened = StreamingDraft(draft, GrowingTree(), [*self.merge.searching])
        self._merge(opened)
        return opened

    def _merge(self, state: StreamingDraft) -> None:
        self.merge.rank(state.draft, FLOORS)
        (row,) = state.draft.rows
        state.tree = row.tree()

    def _ask_below(self, draft: MergedDraft) -> bool:
        """Ask training-free sources below the likeliest leaf; return whether any was asked.

        Leaves below which they have nothing are passed over.
        """
        (row,), num_asked = draft.rows, 0
        for leaf, places in enumerate(row.places if self.merge.free else ()):
            if row.probs[leaf] < LEAST_ASKED:
                break
            if row.children[leaf] or any(node in source.attached for source, node in places):
                continue
            proposals = self._proposals(draft, row, leaf)
            first, node = places[0]
            first.attached[node] = [(other, NO_NODE) for other in proposals]
            num_asked += 1
            if proposals or num_asked == MAX_ASKED:
                break
        return bool(num_asked)

    def _proposals(self, draft: MergedDraft, row: MergedRow, leaf: int) -> list[Proposals]:
        """Return the candidates of the training-free sources below a leaf."""
        path, depth = list[int](), row.depths[leaf]
        while leaf != NO_NODE:
            path.append(row.tokens[leaf])
            leaf = row.parents[leaf]
        tokens = [draft.last_tokens[0], *reversed(path)]
        proposals = []
        for index in self.merge.free:
            found = self.merge.sources[index].candidates_of(draft.state.states[index].stores[0], tokens)
            if found.tokens:
                proposals.append(Proposals(index, found, odds_of_draws(draft.generator, 0, found, depth)))
        return proposals


def worth_reading(nodes: Sequence[int], row: MergedRow) -> list[int]:
    """Return the nodes that are worth a part of a pass; the likeliest comes first."""
    least = max(LEAST_PROB, LEAST_SHARE * max(map(row.prob, nodes), default=0.0))
    return [node for node in nodes if row.prob(node) >= least]


def streaming_drafter(drafter: Drafter[Any, Any]) -> StreamingDrafter[Any]:
    """Return a drafter's streaming form. It shares the weights, and what a merge has learned.

    Raises ValueError for a drafter that can't draft while the target reads.
    """
    if isinstance(drafter, NullDrafter):
        return StreamingNull()
    if isinstance(drafter, MergedDrafter):
        sources, counts = drafter.sources, drafter.merge.counts
    else:
        if not isinstance(drafter, Source):
            raise ValueError(f"{type(drafter).__name__} can't draft while the target reads; set target.cuda_graphs to false")
        sources, counts = {type(drafter).__name__: drafter}, {}
    for name, source in sources.items():
        if source.feature_layers:
            raise ValueError(
                f"{name} reads what enters inner layers of the target, which are in other processes: it can't draft while the "
                "target reads. Choose a drafter without feature layers, or decode step by step"
            )
    merge = MergeSources(sources, max_nodes=MAX_NODES, grows=True)
    merge.counts = counts
    return StreamingMerge(merge)


class StreamingNull(StreamingDrafter[GrowingTree]):
    """Drafter that proposes nothing. Its state is an empty tree."""

    def begin(
        self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int, generator: Randomness = None
    ) -> GrowingTree:
        return GrowingTree()

    def tree(self, state: GrowingTree) -> GrowingTree:
        return state

    def grow(self, state: GrowingTree) -> bool:
        return False

    def follow(
        self, state: GrowingTree, tokens: Sequence[int], output: TargetOutput, generator: Randomness = None
    ) -> GrowingTree:
        return state
