"""Draft tokens on the host, as training-free drafters find them and merged trees combine them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates for the draft tree of one row, by one drafter.

    They form a tree: a parent comes before its children, and siblings are different tokens. All
    sequences have one entry for each candidate.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    """Index of each candidate's parent, or NO_NODE for a child of the last committed token."""
    scores: Sequence[float]
    """The drafter's estimate that a candidate is accepted if its parent is, between 0 and 1."""
    bins: Sequence[int]
    """The drafter's evidence for each candidate, as a number below its `num_bins`. Candidates of
    one bin are about as likely to be accepted: calibration counts by bin."""


NO_CANDIDATES = Candidates(tokens=(), parents=(), scores=(), bins=())


def tree_of(
    rows: Sequence[Candidates],
    device: torch.device,
    *,
    num_nodes: int | None = None,
    max_depth: int | None = None,
    origins: tuple[tuple[int, ...], ...] | None = None,
) -> DraftTree:
    """Return the tree of all candidates of each row, padded to the fullest row.

    A larger number of nodes, and a larger bound of the depth, may be given.
    """
    num_nodes = max(len(row.tokens) for row in rows) if num_nodes is None else num_nodes
    depth = max((max(depths_of(row.parents), default=0) for row in rows), default=0)

    def padded(values: Sequence[int]) -> list[int]:
        return [*values, *[NO_NODE] * (num_nodes - len(values))]

    tokens, parents = (
        torch.tensor([padded(values) for values in columns], dtype=torch.long, device=device).view(len(rows), num_nodes)
        for columns in ([row.tokens for row in rows], [row.parents for row in rows])
    )
    return DraftTree(tokens=tokens, parents=parents, max_depth=max_depth or depth, origins=origins)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return each candidate's depth: 1 for a child of the last committed token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == NO_NODE else depths[parent] + 1)
    return depths
