"""Draft tokens on the host: candidates of one source, and the tree that is made of nodes."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...data.device import to_device
from ..decoding.tree import DraftTree, lineages_of
from ..decoding.types import NO_NODE

Links = tuple[Sequence[int], Sequence[int]]
"""Nodes of one row: their tokens, and the index of each node's parent, or NO_NODE for a child of the last committed token.

A parent comes before its children; siblings are different tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates for the draft tree of one row, by one drafter: nodes, and how likely they are."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """See `Links`."""
    scores: Sequence[float]
    """The drafter's estimate that a candidate is accepted if its parent is, between 0 and 1."""
    bins: Sequence[int]
    """The drafter's evidence for each candidate, as a number. Candidates of one bin are about as likely
    to be accepted: calibration counts by bin."""


NO_CANDIDATES = Candidates(tokens=(), parents=(), scores=(), bins=())


def tree_of(
    rows: Sequence[Links],
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
    num_nodes = max(len(drafts) for drafts, _ in rows) if num_nodes is None else num_nodes
    # 1. The paths, and their depth.
    paths = [lineages_of(above) for _, above in rows]
    depth = max(max(map(len, row), default=0) for row in paths)
    max_depth = depth if max_depth is None else max_depth
    assert depth <= max_depth, f"a path has {depth} nodes, and max_depth={max_depth}"
    # 2. Tokens, parents, depths and lineages, with their padding.
    tokens: list[int] = []
    parents: list[int] = []
    levels: list[int] = []
    lineages: list[int] = []
    none = [NO_NODE] * max_depth
    for (drafts, above), lines in zip(rows, paths, strict=True):
        num_missing = num_nodes - len(drafts)
        tokens += [*drafts, *[NO_NODE] * num_missing]
        parents += [*above, *[NO_NODE] * num_missing]
        levels += [*map(len, lines), *[0] * num_missing]
        for line in lines:
            lineages += [*line, *none[len(line) :]]
        lineages += none * num_missing
    # 3. One tensor, one transfer.
    values = array("q", tokens + parents + levels + lineages)
    host = torch.frombuffer(values, dtype=torch.long) if values else torch.empty(0, dtype=torch.long)
    tensor = to_device(host, device)
    shape, strides, size = (len(rows), num_nodes), (num_nodes, 1), len(tokens)
    return DraftTree(
        tokens=tensor.as_strided(shape, strides),
        parents=tensor.as_strided(shape, strides, size),
        max_depth=max_depth,
        origins=origins,
        derived=(
            tensor.as_strided((*shape, max_depth), (num_nodes * max_depth, max_depth, 1), 3 * size),
            tensor.as_strided(shape, strides, 2 * size),
        ),
    )
