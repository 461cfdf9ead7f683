"""A draft tree that grows: the likeliest nodes are read and get children, and it outlives a step.

    last token ─┬─ 0* ─┬─ 2*  ─── 4       A star marks nodes that the drafter has read: their keys
                └─ 1   └─ 3               and values are entries of its cache.

When the target has accepted node 0 and chosen the token of node 2 as bonus token, all below node 2
is still a draft: the tree is re-rooted there, and grows on.

    last token ─── 0                      formerly nodes 2 and 4

Nodes may also be read and get children while the target verifies a tree that was made of some of them
before. Pure data of one row, on the host.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .types import NO_NODE

UNREAD = -1
"""Entry of a node that hasn't been read."""


class GrowingTree:
    """Draft tokens below the last committed token, the root. Nodes are only appended.

    A parent comes before its children; siblings are different tokens. Entry 0 of the drafter's cache
    after the text is the root's.
    """

    __slots__ = ("_children", "cache_entries", "depths", "estimates", "parents", "probs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        """Parent of each node, or NO_NODE for a child of the root."""
        self.depths: list[int] = []
        """1 for a child of the root."""
        self.estimates: list[float] = []
        """Probability that a node is accepted if its parent is."""
        self.probs: list[float] = []
        """q of each node: the probability that it is accepted. It never rises along a path."""
        self.cache_entries: list[int] = []
        """Entry of each node's keys and values in the cache after the text, or UNREAD."""
        self._children: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Iterable[int], estimates: Iterable[float]) -> None:
        """Append children of a node, or of the root (NO_NODE).

        `estimates` are the probabilities that they are accepted if the parent is.
        """
        depth, prob = (1, 1.0) if parent == NO_NODE else (self.depths[parent] + 1, self.probs[parent])
        siblings = self._children.setdefault(parent, [])
        for token, estimate in zip(tokens, estimates, strict=True):
            node = len(self.tokens)
            siblings.append(node)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
            self.estimates.append(estimate)
            self.probs.append(prob * estimate)
            self.cache_entries.append(UNREAD)

    def mark_read(self, node: int, entry: int) -> None:
        """Note a node's entry in the cache. Its parent must have been read."""
        assert self.cache_entries[node] == UNREAD, "a node is read once"
        self.cache_entries[node] = entry

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node, or of the root (NO_NODE)."""
        return self._children.get(node, ())

    def links(self, nodes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of some nodes, and their parents as places among these nodes.

        A node's parent must come before it.
        """
        tokens, parents, places = [], [], {NO_NODE: NO_NODE}
        for place, node in enumerate(nodes):
            tokens.append(self.tokens[node])
            parents.append(places[self.parents[node]])
            places[node] = place
        return tokens, parents

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes of the longest prefix of these tokens that is a path from the root."""
        path: list[int] = []
        for token in tokens:
            above = path[-1] if path else NO_NODE
            node = next((child for child in self.children(above) if self.tokens[child] == token), None)
            if node is None:
                break
            path.append(node)
        return path

    def rerooted(self, tokens: Sequence[int]) -> "Rerooted | None":
        """Return the tree below these committed tokens; None unless they lead to a read node."""
        path = self.follow(tokens)
        if len(path) < len(tokens) or (path and self.cache_entries[path[-1]] == UNREAD):
            return None
        root = path[-1] if path else NO_NODE
        # 1. The nodes below, which ascend, and their numbers.
        kept: list[int] = []
        numbers = {root: NO_NODE}
        for node in range(root + 1, len(self)):
            if self.parents[node] in numbers:
                numbers[node] = len(kept)
                kept.append(node)
        # 2. The entries that stay: the new root's, then those of read nodes, in the cache's order.
        old = sorted(self.cache_entries[node] for node in kept if self.cache_entries[node] != UNREAD)
        entries = {UNREAD: UNREAD} | {entry: place for place, entry in enumerate(old, 1)}
        # 3. Append them to a new tree.
        tree = GrowingTree()
        for node in kept:
            tree.add(numbers[self.parents[node]], [self.tokens[node]], [self.estimates[node]])
            if self.cache_entries[node] != UNREAD:
                tree.mark_read(numbers[node], entries[self.cache_entries[node]])
        first = 0 if root == NO_NODE else self.cache_entries[root]
        return Rerooted(tree=tree, nodes=kept, path=[self.cache_entries[node] for node in path[:-1]], entries=[first, *old])


class Rerooted(NamedTuple):
    """A tree that a step has left, and where it comes from."""

    tree: GrowingTree
    nodes: list[int]
    """The former number of each node."""
    path: list[int]
    """The former entries of the committed tokens above the new root, without the old root's."""
    entries: list[int]
    """The former entries of the new root and of the nodes that were read, in their new order."""
