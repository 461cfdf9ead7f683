"""Streaming drafters that know the text, and are right as often as a test wants; a random policy.

And the schedules: what is decoded, by how many stages, drafter, rule and policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from outrider.models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from outrider.models.decoding.growing_tree import UNREAD, GrowingTree
from outrider.models.decoding.sampling import Randomness, RowSeeds, Sampling
from outrider.models.decoding.speculation import ExpectedSpeculation, Speculation
from outrider.models.decoding.types import NO_NODE, Prompts, TargetOutput
from outrider.models.decoding.window import DraftRun, Window


@dataclass
class DialledState:
    """The number of the answer's tokens so far, and the tree below the last one."""

    num_tokens: int
    tree: GrowingTree = field(default_factory=GrowingTree)
    right: set[int] = field(default_factory=lambda: {NO_NODE})
    """The nodes whose path is the true text."""


def unread(tree: GrowingTree) -> list[int]:
    """Return the nodes that weren't read, whose parents were."""
    is_open = [parent == NO_NODE or tree.cache_entries[parent] != UNREAD for parent in tree.parents]
    return [node for node, entry in enumerate(tree.cache_entries) if is_open[node] and entry == UNREAD]


@dataclass
class DialledDrafter:
    """A drafter whose likeliest token is right with probability `acceptance`.

    `text` is the true answer. `width` is the number of children of a node; `confidence` is what the
    first one is given, and others share the rest. `max_nodes` bounds a tree: 0 never drafts.
    """

    text: Sequence[int]
    acceptance: float
    seed: int = 0
    width: int = 1
    confidence: float = 0.8
    max_nodes: int = 20
    vocab: int = 6

    def begin(
        self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int, generator: Randomness = None
    ) -> DialledState:
        assert last_token == self.text[0]
        return DialledState(1)

    def tree(self, state: DialledState) -> GrowingTree:
        return state.tree

    def grow(self, state: DialledState) -> bool:
        tree = state.tree
        if len(tree) >= self.max_nodes:
            return False
        node = NO_NODE
        if len(tree):
            node = max(unread(tree), key=tree.probs.__getitem__)
            tree.mark_read(node, 1 + sum(entry != UNREAD for entry in tree.cache_entries))
        depth = 0 if node == NO_NODE else tree.depths[node]
        place = state.num_tokens + depth
        # 1. The children: the true token first, or another one.
        rng = Random(f"{self.seed}/{place}/{node if node not in state.right else ''}")
        true = self.text[place] if node in state.right and place < len(self.text) else rng.randrange(self.vocab)
        others = [token for token in range(self.vocab) if token != true]
        rng.shuffle(others)
        tokens = [true, *others] if rng.random() < self.acceptance else [*others, true]
        rest = (1 - self.confidence) / max(self.width - 1, 1)
        first = len(tree)
        tree.add(node, tokens[: self.width], [self.confidence, *[rest] * (self.width - 1)][: self.width])
        # 2. Which of them is right.
        if node in state.right:
            state.right.update(child for child in range(first, len(tree)) if tree.tokens[child] == true)
        return True

    def follow(
        self, state: DialledState, tokens: Sequence[int], output: TargetOutput, generator: Randomness = None
    ) -> DialledState:
        assert output.logits.shape[1] == len(tokens)
        num_tokens = state.num_tokens + len(tokens)
        assert list(tokens) == list(self.text[state.num_tokens : num_tokens])
        rerooted = state.tree.rerooted(tokens)
        if rerooted is None:
            return DialledState(num_tokens)
        right = {NO_NODE} | {new for new, old in enumerate(rerooted.nodes) if old in state.right}
        return DialledState(num_tokens, rerooted.tree, right)


@dataclass
class RandomSpeculation:
    """A policy that sends any nodes at any time, as long as parents come first."""

    seed: int
    max_nodes: int = 64

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        if has_more and self.random.random() < 0.4:
            return ()
        nodes: list[int] = []
        skipped: set[int] = set()
        size = min(self.random.randint(1, 4), self.max_nodes - len(window))
        for node in window.unsent(drafts, max_depth):
            if len(nodes) == size:
                break
            if drafts.parents[node] in skipped or self.random.random() < 0.3:
                skipped.add(node)
            else:
                nodes.append(node)
        return nodes

    def add_run(self, run: DraftRun) -> None:
        pass

    def add_answer(self, number: int, num_tokens: int) -> None:
        pass


# --- schedules

STAGES = (1, 2, 3, 5)
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"acceptance": 0.7},
    "tree": {"acceptance": 0.6, "width": 3, "confidence": 0.6},
    "oracle": {"acceptance": 1.0, "confidence": 0.99},
    "adversarial": {"acceptance": 0.0, "width": 2, "confidence": 0.99},
    "empty": {"acceptance": 1.0, "max_nodes": 0},
}
POLICIES: tuple[Callable[[int], Speculation], ...] = (
    RandomSpeculation,
    lambda seed: RandomSpeculation(seed, max_nodes=5),
    lambda seed: ExpectedSpeculation(micro_batch=1 + seed % 4, max_nodes=5),
    lambda seed: ExpectedSpeculation(),
)
NUM_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule: all that it does follows from the seed."""

    seed: int
    num_stages: int
    drafter: str
    is_sampled: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(Random(self.seed // 40 % 4).choices(range(6), k=1 + self.seed % 5))

    @property
    def max_new_tokens(self) -> int:
        return Random(self.seed).randint(1, NUM_TOKENS)


def options(is_sampled: bool) -> dict[str, Any]:
    """Return the rule, and its seeds, which a text uses up."""
    if is_sampled:
        return {"rule": SpeculativeSampling(sampling=Sampling(temperature=0.7)), "generator": RowSeeds([5])}
    return {"rule": GreedyAcceptance(), "generator": None}


def schedules(count: int) -> list[Schedule]:
    """Return schedules of all combinations of stages, drafters and rules in turn."""
    combinations = [(stages, drafter, rule) for stages in STAGES for drafter in DRAFTERS for rule in (False, True)]
    return [
        Schedule(seed=seed, num_stages=stages, drafter=drafter, is_sampled=rule)
        for seed, (stages, drafter, rule) in enumerate(combinations * -(-count // len(combinations)))
    ]
