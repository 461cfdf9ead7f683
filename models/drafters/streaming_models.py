"""Growing trees of models, while the target reads parts of them (see `StreamingDrafter`).

A draft pass reads the likeliest nodes that weren't read, and appends what the model expects after
them. Which nodes those are depends on probabilities only, never on the clock. A node's probability
is the product of calibrated probabilities on its path.

The tree of a draft model outlives the tokens that the target commits, with its keys and values (see
`GrowingSearch`). A ReDrafter reads the nodes that are left again, after the newest hidden state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic

import torch
from jaxtyping import Float

from ..decoding.growing_tree import UNREAD, GrowingTree
from ..decoding.protocols import State, StreamingDrafter
from ..decoding.types import NO_NODE, Prompts, TargetOutput
from .calibration import ScoreCalibration
from .candidates import Children, add_children, learn, likeliest_children
from .draft_model import DraftModel
from .growing_draft import MAX_READS, GrowingDraft, GrowingSearch
from .redrafter import Redrafter

LEAST_PROB = 0.01
"""Less likely nodes aren't read: they are hardly ever sent to the target."""
LEAST_SHARE = 0.3
"""A pass reads nodes that have at least this share of the likeliest one's probability.

A node that is read besides another one costs a part of the pass: it must be worth this part."""


class StreamingModel(StreamingDrafter[State], ABC, Generic[State]):
    """Base class of models whose tree grows. In a merge, the merge chooses the nodes to read."""

    max_depth: float = inf
    """Deepest nodes of the tree: the model predicts too badly below them."""

    @abstractmethod
    def scores(self, state: State) -> list[float]:
        """Return the model's own probability of each node after its parent.

        0 marks a node of another source.
        """

    @abstractmethod
    def room(self, state: State) -> int:
        """Return how many more nodes may be read."""

    @abstractmethod
    def read(self, state: State, nodes: Sequence[int]) -> None:
        """Read some nodes in one pass, and append their children.

        Their parents have been read before. The only node of an empty tree is the root, NO_NODE.
        """

    def grow(self, state: State) -> bool:
        tree = self.tree(state)
        nodes = tree.unread(MAX_READS) if len(tree) else [NO_NODE]
        nodes = [node for node in nodes if node == NO_NODE or tree.depths[node] < self.max_depth]
        nodes = worth_reading(nodes, [1.0 if node == NO_NODE else tree.probs[node] for node in nodes])
        nodes = nodes[: self.room(state)]
        if nodes:
            self.read(state, nodes)
        return bool(nodes)


def worth_reading(nodes: Sequence[int], probs: Sequence[float]) -> list[int]:
    """Return the nodes that are worth a part of a pass; the likeliest comes first."""
    least = max(LEAST_PROB, LEAST_SHARE * max(probs, default=0.0))
    return [node for node, prob in zip(nodes, probs, strict=True) if prob >= least]


class StreamingDraftModel(StreamingModel[GrowingDraft]):
    """A draft model, whatever its `pace`."""

    def __init__(self, drafter: DraftModel) -> None:
        """Raises ValueError for drawn drafts, and for passes that are compiled or recorded."""
        config, reader = drafter.config, drafter.reader
        if config.temperature:
            raise ValueError(
                f"the draft model's temperature is {config.temperature:g}, and drafts that are drawn can't be pipelined: their "
                "acceptance would depend on when they arrive; set the drafter's temperature to 0"
            )
        if reader.has_fixed_shapes:
            raise ValueError(
                "the draft model's passes are compiled or recorded shape by shape, and a tree that grows has too many shapes: "
                "set target.compiled and target.cuda_graphs to false"
            )
        # Its own growing tree, if it has one, for what that has learned.
        grows = isinstance(drafter.drafting, GrowingSearch)
        self.drafter = drafter if grows else DraftModel(replace(config, pace="expected"), reader)
        assert isinstance(self.drafter.drafting, GrowingSearch)
        self.search = self.drafter.drafting

    def begin(self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int) -> GrowingDraft:
        return self.search.start(self.drafter.init_state(prompts, prefill, max_new_tokens=max_new_tokens), last_token)

    def tree(self, state: GrowingDraft) -> GrowingTree:
        return state.trees[0]

    def scores(self, state: GrowingDraft) -> list[float]:
        return state.rows[0].scores

    def room(self, state: GrowingDraft) -> int:
        return self.search.room(state)

    def read(self, state: GrowingDraft, nodes: Sequence[int]) -> None:
        self.search.read(state, nodes)

    def follow(self, state: GrowingDraft, tokens: Sequence[int], output: TargetOutput) -> GrowingDraft:
        return self.search.follow(state, tokens)


MAX_RECURRENT_DEPTH = 20
"""Deepest nodes of a ReDrafter's tree.

The demo's drafter, trained for 4 depths, gives the target's token the highest probability at 41% of
the places at depths 1 to 6, at 36% at depth 10, and at 34% at depths 13 to 20, if the path above is
right. So its recurrent state goes on well past the depth of its training. Deeper isn't measured.
"""
MAX_RECURRENT_NODES = 256
"""Most nodes of a ReDrafter's tree that are read."""


@dataclass(slots=True, kw_only=True)
class RecurrentDraft:
    """A ReDrafter's tree in the making."""

    hidden: Float[torch.Tensor, " hidden"]
    """The target's last hidden state before the last token."""
    last_token: int
    tree: GrowingTree = field(default_factory=GrowingTree)
    scores: list[float] = field(default_factory=list)
    states: list[Float[torch.Tensor, " hidden"]] = field(default_factory=list)
    """Recurrent state after each entry: the last token, then the nodes that were read."""


class StreamingRedrafter(StreamingModel[RecurrentDraft]):
    """A ReDrafter whose recurrent state goes on from node to node."""

    max_depth = MAX_RECURRENT_DEPTH

    def __init__(self, drafter: Redrafter) -> None:
        self.drafter, self.calibration = drafter, ScoreCalibration()

    def begin(self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int) -> RecurrentDraft:
        hidden = self.drafter.init_state(prompts, prefill, max_new_tokens=max_new_tokens)
        return self._rooted(hidden[0], last_token, GrowingTree())

    def tree(self, state: RecurrentDraft) -> GrowingTree:
        return state.tree

    def scores(self, state: RecurrentDraft) -> list[float]:
        return state.scores

    def room(self, state: RecurrentDraft) -> int:
        return MAX_RECURRENT_NODES - len(state.states)

    def read(self, state: RecurrentDraft, nodes: Sequence[int]) -> None:
        # 1. The recurrent states after these nodes.
        tree = state.tree
        entries = [0 if tree.parents[node] == NO_NODE else tree.entries[tree.parents[node]] for node in nodes]
        embeddings = self._embed(state, [tree.tokens[node] for node in nodes])
        states = self.drafter.next_state(torch.stack([state.states[entry] for entry in entries]), embeddings)
        # 2. Their children.
        for node, recurrent, children in zip(nodes, states, self._children(state, states), strict=True):
            self._add(state, node, recurrent, children)

    def follow(self, state: RecurrentDraft, tokens: Sequence[int], output: TargetOutput) -> RecurrentDraft:
        learn(state.tree, state.scores, tokens, self.calibration)
        rerooted = state.tree.rerooted(tokens)
        former = GrowingTree() if rerooted is None else rerooted.tree
        return self._rooted(output.hidden_states[0, len(tokens) - 1], tokens[-1], former)

    def _rooted(self, hidden: Float[torch.Tensor, " hidden"], last_token: int, former: GrowingTree) -> RecurrentDraft:
        """Return a draft that has read the root, and the nodes that were read in a former tree.

        All of them are read in one pass of the head.
        """
        state = RecurrentDraft(hidden=hidden, last_token=last_token)
        # 1. The recurrent states, depth by depth.
        levels: list[list[int]] = [[] for _ in range(max(former.depths, default=0) + 1)]
        for node, entry in enumerate(former.entries):
            if entry != UNREAD:
                levels[former.depths[node]].append(node)
        (first,) = self.drafter.first_state(self._embed(state, [last_token]))
        after = {NO_NODE: first}
        for nodes in filter(None, levels):
            above = torch.stack([after[former.parents[node]] for node in nodes])
            embeddings = self._embed(state, [former.tokens[node] for node in nodes])
            after.update(zip(nodes, self.drafter.next_state(above, embeddings), strict=True))
        # 2. Their children. A former node may not be among its parent's likeliest children now.
        numbers = {NO_NODE: NO_NODE}
        for node, children in zip(after, self._children(state, torch.stack([*after.values()])), strict=True):
            if node != NO_NODE:
                above_node = numbers.get(former.parents[node])
                siblings = () if above_node is None else state.tree.children(above_node)
                same = [sibling for sibling in siblings if state.tree.tokens[sibling] == former.tokens[node]]
                if not same:
                    continue
                (numbers[node],) = same
            self._add(state, numbers[node], after[node], children)
        return state

    def _embed(self, state: RecurrentDraft, tokens: Sequence[int]) -> Float[torch.Tensor, "node hidden"]:
        return self.drafter.embed(torch.tensor(tokens, device=state.hidden.device))

    def _children(self, state: RecurrentDraft, states: Float[torch.Tensor, "node hidden"]) -> list[Children]:
        """Return the likeliest tokens after nodes with these recurrent states."""
        logits = self.drafter.logits(state.hidden.expand(len(states), -1), states)
        (children,) = likeliest_children(logits[None], self.drafter.vocabulary)
        return children

    def _add(self, state: RecurrentDraft, node: int, recurrent: Float[torch.Tensor, " hidden"], children: Children) -> None:
        """Append the children of a node that was read, or of the root."""
        if node != NO_NODE:
            state.tree.mark_read(node, len(state.states))
        state.states.append(recurrent)
        add_children(state.tree, state.scores, node, *children, self.calibration)
