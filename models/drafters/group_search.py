"""Search by groups of siblings: the most probable nodes of a depth get children (arXiv 2406.16858, section 4.1)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int

from ..decoding.types import NO_NODE
from .beams import SearchTree


class GroupSearch:
    """Search that expands some nodes of each depth into groups of children.

    Groups are numbered as they are added. All have the same number of children, and the children of
    group g are the nodes from g times this number on.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        # The nodes to expand, and the log-probabilities of their paths: at first the root.
        self._scores = torch.zeros(batch, 1, device=device)
        self._nodes = torch.full_like(self._scores, NO_NODE, dtype=torch.long)
        self._levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._width = 0

    @property
    def depth(self) -> int:
        """Number of depths that have nodes."""
        return len(self._levels)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return tuple(tokens.shape[1] for tokens, _, _ in self._levels)

    def add(self, tokens: Int[torch.Tensor, "batch node child"], log_probs: Float[torch.Tensor, "batch node child"]) -> None:
        """Add the children of the nodes to expand; log-probabilities are at most 0."""
        self._width = tokens.shape[2]
        parents = self._nodes.repeat_interleave(self._width, dim=1)
        self._levels.append((tokens.flatten(1), parents, (self._scores[..., None] + log_probs).flatten(1)))

    def expand(self, count: int) -> tuple[Int[torch.Tensor, "batch chosen"], Int[torch.Tensor, "batch chosen"]]:
        """Choose the most probable nodes of the last depth, to be expanded next.

        Returns their tokens, and the place of each node's parent among the nodes that were expanded
        before.
        """
        tokens, _, candidates = self._levels[-1]
        # A stable sort, unlike `topk`, takes the first of equal scores on every device.
        chosen = candidates.sort(dim=1, descending=True, stable=True).indices[:, :count]
        self._scores = candidates.gather(1, chosen)
        self._nodes = sum(self.level_sizes[:-1]) + chosen
        return tokens.gather(1, chosen), chosen // self._width

    def tree(self) -> SearchTree:
        """Return all nodes."""
        return SearchTree.of(self._levels)


def level_sizes(num_children: int, top_k: int, depth: int) -> Sequence[int]:
    """Return the number of nodes of each depth, where `top_k` nodes of a depth are expanded."""
    sizes = [num_children]
    while len(sizes) < depth:
        sizes.append(num_children * min(top_k, sizes[-1]))
    return sizes
