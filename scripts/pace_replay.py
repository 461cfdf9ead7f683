"""Replay of traces in virtual time: what rules and fixed trees would draft, accept and cost.

A draft pass takes one unit of time, and a pass of the target `ratio` units for few nodes. A target
in memory takes longer for each further node. A streamed target reads its weights meanwhile, and
takes longer only for trees of more than KNEE nodes.
"""

import heapq
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pace_traces import TOP_K, UNREAD, Trace

from outrider.models.decoding.growing_tree import GrowingTree
from outrider.models.decoding.growth import GrowthRule
from outrider.models.decoding.types import NO_NODE
from outrider.models.drafters.calibration import ScoreCalibration

MAX_NODES = 256
"""Most nodes that are verified."""
MAX_READS = 1024
"""Most nodes that a step reads: the room of the draft model's cache."""
STREAMED_RATIO = 30
"""Targets whose passes take more draft passes than this are streamed."""
KNEE = 64
NODES_PER_PASS = 32
"""Nodes that cost as much as a pass of a target in memory."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, TOP_K)
NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, MAX_NODES)
"""Depths, widths and numbers of nodes of fixed trees."""
Q_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Bounds of the bins of a reliability plot."""
WARM_STEPS = 50
"""Steps after which a calibration is judged."""


def pass_seconds(ratio: float, num_nodes: int) -> float:
    """Return the time of a pass of the target, in draft passes."""
    if ratio > STREAMED_RATIO:
        return ratio * max(1.0, (1 + num_nodes) / KNEE)
    return ratio * (1.0 + num_nodes / NODES_PER_PASS)


class Text:
    """A trace with distorted confidence: probability ** gamma."""

    def __init__(self, trace: Trace, gamma: float) -> None:
        self.num_tokens = trace.num_tokens
        self.first = trace.first.tolist()
        self.probs = (trace.probs.astype(float) ** gamma).tolist()
        self.contexts = trace.contexts.tolist()
        first = trace.first[: trace.num_tokens + 1]
        self.usual = (trace.probs[: first[-1]].reshape(-1, TOP_K).astype(float) ** gamma).mean(0).tolist()

    def children(self, context: int) -> list[tuple[float, int]]:
        """Return probability and context of the children; usual ones where the trace has none."""
        if context != UNREAD and (start := self.first[context]) < (end := self.first[context + 1]):
            return list(zip(self.probs[start:end], self.contexts[start:end], strict=True))
        return [(prob, UNREAD) for prob in self.usual]


class Growth:
    """A tree that grows from a position of a text. A node's token is its rank among its siblings."""

    def __init__(self, text: Text, position: int, calibration: ScoreCalibration | None) -> None:
        self.text, self.position, self.calibration = text, position, calibration
        self.tree = GrowingTree()
        self.scores: list[float] = []
        """The draft model's probability of each node after its parent."""
        self.contexts: list[int] = []
        self.path: list[int] = []
        """The nodes of the answer's next tokens."""
        self.num_read = 0

    def read(self, nodes: Sequence[int]) -> None:
        """Append the children of these nodes."""
        for parent in nodes:
            context, depth = self.position, 1
            if parent != NO_NODE:
                context, depth = self.contexts[parent], self.tree.depths[parent] + 1
                self.num_read += 1
                self.tree.mark_read(parent, self.num_read)
            scores, children = zip(*self.text.children(context), strict=True)
            if (following := self.position + depth) <= self.text.num_tokens and following in children:
                self.path.append(len(self.tree) + children.index(following))
            estimates = [self.calibration.estimate(depth, score) for score in scores] if self.calibration else scores
            self.tree.add(parent, range(len(scores)), estimates)
            self.scores += scores
            self.contexts += children

    def learn(self, accepted: Sequence[int]) -> None:
        """Let the calibration learn from the tokens that the target chose after the accepted path."""
        if self.calibration and self.position + len(accepted) < self.text.num_tokens:
            for end in (NO_NODE, *accepted):
                for node in self.tree.children(end):
                    self.calibration.add(self.tree.depths[node], self.scores[node], node in self.path)


@dataclass(slots=True)
class Outcome:
    """What decoding all texts took. Lists have a number for each text."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    drafts: int = 0
    nodes: int = 0
    errors: list[float] = field(default_factory=list)
    """Accepted draft tokens less expected ones, of steps that didn't end an answer."""
    bins: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(len(Q_BOUNDS) + 1)])
    """Number, sum of q, and accepted ones of the verified nodes, by q."""

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def judge(self, probs: Sequence[float], is_accepted: Sequence[bool]) -> None:
        """Compare the probabilities of verified nodes with what was accepted."""
        self.errors.append(sum(is_accepted) - sum(probs))
        if len(self.errors) > WARM_STEPS:
            for prob, accepted in zip(probs, is_accepted, strict=True):
                cell = self.bins[bisect(Q_BOUNDS, prob)]
                cell[:] = cell[0] + 1, cell[1] + prob, cell[2] + accepted


def replay(texts: Sequence[Text], rule: GrowthRule, ratio: float, *, calibrated: bool) -> Outcome:
    """Decode all texts by a rule."""
    outcome, calibration = Outcome(), ScoreCalibration() if calibrated else None
    for text in texts:
        position, total_seconds = 0, 0.0
        while position < text.num_tokens:
            # 1. Draft.
            growth, num_drafts = Growth(text, position, calibration), 0
            tree = growth.tree
            while growth.num_read < MAX_READS and (reads := rule.reads([tree]))[0]:
                growth.read(reads[0])
                rule.add_draft([tree], reads, 1.0)
                num_drafts += 1
            # 2. Verify.
            (sent,) = rule.sends([tree])
            verified = set(sent)
            accepted = [node for node in growth.path if node in verified]
            seconds = pass_seconds(ratio, len(sent))
            # 3. Learn.
            rule.add_step([tree], [sent], [accepted], float(num_drafts), seconds)
            growth.learn(accepted)
            position += 1 + len(accepted)
            total_seconds += num_drafts + seconds
            outcome.steps += 1
            outcome.drafts += num_drafts
            outcome.nodes += len(sent)
            if position < text.num_tokens:
                outcome.judge([tree.probs[node] for node in sent], [node in accepted for node in sent])
        outcome.tokens.append(text.num_tokens)
        outcome.seconds.append(total_seconds)
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A fixed tree: the likeliest `nodes` nodes of a search of `length` tokens and `width` paths."""

    length: int
    width: int
    nodes: int

    @property
    def described(self) -> dict[str, int]:
        return {"length": self.length, "top_k": self.width, "tree_nodes": self.nodes}


def fixed_settings() -> list[Fixed]:
    return [
        Fixed(length=length, width=width, nodes=nodes)
        for length in LENGTHS
        for width in WIDTHS
        for nodes in NODES
        if nodes <= length * width or nodes == next(other for other in NODES if other >= min(length * width, MAX_NODES))
    ]


def true_ranks(text: Text, position: int, width: int) -> dict[int, list[int]]:
    """Return, for each length, the rank of the nodes of the answer's next tokens in a search.

    So the likeliest n nodes accept as many tokens as there are ranks below n.
    """
    # 1. The search, level by level: the probability of each node's path.
    levels: list[list[float]] = []
    paths, ranks, truth = [(1.0, position)], {}, []
    for length in range(1, LENGTHS[-1] + 1):
        children = [(above * prob, child) for above, context in paths for prob, child in text.children(context)]
        paths = heapq.nlargest(width, children, key=lambda path: path[0])
        levels.append([prob for prob, _ in paths])
        truth += [prob for prob, child in paths if child == position + length and child <= text.num_tokens]
        # 2. The rank is the number of likelier nodes.
        if length in LENGTHS:
            ranks[length] = [sum(prob > true for level in levels for prob in level) for true in truth]
            # Deeper nodes are less likely than these paths: nothing changes any more.
            if len(truth) < length and (not truth or paths[0][0] < truth[-1]):
                for longer in LENGTHS:
                    ranks.setdefault(longer, ranks[length])
                break
    return ranks


def replay_fixed(texts: Sequence[Text], tick: Callable[[int], object] = lambda tokens: None) -> dict[Fixed, list[int]]:
    """Decode all texts with each fixed tree, and return the steps of each text."""
    outcomes: dict[Fixed, list[int]] = {setting: [] for setting in fixed_settings()}
    for text in texts:
        ranks = {width: [true_ranks(text, position, width) for position in range(text.num_tokens)] for width in WIDTHS}
        for setting, steps in outcomes.items():
            position, of_width = 0, ranks[setting.width]
            steps.append(0)
            while position < text.num_tokens:
                position += 1 + sum(rank < setting.nodes for rank in of_width[position][setting.length])
                steps[-1] += 1
        tick(text.num_tokens)
    return outcomes


def fixed_seconds(setting: Fixed, steps: Sequence[int], ratio: float) -> list[float]:
    """Return the time of each text with a fixed tree."""
    per_step = setting.length + pass_seconds(ratio, min(setting.nodes, setting.length * setting.width))
    return [count * per_step for count in steps]
