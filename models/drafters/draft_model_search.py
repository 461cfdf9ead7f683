"""A draft model's searches to a given depth, which begin anew at each step: likeliest and drawn trees.

Both call `read(tree, num_read)` with the nodes so far. It reads the entries from `num_read` on and
returns their logits: entry 0 is the last token, and entry n + 1 is node n.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float

from ..decoding.sampling import Randomness, foreseen
from ..decoding.tree import DraftTree, empty_tree
from ..decoding.types import NO_NODE
from .beams import SearchTree, likeliest_successors
from .group_search import GroupDrawing, GroupSearch

Read = Callable[[DraftTree, int], torch.Tensor]


def search_tree(
    logits: Float[torch.Tensor, "batch 1 vocab"], read: Read, *, width: int, depth: int, generator: Randomness = None
) -> SearchTree:
    """Search for the `width` most probable continuations of each depth; all but the last are read.

    `logits` are those after the last committed token.
    """
    scores = torch.zeros(logits.shape[:2], device=logits.device)  # log-probability of each path
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    first = NO_NODE  # the first of the nodes at the ends of the paths; the others follow it
    while True:
        # 1. Extend each path by its most probable tokens, and keep the most probable paths.
        logits = foreseen(logits, range(len(levels), len(levels) + 1), generator)
        tokens, path, next_scores = likeliest_successors(logits, scores, width)
        levels.append((tokens, path + first, next_scores))
        first, scores = first + scores.shape[1], next_scores
        search = SearchTree.of(levels)
        if len(levels) == depth:
            entries = torch.arange(1, search.tokens.shape[1] + 1, device=tokens.device).expand_as(search.tokens)
            return replace(search, entries=entries)
        # 2. Read the new nodes.
        logits = read(DraftTree(tokens=search.tokens, parents=search.parents, max_depth=len(levels)), 1 + first)


def draw_tree(
    drawing: GroupDrawing,
    logits: Float[torch.Tensor, "batch 1 vocab"],
    read: Read,
    *,
    top_k: int,
    depth: int,
    num_groups: int,
) -> SearchTree:
    """Draw groups below the `top_k` most probable nodes of each depth, of which `num_groups` are to stay.

    `logits` are those after the last committed token. Only nodes that get children are read.
    """
    search, tree = GroupSearch(len(logits), logits.device), empty_tree(len(logits), logits.device)
    expanded, first, width = tree.tokens, NO_NODE, 1  # `first`: the first of the nodes read last
    while True:
        # 1. Draw the children of the nodes read last, at first of the last token.
        search.add(*drawing.children(logits))
        if search.depth == min(depth, num_groups):  # a deeper node has no room
            break
        # 2. Read the most probable ones.
        tokens, nodes, parent = search.expand(top_k)
        num_read = 1 + tree.num_nodes
        tree = DraftTree(
            tokens=torch.cat([tree.tokens, tokens], dim=1),
            parents=torch.cat([tree.parents, first + parent], dim=1),
            max_depth=search.depth,
        )
        expanded, first, width = torch.cat([expanded, nodes], dim=1), first + width, tokens.shape[1]
        logits = read(tree, num_read)
    # 3. Find the entries of the nodes that were read.
    found = drawing.drawn(search.tree())
    entries = torch.arange(1, tree.num_nodes + 1, device=expanded.device).expand_as(expanded)
    return replace(found, entries=torch.zeros_like(found.tokens).scatter(1, expanded, entries))
