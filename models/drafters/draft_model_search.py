"""A draft model's search to a given depth, which begins anew at each step.

It calls `read(tree, num_read)` with the nodes so far, which reads the entries from `num_read` on and
returns their logits: entry 0 is the last token, and entry n + 1 is node n.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float

from ..decoding.sampling import Randomness, foreseen
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE
from .beams import SearchTree, likeliest_successors

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
