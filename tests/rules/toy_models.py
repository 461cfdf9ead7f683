"""Toy models, so small that every text, tree and outcome can be enumerated.

Acceptance rules are enumerated on them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch.nn.functional import pad

from outrider.models.decoding.sampling import Randomness, Sampling, draw, draw_several, warp
from outrider.models.decoding.tree import DraftTree, Drawn
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


def adversarial_drafters(target: Tables, seed: int) -> dict[str, Tables]:
    """Build drafters that expose wrong rules; each is a toy model too."""
    noise = random_tables(target[0].shape[-1], len(target), seed)
    return {
        "unrelated": noise,
        "equal": target,
        "near-tied": [table + 1e-9 * other for table, other in zip(target, noise, strict=True)],
        "uniform": [torch.zeros_like(table) for table in target],
        "confidently wrong": [-6 * table for table in target],
        "too sure": [6 * table for table in target],
    }


def joint(tables: Tables, sampling: Sampling, length: int) -> Float[torch.Tensor, "..."]:
    """Compute the distribution of the first `length` tokens, of shape [vocab] * length."""
    result = torch.ones((), dtype=torch.float64)
    for table in tables[:length]:
        result = result[..., None] * warp(table, sampling)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Shape of a tree (`parents`), and how its tokens are chosen (`drawing`).

    `drawing` is `beam` (the likeliest children, a function of the text), `distinct` (siblings
    sampled without replacement) or `independent` (sampled with replacement, so that siblings may be
    equal).
    """

    parents: tuple[int, ...]
    drawing: str

    @property
    def depth(self) -> int:
        return max((len(self.path(node)) for node in range(len(self.parents))), default=0)

    @property
    def half(self) -> "TreeShape":
        """The shape of the first half of the nodes; in a batch with the whole shape its rows are
        padded."""
        return TreeShape(parents=self.parents[: len(self.parents) // 2], drawing=self.drawing)

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


def make_trees(
    shapes: Sequence[TreeShape], tokens: Sequence[Int[torch.Tensor, "_ _"]], drafter: Tables, sampling: Sampling
) -> DraftTree:
    """Build one batch of trees of several shapes, with one way of drawing.

    `tokens[i]` has the tokens of shape i, one row for each tree.
    """
    num_nodes = max(len(shape.parents) for shape in shapes)
    parents = [torch.tensor(shape.parents).long().expand(len(rows), -1) for shape, rows in zip(shapes, tokens, strict=True)]
    drawn = None
    if shapes[0].drawing != "beam":
        logits = [after_nodes(drafter, shape, rows, num_nodes) for shape, rows in zip(shapes, tokens, strict=True)]
        drawn = Drawn(
            probs=warp(torch.cat(logits), sampling),
            with_replacement=shapes[0].drawing == "independent",
            max_children=max(len(shape.siblings(node)) + 1 for shape in shapes for node in range(len(shape.parents))),
        )
    padded_tokens, padded_parents = (
        torch.cat([pad(rows, (0, num_nodes - rows.shape[1]), value=NO_NODE) for rows in values]) for values in (tokens, parents)
    )
    depth = max(shape.depth for shape in shapes)
    return DraftTree(tokens=padded_tokens, parents=padded_parents, max_depth=depth, drawn=drawn)


def all_tokens(
    shape: TreeShape, drafter: Tables, sampling: Sampling
) -> tuple[Int[torch.Tensor, "tree node"], Float[torch.Tensor, " tree"]]:
    """Enumerate the tokens of all possible trees of a shape, with probabilities."""
    vocab = drafter[0].shape[-1]
    if shape.drawing == "beam":
        return beam_tokens(shape, drafter), torch.ones(1, dtype=torch.float64)
    tokens = torch.tensor(list(itertools.product(range(vocab), repeat=len(shape.parents)))).long()
    weight = torch.ones(len(tokens), dtype=torch.float64)
    for node, parent in enumerate(shape.parents):
        probs = warp(_after_path(drafter, shape, tokens, parent), sampling)
        if shape.drawing == "distinct":
            for elder in shape.siblings(node):
                probs = probs.scatter(1, tokens[:, elder, None], 0.0)
            # If no token is left, the tree still needs one at this node: use token 0, whose draft
            # probability is 0.
            left = probs.sum(1, keepdim=True)
            probs = torch.where(left > 0, probs / left, torch.eye(vocab, dtype=probs.dtype)[:1])
        weight = weight * probs.gather(1, tokens[:, node, None])[:, 0]
    possible = weight > 0
    return tokens[possible], weight[possible]


def drawn_tokens(
    shape: TreeShape, drafter: Tables, sampling: Sampling, num_samples: int, generator: Randomness
) -> Int[torch.Tensor, "tree node"]:
    """Sample the tokens of trees as a drafter does."""
    if shape.drawing == "beam":
        return beam_tokens(shape, drafter).expand(num_samples, -1)
    tokens = torch.zeros(num_samples, len(shape.parents), dtype=torch.long)
    for node, parent in enumerate(shape.parents):
        family = [other for other, other_parent in enumerate(shape.parents) if other_parent == parent]
        if family[0] != node:
            continue  # sampled together with the first sibling
        probs = warp(_after_path(drafter, shape, tokens, parent), sampling)
        if shape.drawing == "distinct":
            tokens[:, family] = draw_several(probs, len(family), generator)
        else:
            tokens[:, family] = draw(probs[:, None].expand(-1, len(family), -1), generator)
    return tokens


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
