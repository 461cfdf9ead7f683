"""Paths of trees on the host."""

from typing import Any

from outrider.models.decoding.types import NO_NODE


def path_to(tree: Any, node: int) -> list[int]:
    """Return the tokens from the root to a node; `tree` has lists of tokens and parents."""
    path: list[int] = []
    while node != NO_NODE:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return path
