"""Policies of pipelined speculation: which draft tokens are sent, in which runs, and when.

They see probabilities, and the seconds between a run and its answer. They change the speed, never a
token.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from .growing_tree import GrowingTree
from .pacing import Seconds, interpolated
from .types import NO_NODE
from .window import DraftRun, Window

MAX_NODES = 64
"""Most nodes of a window."""
MOST_TRIALS = 4
"""How often a size of runs is tried until one of them is answered behind its root."""
REVISIT_ROOTS = 16
"""After so many roots a size next to the best one is measured again."""
MEMORY = 0.98
"""Weight of the roots before the last one in the mean number of tokens from root to root."""


@runtime_checkable
class Speculation(Protocol):
    """Decides what runs are made of. An instance may serve several texts, one after the other."""

    @property
    def max_nodes(self) -> int:
        """Most nodes of the window. The target's KV cache keeps room for them."""

    @property
    def max_runs(self) -> int | None:
        """Most live runs under way (back-pressure); None: as many as the target has use for."""

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        """Return the nodes of the drafter's tree to send now as a run.

        Without nodes it is worth drafting on. None: it isn't, until the next answer. `has_more` is
        False if the drafter has nothing more to draft. Otherwise it next appends children of its
        likeliest leaf. Nodes deeper than `max_depth` are useless.
        """

    def add_run(self, run: DraftRun) -> None:
        """Learn that a run was sent."""

    def add_answer(self, number: int, num_tokens: int) -> None:
        """Learn that a run was answered, and how many tokens it added: none if it was dead."""


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
        max_nodes: int = MAX_NODES,
        max_runs: int | None = None,
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1 draft token")
        self.micro_batch, self.cutoff, self.recovery, self.decay = micro_batch, cutoff, recovery, decay
        self.max_nodes, self.max_runs = max_nodes, max_runs
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


class ExpectedSpeculation:
    """The likeliest unsent nodes, in runs of the size that takes least time from root to root.

    A new root enters alone. The runs behind it are of one size m, until the next root. A larger run
    takes longer in every stage, so its answer comes a gap F(m) after the root's. After it the runs
    come every I(m) seconds. If a token is right with probability a, the root's answer is followed by

        a F(m) + (a^(1 + m) + a^(1 + 2 m) + ...) I(m)

    seconds of waiting on average, before the next root. F and I are running medians of the gaps
    between answers, interpolated where a size has none. 1 / (1 - a) is the mean number of tokens
    from root to root.

    Nodes below `least_prob` aren't sent. Unlikely nodes cost little: they come last, and
    cancellations stop them early.
    """

    def __init__(
        self,
        *,
        micro_batch: int = 4,
        least_prob: float = 0.02,
        max_nodes: int = MAX_NODES,
        max_runs: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1 draft token")
        self.micro_batch, self.least_prob, self.clock = micro_batch, least_prob, clock
        self.max_nodes, self.max_runs = max_nodes, max_runs
        self.size = 1
        """Nodes of a run, for the present root."""
        self._num_roots, self._num_trials = 0, [0] * (1 + micro_batch)
        self._gaps: tuple[dict[int, Seconds], dict[int, Seconds]] = {}, {}
        """F and I by the number of nodes of a run."""
        self._tokens = self._roots = 0.0
        self._sent: dict[int, tuple[float, int]] = {}
        """When each live run was sent, and how many nodes it has; 0 for a new root."""
        self._last = 0.0, 0
        """When the last live run was answered, and how many nodes it had."""

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        size = min(self.size, self.max_nodes - len(window))
        nodes: list[int] = []
        # The likeliest leaf that was sent or is chosen: the drafter may append its children.
        leaf = best_leaf(drafts, window.sent(drafts), max_depth) if has_more else 0.0
        for node in window.unsent(drafts, max_depth):
            if len(nodes) == size or drafts.probs[node] < max(self.least_prob, leaf):
                break
            nodes.append(node)
            if has_more:
                leaf = max(leaf, best_leaf(drafts, [node], max_depth))
        # A child is at most as likely as its parent.
        is_all = len(nodes) == size or leaf < self.least_prob
        return (nodes or None) if is_all else ()

    def add_run(self, run: DraftRun) -> None:
        is_root = run.num_read == 0
        if is_root:  # all runs before it are dead
            self._sent = {}
            self._roots = MEMORY * self._roots + 1
            self._tokens *= MEMORY
            self.size = self._next_size()
        self._sent[run.number] = self.clock(), 0 if is_root else len(run.tokens)

    def add_answer(self, number: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        sent, size = self._sent.pop(number)
        now, (last, last_size) = self.clock(), self._last
        self._last = now, size
        self._tokens += num_tokens
        # The gap is the pipeline's if the run was under way when the last one was answered.
        if size and sent < last and last_size in (0, size):
            self._gaps[last_size > 0].setdefault(size, Seconds()).add(now - last)

    def _next_size(self) -> int:
        """Return the size of the runs behind the next root: mostly the best one."""
        self._num_roots += 1
        # A size that wasn't measured comes first. It may be never, where drafts are never right.
        for size in range(1, 1 + self.micro_batch):
            if size not in self._gaps[0] and self._num_trials[size] < MOST_TRIALS:
                self._num_trials[size] += 1
                return size
        size = self._best_size()
        visit, is_usual = divmod(self._num_roots, REVISIT_ROOTS)
        if not is_usual:
            size += 1 if visit % 2 else -1
        return min(max(size, 1), self.micro_batch)

    def _best_size(self) -> int:
        """Return the size of least waiting from root to root."""
        if not all(self._gaps):
            return 1
        points = ([(size, gap.median) for size, gap in sorted(gaps.items())] for gaps in self._gaps)
        first, later = (interpolated(gaps, 1 + self.micro_batch) for gaps in points)
        right = 1.0 - self._roots / max(self._tokens, self._roots)

        def seconds(size: int) -> float:
            return right * first[size] + right ** (1 + size) / (1.0 - right**size) * later[size]

        return min(range(1, 1 + self.micro_batch), key=seconds)


def best_leaf(drafts: GrowingTree, nodes: Iterable[int], max_depth: int) -> float:
    """Return the greatest probability of those nodes that have no child yet; 0 if all have one."""
    leaves = [node for node in nodes if not drafts.children(node)]
    if NO_NODE in leaves:
        return 1.0 if max_depth else 0.0
    return max((drafts.probs[node] for node in leaves if drafts.depths[node] < max_depth), default=0.0)
