"""A growing tree with a model's probabilities: its children, and what calibration learns from it."""

from collections.abc import Sequence
from math import isnan

import torch
from jaxtyping import Float

from ..decoding.growing_tree import GrowingTree
from ..decoding.growth import LEAST_PROB
from ..decoding.types import NO_NODE
from .beams import largest
from .calibration import ScoreCalibration
from .vocabulary import DraftVocabulary

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
