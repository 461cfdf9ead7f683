"""Policy of pipelined speculation: which draft tokens are sent, in which runs, and when.

It sees probabilities, and measures the seconds between answers. It changes the speed, never a
token: `window` has the reasons, which hold for every `Speculation`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from .costs import Seconds, interpolated
from .growing_tree import GrowingTree
from .types import NO_NODE
from .window import DraftRun, Window

MAX_NODES = 64
"""Most nodes of a window."""
MOST_TRIALS = 4
"""For how many new roots a size m of runs is tried without measuring F(m)."""
REVISIT_ROOTS = 16
"""After so many new roots a size next to the best one is measured again."""
MEMORY = 0.98
"""Factor of all earlier roots at each new one, in the mean number of tokens from root to root."""


@runtime_checkable
class Speculation(Protocol):
    """Decides what runs are made of. An instance may serve several texts, one after the other."""

    max_nodes: int
    """Most nodes of the window. The target's KV cache keeps room for them."""

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        """Return the nodes of the drafter's tree to send now as a run.

        An empty sequence: send nothing yet, and draft further. None: neither send nor draft until
        the next answer. `has_more` is False if the drafter has nothing more to draft. Otherwise it
        next appends children of its likeliest leaf. Nodes deeper than `max_depth` are useless.
        """

    def add_run(self, run: DraftRun) -> None:
        """Learn that a run was sent."""

    def add_answer(self, number: int, num_tokens: int) -> None:
        """Learn that a run was answered, and how many tokens it added: none if it was dead."""


class ExpectedSpeculation:
    """The likeliest unsent nodes, in runs of the size that takes least time from root to root.

    A new root is a bonus token that wasn't sent as a draft, so all that is under way is dead. It
    enters alone. The runs behind it are of one size m, until the next new root. A larger run takes
    longer in every stage, so its answer comes a gap F(m) after the root's. After it the runs come
    every I(m) seconds. If a token is right with probability a, the root's answer is followed by

        a F(m) + (a^(1 + m) + a^(1 + 2 m) + ...) I(m)

    seconds of waiting on average, before the next new root. F and I are running medians of the gaps
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1 draft token")
        self.micro_batch, self.least_prob, self.clock = micro_batch, least_prob, clock
        self.max_nodes = max_nodes
        self.size = 1
        """Nodes of a run, for the present root."""
        self._num_roots, self._num_trials = 0, [0] * (1 + micro_batch)
        """New roots so far, and for how many of them each size was tried."""
        self._gaps: tuple[dict[int, Seconds], dict[int, Seconds]] = {}, {}
        """F and I by the number of nodes of a run."""
        self._tokens = self._roots = 0.0
        """Sums of the tokens and of the new roots so far, in which earlier ones count less."""
        self._sent: dict[int, tuple[float, int]] = {}
        """When each live run was sent, and how many nodes it has; 0 for a new root."""
        self._last = 0.0, 0
        """When the last live run was answered, and how many nodes it had."""

    def choose(self, window: Window, drafts: GrowingTree, *, max_depth: int, has_more: bool) -> Sequence[int] | None:
        size = min(self.size, self.max_nodes - len(window))
        nodes: list[int] = []
        # The likeliest leaf that was sent or is chosen. The drafter next appends its children, which
        # may be as likely as the leaf. So nodes that are less likely than the leaf wait.
        leaf = best_leaf(drafts, window.sent(drafts), max_depth) if has_more else 0.0
        for node in window.unsent(drafts, max_depth):
            if len(nodes) == size or drafts.probs[node] < max(self.least_prob, leaf):
                break
            nodes.append(node)
            if has_more:
                leaf = max(leaf, best_leaf(drafts, [node], max_depth))
        # Send a run that is full, or that no further draft can join: a child is at most as likely as
        # its parent.
        is_whole = len(nodes) == size or leaf < self.least_prob
        return (nodes or None) if is_whole else ()

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
        """Return the size of the runs behind a new root: mostly the best one."""
        self._num_roots += 1
        # A size whose F isn't measured comes first. It may never be, where drafts are never right.
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
        """Return the size of least waiting from root to root: see the class."""
        if not all(self._gaps):
            return 1
        points = ([(size, gap.median) for size, gap in sorted(gaps.items())] for gaps in self._gaps)
        first, later = (interpolated(gaps, 1 + self.micro_batch) for gaps in points)
        right = 1.0 - self._roots / max(self._tokens, self._roots)

        def seconds(size: int) -> float:
            return right * first[size] + right ** (1 + size) / (1.0 - right**size) * later[size]

        return min(range(1, 1 + self.micro_batch), key=seconds)


def best_leaf(drafts: GrowingTree, nodes: Iterable[int], max_depth: int) -> float:
    """Return the greatest probability of those nodes that have no child yet; 0 if all have one.

    Children of a node at `max_depth` would be useless, so such nodes don't count.
    """
    leaves = [node for node in nodes if not drafts.children(node)]
    if NO_NODE in leaves:
        return 1.0 if max_depth else 0.0
    return max((drafts.probs[node] for node in leaves if drafts.depths[node] < max_depth), default=0.0)
