"""One growing tree of several drafters, while the target reads parts of it.

Training-free drafters propose candidates below the root, and later below leaves; models read nodes
of the tree. Equal prefixes are one node (see `merging`), so the likeliest leaf is extended by every
source, whichever has proposed it.

    the text    a b c
    suffix      d e f             tree   d ─┬─ e ─── f ─── g     g: the draft model has read f,
    model       d x                         └─ x                    which only suffix proposed

A node's probability is calibrated as in a merged tree that is drafted step by step, by the same
counts. A merge of one training-free drafter is how such a drafter is streamed.

The tree of a `StreamingDrafter` is a function of the text and of what the drafter has learned; it
never reads random numbers. So the tokens are those of plain decoding, whenever the target's answers
arrive.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..decoding.growing_tree import UNREAD, GrowingTree
from ..decoding.loop import NullDrafter
from ..decoding.protocols import Drafter, StreamingDrafter
from ..decoding.tree import accepted_path, chain_tree
from ..decoding.types import NO_NODE, Prompts, TargetOutput
from .block import Block
from .calibration import BIN_BOUNDS, OutcomeCounts, start_of_text
from .draft_model import DraftModel
from .eagle import Eagle
from .eagle3 import Eagle3
from .growing_draft import MAX_READS
from .medusa import Medusa
from .merged import MergedDrafter
from .merging import MergedRow, MergeWalk, Proposals, follow, grow
from .redrafter import Redrafter
from .streaming_models import LEAST_PROB, StreamingDraftModel, StreamingModel, StreamingRedrafter, worth_reading
from .training_free import FreeState, TextState, TrainingFreeDrafter

MAX_NODES = 256
"""Most nodes of a tree."""
FLOORS = (LEAST_PROB,) * MAX_NODES
MAX_ASKED = 4
"""Most leaves below which one pass asks training-free drafters, if they have nothing to propose."""
LEAST_ASKED = 0.05
"""Training-free drafters aren't asked below less likely leaves."""
MAX_WALKS = 16
"""Most former trees that calibration still compares with the text."""
FOREIGN = -2
"""Parent of a model's node in its proposals, if it isn't the model's own candidate."""

StreamingSource = TrainingFreeDrafter | StreamingModel[Any]


@dataclass(slots=True, kw_only=True)
class MergedGrowth:
    """State of a streaming merge."""

    last_token: int
    free: dict[int, FreeState]
    """The states of the training-free sources, by the source's index."""
    models: dict[int, Any]
    """The states of the models."""
    counts: OutcomeCounts
    walks: tuple[MergeWalk, ...] = ()
    """Former trees that the text has followed so far."""
    roots: list[Proposals] = field(default_factory=list)
    """What the sources propose below the last token."""
    read_by: dict[int, Proposals] = field(default_factory=dict)
    """The nodes of each model's tree as proposals; they have the tree's indexes."""
    row: MergedRow = field(default_factory=lambda: grow([], {}, 0))
    tree: GrowingTree = field(default_factory=GrowingTree)


class StreamingMerge(StreamingDrafter[MergedGrowth]):
    """Drafters whose candidates form one growing tree."""

    def __init__(self, sources: Sequence[StreamingSource], counts: OutcomeCounts) -> None:
        self.free = {index: source for index, source in enumerate(sources) if isinstance(source, TrainingFreeDrafter)}
        self.models = {index: source for index, source in enumerate(sources) if isinstance(source, StreamingModel)}
        self.counts = counts

    def begin(self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int) -> MergedGrowth:
        room = {"max_new_tokens": max_new_tokens}
        free = {index: source.init_state(prompts, prefill, **room) for index, source in self.free.items()}
        models = {index: model.begin(prompts, prefill, last_token, **room) for index, model in self.models.items()}
        return self._rooted(MergedGrowth(last_token=last_token, free=free, models=models, counts=start_of_text(self.counts)))

    def tree(self, state: MergedGrowth) -> GrowingTree:
        return state.tree

    def grow(self, state: MergedGrowth) -> bool:
        """Let training-free sources propose below the likeliest leaf, and each model read nodes."""
        if len(state.row.tokens) >= MAX_NODES:
            return False
        num_asked = self._ask(state)
        num_read = sum(self._read(state, index) for index in self.models)
        if num_asked or num_read:
            self._merge(state)
        return bool(num_asked or num_read)

    def follow(self, state: MergedGrowth, tokens: Sequence[int], output: TargetOutput) -> MergedGrowth:
        # 1. Learn which tokens the target has chosen.
        walks = (*state.walks[1 - MAX_WALKS :], (state.row, NO_NODE))
        for token in tokens:
            walks = follow(walks, token, state.counts, self.counts)
        # 2. The sources' states. Training-free ones propose anew, since they know more text.
        chain = chain_tree(torch.tensor([tokens[:-1]], dtype=torch.long, device=output.logits.device))
        accepted = accepted_path(chain, [range(len(tokens) - 1)])
        free = {
            index: source.advance(TextState(state.free[index], [state.last_token]), chain, accepted, output)
            for index, source in self.free.items()
        }
        models = {index: model.follow(state.models[index], tokens, output) for index, model in self.models.items()}
        # 3. What is left of the tree.
        return self._rooted(MergedGrowth(last_token=tokens[-1], free=free, models=models, counts=state.counts, walks=walks))

    def _rooted(self, state: MergedGrowth) -> MergedGrowth:
        """Merge what training-free sources propose below the root, and what models have read."""
        state.roots = self._proposals(state, NO_NODE)
        for index in self.models:
            state.read_by[index] = Proposals(index)
            state.roots.append(state.read_by[index])
        self._merge(state)
        return state

    def _merge(self, state: MergedGrowth) -> None:
        """Merge all proposals into the state's tree."""
        for index, model in self.models.items():
            _append(state.read_by[index], model.tree(state.models[index]), model.scores(state.models[index]))
        state.row = row = grow(state.roots, state.counts, MAX_NODES, FLOORS)
        state.tree = tree = GrowingTree()
        for token, parent, prob in zip(row.tokens, row.parents, row.probs, strict=True):
            tree.add(parent, [token], [prob if parent == NO_NODE else prob / row.probs[parent]])

    def _ask(self, state: MergedGrowth) -> int:
        """Ask training-free sources below the likeliest leaf.

        Leaves below which they have nothing are passed over. Returns how often they were asked.
        """
        num_asked = 0
        for leaf, places in enumerate(state.row.places if self.free else ()):
            if state.row.probs[leaf] < LEAST_ASKED:
                break
            if state.row.children[leaf] or any(node in source.attached for source, node in places):
                continue
            proposals = self._proposals(state, leaf)
            first, node = places[0]
            first.attached[node] = [(other, NO_NODE) for other in proposals]
            num_asked += 1
            if proposals or num_asked == MAX_ASKED:
                break
        return num_asked

    def _proposals(self, state: MergedGrowth, leaf: int) -> list[Proposals]:
        """Return the candidates of the training-free sources below a leaf."""
        path: list[int] = []
        while leaf != NO_NODE:
            path.append(state.row.tokens[leaf])
            leaf = state.row.parents[leaf]
        tokens = [state.last_token, *reversed(path)]
        proposals = [
            Proposals(index, source.candidates_of(state.free[index].stores[0], tokens)) for index, source in self.free.items()
        ]
        return [source for source in proposals if source.tokens]

    def _read(self, state: MergedGrowth, index: int) -> bool:
        """Let a model read the likeliest nodes whose parents it has read; return whether it did."""
        model, part, proposals = self.models[index], state.models[index], state.read_by[index]
        tree, room = model.tree(part), min(MAX_READS, model.room(part))
        if not len(tree):
            model.read(part, [NO_NODE])
            return True
        # 1. The likeliest nodes of the merged tree whose parents the model has read, and all nodes'
        # numbers in the model's tree.
        numbers: dict[int, int | None] = {NO_NODE: NO_NODE}
        nodes: list[int] = []
        for node, parent in enumerate(state.row.parents):
            if len(nodes) == room:
                break
            above = numbers[parent]
            numbers[node] = next((number for source, number in state.row.places[node] if source is proposals), None)
            is_open = above is not None and (above == NO_NODE or tree.entries[above] != UNREAD)
            number = numbers[node]
            if is_open and state.row.depths[node] < model.max_depth and (number is None or tree.entries[number] == UNREAD):
                nodes.append(node)
        nodes = worth_reading(nodes, [state.row.probs[node] for node in nodes])
        # 2. Nodes that other sources have proposed join the model's tree.
        for node in nodes:
            if numbers[node] is None:
                above = numbers[state.row.parents[node]]
                assert above is not None
                numbers[node] = number = _adopt(tree, model.scores(part), above, state.row.tokens[node])
                source, place = state.row.places[node][0]
                source.attached.setdefault(place, []).append((proposals, number))
        # 3. Read them, unless they were read below an earlier root.
        reads = [number for number in map(numbers.get, nodes) if number is not None and tree.entries[number] == UNREAD]
        if reads:
            model.read(part, reads)
        return bool(nodes)


def _adopt(tree: GrowingTree, scores: list[float], parent: int, token: int) -> int:
    """Return the child of a node in a model's tree with a token of another source."""
    for child in tree.children(parent):
        if tree.tokens[child] == token:
            return child
    tree.add(parent, [token], [0.0])
    scores.append(0.0)
    return len(tree) - 1


def _append(proposals: Proposals, tree: GrowingTree, scores: Sequence[float]) -> None:
    """Append what a model's tree has got since to its proposals."""
    for node in range(len(proposals.tokens), len(tree)):
        parent = tree.parents[node] if scores[node] > 0.0 else FOREIGN
        proposals.add(parent, tree.tokens[node], scores[node], bisect(BIN_BOUNDS, scores[node]))


# --- drafters for a target that reads parts of a draft tree while the tree grows


REASONS: dict[type[Any], str] = {
    Block: "a block drafter reads what enters inner layers of the target, which are in other processes",
    Eagle3: "EAGLE-3 reads what enters inner layers of the target, which are in other processes",
    Eagle: "EAGLE reads the target's hidden states of all accepted tokens, and drafts each tree anew from them",
    Medusa: "Medusa's heads draft a fixed number of tokens from one hidden state, so its tree can't grow",
}
"""Why drafters of some kinds can't be pipelined."""


def streaming_drafter(drafter: Drafter[Any, Any]) -> StreamingDrafter[Any]:
    """Return a drafter's streaming form. It shares the weights, and what the drafter has learned.

    Raises ValueError for a drafter whose tree can't grow while the target reads it.
    """
    if isinstance(drafter, NullDrafter):
        return StreamingNull()
    if isinstance(drafter, MergedDrafter):
        return StreamingMerge([_source(source) for source in drafter.sources.values()], drafter.counts)
    source = _source(drafter)
    return StreamingMerge([source], {}) if isinstance(source, TrainingFreeDrafter) else source


def _source(drafter: Drafter[Any, Any]) -> StreamingSource:
    """Return a drafter as a source of a merge."""
    if isinstance(drafter, TrainingFreeDrafter):
        return drafter
    if isinstance(drafter, DraftModel):
        return StreamingDraftModel(drafter)
    if isinstance(drafter, Redrafter):
        return StreamingRedrafter(drafter)
    reason = next((reason for kind, reason in REASONS.items() if isinstance(drafter, kind)), None)
    reason = reason or f"{type(drafter).__name__} drafts a whole tree at each step, so its tree can't grow"
    raise ValueError(
        f"{reason}: it can't draft while the target reads. Choose a draft model, a ReDrafter, training-free drafters or a "
        "merge of these, or decode step by step"
    )


class StreamingNull(StreamingDrafter[GrowingTree]):
    """Drafter that proposes nothing. Its state is an empty tree."""

    def begin(self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int) -> GrowingTree:
        return GrowingTree()

    def tree(self, state: GrowingTree) -> GrowingTree:
        return state

    def grow(self, state: GrowingTree) -> bool:
        return False

    def follow(self, state: GrowingTree, tokens: Sequence[int], output: TargetOutput) -> GrowingTree:
        return state
