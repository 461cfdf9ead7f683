"""The window of a pipelined target: the draft tokens that it reads while more of them are drafted.

The window is a growing tree below the last committed token, the root. All of its nodes were sent:
they are in runs that are under way. When the oldest run is answered, the text goes on along the
accepted path to the bonus token, and the window is re-rooted there. If the bonus token was sent
already, that node is **adopted** as the new root, and everything below it stays under way.

    root a ─┬─ b ─── d ─── e        The run of a is answered: a's bonus token is b. So b is the new
            └─ c                    root, c is dead, and nothing is sent again.

**Why this is exact.**

*Order.* Every stage executes run 0, 1, 2, ... in this order. What a run drops and reads depends on
the run alone. So after each run, all stages hold what one process would hold that had executed the
same runs with the whole model, and an entry's logits are those of its path.

*Cancellation.* A node is dead if it isn't below the root. Nodes below a dead node are dead, and
those above a live node are live. A run is cancelled only if all its nodes are dead. So a live node
never attends to an entry whose run was skipped.

*Choice.* The acceptance rule decides on nodes with known logits, as in synchronous decoding. Greedy
choices and those of `RowSeeds` depend on the text and the seed alone. So the clock changes no token.

**The root is always unanswered.** A token becomes the root because the acceptance stopped there: its
logits weren't known. Answers come in the order of the runs, and a node is sent after its parent. So
an answer either has the root among its entries, or all of its entries are dead. Hence no logits are
kept between answers, and every live run adds at least one token to the text.

Pure data of one text, on the host.

**Runs** are passes of the target that are under way at the same time: while its last stage reads one
run, its first stage reads the next. Each run first drops entries of the window, then appends its own.

    window before      run                                        window after
    0 ── 1 ── 2        keep (0, 1, 2), of which 2 are committed   0 ── 1 ── 2
          └── 3        tokens of 2 new entries, num_read 1        (0 was entry 2)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from .growing_tree import GrowingTree
from .types import NO_NODE, TargetOutput

run_numbers = count()
"""Numbers of the runs of this process: no two runs share one, whichever target reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What happens to the window before a run is read. All other entries are dropped."""

    entries: tuple[int, ...]
    """Old entries in their new order: the committed ones, then those that stay in the window."""
    num_committed: int
    """How many of `entries`, from the first on, join the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRun:
    """One pass of the target over new entries of the window."""

    number: int
    """From `run_numbers`. A later run has a larger number, also over texts."""
    keep: Keep | None
    """None: the window stays as it is."""
    tokens: tuple[int, ...]
    """Tokens of the new entries. The first one is the root if `num_read` is 0."""
    parents: tuple[int, ...]
    """Parents of all nodes of the window, those of entries 1, 2, ..., after `keep`. They are
    indexes of nodes as in `DraftTree`: the parent of entry e + 1 is entry `parents[e] + 1`, and
    NO_NODE is the root."""
    num_read: int
    """Entries that earlier runs read, after `keep`. The new entries follow them."""

    def __post_init__(self) -> None:
        assert self.tokens
        assert 1 + len(self.parents) == self.num_read + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAnswer:
    """The target's answer to a run."""

    number: int
    """The run's number."""
    output: TargetOutput | None
    """Output of the run's new entries, [1, entry, ...]; None if the run was cancelled."""


DEAD = -2
"""In place of a node that isn't below the root any more."""


class Known(NamedTuple):
    """The live part of an answered run: the root and some nodes below it."""

    rows: list[int]
    """Which of the run's entries they are; the root's is the first."""
    tokens: list[int]
    """Tokens of the nodes, without the root."""
    parents: list[int]
    """Parent of each node, as a place among these nodes, or NO_NODE for the root."""


class Window:
    """The root, the nodes that were sent, and the runs that read them.

    Nodes of `tree` are in the order of their entries: node n is entry n + 1 of the target's window,
    after the keep of the next run. Entry 0 is the root.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.tree = GrowingTree()
        self.is_root_sent = False
        self.runs: dict[int, list[int]] = {}
        """The nodes of each live run under way: NO_NODE is the root, DEAD a dead node."""
        self._keep: Keep | None = None

    def __len__(self) -> int:
        """Return the number of nodes that were sent and are live."""
        return len(self.tree)

    # --- sending

    def unsent(self, drafts: GrowingTree, max_depth: int) -> Iterator[int]:
        """Yield the nodes of the drafter's tree that weren't sent, the likeliest first.

        A node comes after its parent. Only nodes up to `max_depth` tokens after the root are
        yielded.
        """
        sent = self.sent(drafts)
        probs, depths = drafts.probs, drafts.depths
        if max_depth < 1:
            return
        heap = [
            (-probs[child], child)
            for node in sent
            if node == NO_NODE or depths[node] < max_depth
            for child in drafts.children(node)
            if child not in sent
        ]
        heapify(heap)
        while heap:
            _, node = heappop(heap)
            yield node
            if depths[node] < max_depth:
                for child in drafts.children(node):
                    heappush(heap, (-probs[child], child))

    def send(self, drafts: GrowingTree | None = None, nodes: Sequence[int] = ()) -> DraftRun:
        """Return the next run: the root if it wasn't sent, then these nodes of the drafter's tree.

        Each node's parent was sent, or is among the nodes before it. None of them was sent.
        """
        num_read = 1 + len(self.tree) if self.is_root_sent else 0
        first = len(self.tree)
        # 1. Append the nodes to the window.
        if drafts is not None:
            places = self.sent(drafts)
            for node in nodes:
                place = places[drafts.parents[node]]
                assert node not in places, "the node was sent already"
                places[node] = len(self.tree)
                self.tree.add(place, [drafts.tokens[node]], [drafts.estimates[node]])
                self.tree.mark_read(places[node], 1 + places[node])
        # 2. Make a run of them. It carries what was committed since the last run.
        new = [*([] if self.is_root_sent else [NO_NODE]), *range(first, len(self.tree))]
        tokens = [self.root if node == NO_NODE else self.tree.tokens[node] for node in new]
        keep, self._keep, self.is_root_sent = self._keep, None, True
        run = DraftRun(
            number=next(run_numbers), keep=keep, tokens=tuple(tokens), parents=tuple(self.tree.parents), num_read=num_read
        )
        self.runs[run.number] = new
        return run

    def sent(self, drafts: GrowingTree) -> dict[int, int]:
        """Return the drafter's nodes that were sent, NO_NODE first, with their nodes here."""
        places = {NO_NODE: NO_NODE}
        above = [NO_NODE]
        while above:
            node = above.pop()
            if siblings := self.tree.children(places[node]):
                sent = {self.tree.tokens[place]: place for place in siblings}
                for child in drafts.children(node):
                    if (place := sent.get(drafts.tokens[child])) is not None:
                        places[child] = place
                        above.append(child)
        return places

    # --- answers

    def learn(self, number: int) -> Known | None:
        """Return what is known by a run's answer; None if all its entries are dead."""
        nodes = self.runs.pop(number, None)
        if nodes is None:
            return None
        assert NO_NODE in nodes, "a run with live entries was answered before the root's"
        # The root first: an adopted root may come after dead nodes.
        rows = [row for row, node in enumerate(nodes) if node != DEAD]
        live = [nodes[row] for row in rows]
        assert live[0] == NO_NODE
        return Known(rows, *self.tree.links(live[1:]))

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Commit the accepted draft tokens and move the root to the bonus token after them.

        Returns the numbers of runs whose entries are all dead now.
        """
        *_, self.root = tokens
        rerooted = self.tree.rerooted(tokens)
        # 1. The bonus token is under way: adopt it. Otherwise all nodes are dead, and the root is
        # to be sent.
        if rerooted is not None:
            places = {node: place for place, node in enumerate(rerooted.nodes)}
            places[self.tree.follow(tokens)[-1]] = NO_NODE
            keep = Keep(entries=(0, *rerooted.path, *rerooted.entries), num_committed=1 + len(rerooted.path))
            self.tree = rerooted.tree
        else:
            path = self.tree.follow(tokens)
            assert len(path) == len(tokens) - 1
            places = {}
            keep = Keep(entries=(0, *(self.tree.cache_entries[node] for node in path)), num_committed=1 + len(path))
            self.tree, self.is_root_sent = GrowingTree(), False
        self._keep = keep if self._keep is None else after(self._keep, keep)
        # 2. Renumber the nodes of the runs, and forget runs without a live node.
        for number, nodes in self.runs.items():
            self.runs[number] = [places.get(node, DEAD) for node in nodes]
        dead = [number for number, nodes in self.runs.items() if all(node == DEAD for node in nodes)]
        for number in dead:
            del self.runs[number]
        return dead


def after(first: Keep, second: Keep) -> Keep:
    """Return the keep that does the same as two, one after the other.

    Worked example: the first keeps entries 0 2 5 7 and commits one of them. In the window of 2 5 7
    the second keeps 0 2 and commits one. Together they keep 0 2 7 and commit 0 and 2.
    """
    committed, window = first.entries[: first.num_committed], first.entries[first.num_committed :]
    entries = (*committed, *(window[entry] for entry in second.entries))
    return Keep(entries=entries, num_committed=first.num_committed + second.num_committed)
