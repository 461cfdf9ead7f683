"""Toy models, so small that every text, tree and outcome can be enumerated.

Acceptance rules are enumerated on them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from outrider.models.decoding.sampling import Sampling, warp
from outrider.models.decoding.tree import DraftTree
from outrider.models.decoding.types import NO_NODE

Tables = list[Float[torch.Tensor, "..."]]
"""Logits of a toy model in float64. Entry k, of shape [vocab] * (k + 1), has the logits after every
text of k tokens."""


def random_tables(vocab: int, length: int, seed: int, spread: float = 1.5) -> Tables:
    """Sample a toy model for texts of up to `length` tokens.

    A larger spread gives more certain predictions.
    """
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn([vocab] * (size + 1), generator=generator, dtype=torch.float64) for size in range(length)]


def joint(tables: Tables, sampling: Sampling, length: int) -> Float[torch.Tensor, "..."]:
    """Compute the distribution of the first `length` tokens, of shape [vocab] * length."""
    result = torch.ones((), dtype=torch.float64)
    for table in tables[:length]:
        result = result[..., None] * warp(table, sampling)
    return result


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of a tree."""

    parents: tuple[int, ...]

    @property
    def depth(self) -> int:
        return max((len(self.path(node)) for node in range(len(self.parents))), default=0)

    @property
    def half(self) -> "TreeShape":
        """The shape of the first half of the nodes; in a batch with the whole shape its rows are
        padded."""
        return TreeShape(self.parents[: len(self.parents) // 2])

    def path(self, node: int) -> list[int]:
        """List the nodes from the root's child to `node`."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def siblings(self, node: int) -> list[int]:
        """List the siblings before `node`."""
        return [other for other in range(node) if self.parents[other] == self.parents[node]]


def after_nodes(
    tables: Tables, shape: TreeShape, tokens: Int[torch.Tensor, "tree node"], num_nodes: int
) -> Float[torch.Tensor, "tree entry vocab"]:
    """Collect a toy model's logits at each entry of trees padded to `num_nodes`.

    Padding has the logits of entry 0; they are not used.
    """
    nodes = [node if node < len(shape.parents) else -1 for node in range(-1, num_nodes)]
    return torch.stack([_after_path(tables, shape, tokens, node) for node in nodes], dim=1)


def make_trees(shapes: Sequence[TreeShape], tokens: Sequence[Int[torch.Tensor, "_ _"]]) -> DraftTree:
    """Build one batch of trees of several shapes; `tokens[i]` has a row for each tree of shape i."""
    num_nodes = max(len(shape.parents) for shape in shapes)
    parents = [torch.tensor(shape.parents).long().expand(len(rows), -1) for shape, rows in zip(shapes, tokens, strict=True)]
    padded_tokens, padded_parents = (
        torch.cat([pad(rows, (0, num_nodes - rows.shape[1]), value=NO_NODE) for rows in values]) for values in (tokens, parents)
    )
    return DraftTree(tokens=padded_tokens, parents=padded_parents, max_depth=max(shape.depth for shape in shapes))


def all_tokens(shape: TreeShape, vocab: int) -> Int[torch.Tensor, "tree node"]:
    """Return the tokens of every tree of a shape whose siblings differ."""
    tokens = torch.tensor(list(itertools.product(range(vocab), repeat=len(shape.parents)))).long()
    differ = torch.ones(len(tokens), dtype=torch.bool)
    for node in range(len(shape.parents)):
        for elder in shape.siblings(node):
            differ &= tokens[:, node] != tokens[:, elder]
    return tokens[differ]


def beam_tokens(shape: TreeShape, drafter: Tables) -> Int[torch.Tensor, "1 node"]:
    """Select the likeliest children of every node."""
    tokens = torch.zeros(1, len(shape.parents), dtype=torch.long)
    for node, parent in enumerate(shape.parents):
        logits = _after_path(drafter, shape, tokens, parent)
        tokens[:, node] = logits.sort(dim=-1, descending=True, stable=True).indices[:, len(shape.siblings(node))]
    return tokens


def _after_path(
    tables: Tables, shape: TreeShape, tokens: Int[torch.Tensor, "tree node"], node: int
) -> Float[torch.Tensor, "tree vocab"]:
    """Look up a toy model's logits after the path to `node`, in every tree.

    `node` -1 stands for the text itself.
    """
    path = shape.path(node)
    if len(path) >= len(tables):
        raise ValueError(
            f"the toy model has texts of up to {len(tables) - 1} tokens, but the tree is {len(path)} deep; give more tables"
        )
    return tables[len(path)][tuple(tokens[:, earlier] for earlier in path)].expand(len(tokens), -1)
