"""The draft tree: the proposal of every drafter."""

from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field

import torch
from jaxtyping import Int

from ...data.device import to_device
from .types import NO_NODE, AcceptedPath

Links = tuple[Sequence[int], Sequence[int]]
"""Nodes of one row: their tokens, and the index of each node's parent, or NO_NODE for a child of the last committed token.

A parent comes before its children; siblings are different tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Draft tokens hanging from the last committed token.

    `parents[b, n]` is the parent of node n, or NO_NODE if node n follows the last committed token.
    A parent comes before its children. Rows with fewer nodes are padded at the end with NO_NODE, in
    `tokens` and `parents`. `max_depth` bounds the length of any path. A chain is `parents = [-1, 0,
    1, ...]`.

    Derived: `lineage[b, n]` lists node n, its parent, and so on up to the root's child, then
    NO_NODE. For the tree

        last token ─┬─ 0 ─┬─ 2          parents = [-1, -1, 0, 0]
                    └─ 1  └─ 3          lineage = [[0, -1], [1, -1], [2, 0], [3, 0]]

    The constructor doesn't check the values, because reading them would stall an accelerator. Tests
    check them.
    """

    tokens: Int[torch.Tensor, "batch node"]
    parents: Int[torch.Tensor, "batch node"]
    max_depth: int
    largest: Int[torch.Tensor, ""] | None = None
    """Nodes of the fullest row, on the device, if they are counted already."""
    is_fixed: bool = False
    """Whether its tensors stay at their addresses, where later drafts overwrite them."""
    origins: tuple[tuple[int, ...], ...] | None = None
    """The sources of each row's nodes, on the host, in a tree merged from several: bit i is set if
    source i proposed the node. None if there is only one source."""
    cache_entries: Int[torch.Tensor, "batch node"] | None = None
    """Each node's place in its drafter's cache, counted from the last committed token, if the drafter has
    read the nodes as the target does and keeps the accepted ones; arbitrary for unread leaves."""
    derived: InitVar[tuple[torch.Tensor, torch.Tensor] | None] = None
    """`lineage` and `depths`, where they are known already."""
    lineage: Int[torch.Tensor, "batch node depth"] = field(init=False)
    depths: Int[torch.Tensor, "batch node"] = field(init=False)
    """1 for a child of the last committed token; 0 for padding."""

    def __post_init__(self, derived: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if self.tokens.shape != self.parents.shape or self.tokens.ndim != 2:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)} and parents {tuple(self.parents.shape)} of a draft tree "
                "must both be [batch, node]"
            )
        if derived is None:
            lineage = _lineage(self.tokens, self.parents, self.max_depth)
            derived = lineage, depths(lineage)
        object.__setattr__(self, "lineage", derived[0])
        object.__setattr__(self, "depths", derived[1])

    def fixed(self) -> "DraftTree":
        """Return the tree as the output of a recording, whose address `is_fixed`."""
        tree = copy(self)
        object.__setattr__(tree, "is_fixed", True)
        return tree

    @property
    def num_nodes(self) -> int:
        """Nodes per row, padding included."""
        return self.tokens.shape[1]

    def trimmed(self, bucket: int = 1) -> "DraftTree":
        """Return the tree without the padding that all rows share. It needs `largest`, and has no cache entries or origins.

        The new size is a multiple of `bucket`, at most the old size. The host reads the number of
        nodes of the fullest row, and so waits for an accelerator.
        """
        assert self.largest is not None
        num_nodes = min(-(-int(self.largest) // bucket) * bucket, self.num_nodes)
        tree = copy(self)  # slices the derived fields too, instead of recomputing them
        for name in ("tokens", "parents", "lineage", "depths"):
            object.__setattr__(tree, name, getattr(self, name)[:, :num_nodes])
        return tree


def empty_tree(batch: int, device: torch.device) -> DraftTree:
    """Return a tree without nodes: decoding with it is plain autoregressive decoding."""
    none = torch.empty(batch, 0, dtype=torch.long, device=device)
    return DraftTree(tokens=none, parents=none, max_depth=0)


def chain_tree(tokens: Int[torch.Tensor, "batch depth"]) -> DraftTree:
    """Return a tree of a single path: each token follows the one before it."""
    depth = tokens.shape[-1]
    index = torch.arange(depth, device=tokens.device)
    lineage = (index[:, None] - index).clamp(min=NO_NODE).expand(len(tokens), -1, -1)
    derived = lineage, (index + 1).expand_as(tokens)
    return DraftTree(tokens=tokens, parents=(index - 1).expand_as(tokens), max_depth=depth, derived=derived)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return each node's depth: 1 for a child of the last committed token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == NO_NODE else depths[parent] + 1)
    return depths


def lineages_of(parents: Sequence[int]) -> list[list[int]]:
    """Return each node's lineage (see `DraftTree`), without padding."""
    lines: list[list[int]] = []
    for node, parent in enumerate(parents):
        lines.append([node] if parent == NO_NODE else [node, *lines[parent]])
    return lines


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


def accepted_path(tree: DraftTree, nodes: Sequence[Sequence[int]]) -> AcceptedPath:
    """Return the accepted path of each row, given its nodes on the host."""
    drafts = [tree.tokens[row, list(path)].tolist() for row, path in enumerate(nodes)]
    depth = max(map(len, nodes))
    rows = [host_row(path, tokens, NO_NODE, depth) for path, tokens in zip(nodes, drafts, strict=True)]
    numbers = torch.tensor(rows, dtype=torch.long, device=tree.tokens.device)
    host_nodes, host_tokens = tuple(map(tuple, nodes)), tuple(map(tuple, drafts))
    return AcceptedPath(numbers=numbers, depth=depth, width=depth, host_nodes=host_nodes, tokens=host_tokens)


def host_row(path: Sequence[int], tokens: Sequence[int], bonus: int, depth: int) -> list[int]:
    """Return a row of `AcceptedPath.numbers`: a path, its nodes' tokens and the token after it."""
    entries, missing = [node + 1 for node in path], depth - len(path)
    first = [len(path), 1 + len(path), entries[-1] if path else 0, bonus]
    return [*first, *path, *[NO_NODE] * missing, 0, *entries, *[0] * missing, *tokens, *[0] * missing]


def depths(lineage: Int[torch.Tensor, "batch node depth"]) -> Int[torch.Tensor, "batch node"]:
    """Return each node's distance from the last committed token; 0 for padding."""
    return (lineage != NO_NODE).sum(-1)


def _lineage(
    tokens: Int[torch.Tensor, "batch node"], parents: Int[torch.Tensor, "batch node"], max_depth: int
) -> Int[torch.Tensor, "batch node depth"]:
    batch, num_nodes = tokens.shape
    # Entry 0 stands for "no node" and is its own parent, so walking up needs no special case.
    parents = torch.nn.functional.pad(parents + 1, (1, 0))  # [batch, node + 1]
    index = torch.arange(1, num_nodes + 1, device=tokens.device).expand(batch, num_nodes)
    node = torch.where(tokens == NO_NODE, 0, index)
    lineage = [node]
    for _ in range(max_depth - 1):
        lineage.append(parents.gather(1, lineage[-1]))
    return torch.stack(lineage[:max_depth], dim=2) - 1 if max_depth else tokens.new_empty(batch, num_nodes, 0)
