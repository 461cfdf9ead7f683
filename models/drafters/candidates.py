"""Draft tokens on the host: of training-free drafters, of merged trees, and of a model's growing tree."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import torch
from jaxtyping import Float

from ...data.bundles import move_to
from ..decoding.growing_tree import GrowingTree
from ..decoding.growth import LEAST_PROB
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE
from .beams import largest
from .calibration import ScoreCalibration
from .vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Draft tokens of one row. A parent comes before its children; siblings are different tokens."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """Index of each node's parent, or NO_NODE for a child of the last committed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(Nodes):
    """Candidates for the draft tree of one row, by one drafter: nodes, and how likely they are."""

    scores: Sequence[float]
    """The drafter's estimate that a candidate is accepted if its parent is, between 0 and 1."""
    bins: Sequence[int]
    """The drafter's evidence for each candidate, as a number below its `num_bins`. Candidates of
    one bin are about as likely to be accepted: calibration counts by bin."""


NO_CANDIDATES = Candidates(tokens=(), parents=(), scores=(), bins=())


def tree_of(
    rows: Sequence[Nodes],
    device: torch.device,
    *,
    num_nodes: int | None = None,
    max_depth: int | None = None,
    origins: tuple[tuple[int, ...], ...] | None = None,
) -> DraftTree:
    """Return the tree of each row's nodes, padded to the fullest row.

    A larger number of nodes, and a larger bound of the depth, may be given. All numbers of the tree
    are listed on the host and become one tensor: small operations on tensors would take longer than
    finding the nodes.
    """
    num_nodes = max(len(row.tokens) for row in rows) if num_nodes is None else num_nodes
    # 1. The depths.
    depths = [depths_of(row.parents) for row in rows]
    depth = max(max(row, default=0) for row in depths)
    max_depth = depth if max_depth is None else max_depth
    assert depth <= max_depth, f"a path has {depth} nodes, and max_depth={max_depth}"
    # 2. Tokens, parents, depths and lineages, with their padding.
    values = array("q")
    for row in rows:
        values.extend([*row.tokens, *[NO_NODE] * (num_nodes - len(row.tokens))])
    for row in rows:
        values.extend([*row.parents, *[NO_NODE] * (num_nodes - len(row.parents))])
    for row_depths in depths:
        values.extend([*row_depths, *[0] * (num_nodes - len(row_depths))])
    none = array("q", [NO_NODE]) * max_depth
    for row in rows:
        first = len(values)
        for node, parent in enumerate(row.parents):
            start = first + parent * max_depth
            values.append(node)
            values.extend(none[1:] if parent == NO_NODE else values[start : start + max_depth - 1])
        values.extend(none * (num_nodes - len(row.parents)))
    # 3. One tensor, one transfer.
    shape = (len(rows), num_nodes)
    size = len(rows) * num_nodes
    host = torch.frombuffer(values, dtype=torch.long) if values else torch.empty(0, dtype=torch.long)
    tensor = move_to(device)(host)
    return DraftTree(
        tokens=tensor[:size].view(shape),
        parents=tensor[size : 2 * size].view(shape),
        max_depth=max_depth,
        origins=origins,
        derived=(tensor[3 * size :].view(*shape, max_depth), tensor[2 * size : 3 * size].view(shape)),
    )


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return each node's depth: 1 for a child of the last committed token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == NO_NODE else depths[parent] + 1)
    return depths


MAX_CHILDREN = 8
"""Most children of a node: the model's likeliest tokens."""

Children = tuple[list[int], list[float]]
"""The likeliest tokens after a node, and their probabilities."""


def likeliest_children(
    logits: Float[torch.Tensor, "batch node vocab"], vocabulary: DraftVocabulary | None = None
) -> list[list[Children]]:
    """Return the likeliest tokens after each node, row by row; the host waits once.

    `vocabulary` has the tokens that the logits stand for; None is all of the target's.

    Raises ValueError for logits that are NaN.
    """
    top, tokens = largest(logits.float(), min(MAX_CHILDREN, logits.shape[-1]))
    probs = (top - logits.float().logsumexp(-1, keepdim=True)).exp()
    if vocabulary is not None and vocabulary.tokens is not None:
        tokens = vocabulary.tokens[tokens]
    # One transfer: float64 holds every token exactly.
    values = torch.stack([tokens.double(), probs.double()], dim=2).tolist()
    if any(isnan(sum(scores)) for row in values for _, scores in row):
        raise ValueError(
            "the draft model's logits are not numbers (NaN): its weights are damaged, or its type overflows; load another "
            "copy, or load it in another target.dtype"
        )
    return [[([*map(int, row_tokens)], scores) for row_tokens, scores in row] for row in values]


def add_children(
    tree: GrowingTree,
    scores: list[float],
    node: int,
    tokens: Sequence[int],
    probs: Sequence[float],
    calibration: ScoreCalibration,
) -> None:
    """Append a node's likeliest children to a tree, and their probabilities to its `scores`."""
    # At least one: a rule may wait for a node to have children.
    count = max(1, sum(prob >= LEAST_PROB for prob in probs))
    depth = 1 if node == NO_NODE else tree.depths[node] + 1
    tree.add(node, tokens[:count], [calibration.estimate(depth, prob) for prob in probs[:count]])
    scores.extend(probs[:count])


def learn(tree: GrowingTree, scores: Sequence[float], tokens: Sequence[int], calibration: ScoreCalibration) -> None:
    """Learn from the next tokens of the text: what the tree expected after each, and what came.

    Nodes with score 0 aren't the model's own, and teach nothing.
    """
    for depth, (above, token) in enumerate(zip([NO_NODE, *tree.follow(tokens)], tokens, strict=False), 1):
        for child in tree.children(above):
            if scores[child] > 0.0:
                calibration.add(depth, scores[child], tree.tokens[child] == token)
