"""Beam search with a recurrent drafter, and the draft tree that it makes (arXiv 2403.09919, sections 3.2 and 3.3)."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int

from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE

MAX_SEARCH_NODES = 2**14
"""Nodes that a search may meet: far above what any target gains from, and far below what memory holds."""

MAX_CANDIDATES = 2**18
"""Successors that a search may rank, width x width at each depth: ten times as many as the paper's widest search, of 70 beams
of 5 tokens."""


@runtime_checkable
class RecurrentDrafter(Protocol):
    """What the beam search asks of a drafter; see `Redrafter`."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def first_state(self, embedding: torch.Tensor) -> torch.Tensor: ...
    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor: ...
    def to_target_tokens(self, outputs: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTree:
    """All beams that a search held at any depth. Beams share their prefixes, so together they are a tree.

    Nodes are ordered by depth, parents before their children; `level_sizes` counts the nodes of each depth.
    `scores` are log-probabilities of the whole path, which never exceed the parent's.
    """

    tokens: Int[torch.Tensor, "batch node"]
    parents: Int[torch.Tensor, "batch node"]
    scores: Float[torch.Tensor, "batch node"]
    level_sizes: tuple[int, ...]


def beam_search(
    drafter: RecurrentDrafter,
    hidden: Float[torch.Tensor, "batch hidden"],
    last_token: Int[torch.Tensor, " batch"],
    *,
    width: int,
    length: int,
) -> SearchTree:
    """Search for the `width` likeliest continuations of `length` tokens.

    There are fewer where the vocabulary is smaller than `width`. All beams advance together: no loop over beams, no read by
    the host.
    """
    hidden = hidden[:, None]  # [batch, 1, hidden]
    state = drafter.first_state(drafter.embed(last_token))[:, None]  # [batch, beam, hidden]
    scores = torch.zeros(state.shape[:2], device=state.device)  # log-probability of each beam
    parents_at = torch.full_like(last_token, NO_NODE)[:, None]  # node of each beam
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    num_nodes = 0
    for depth in range(length):
        logits = drafter.logits(hidden.expand_as(state), state).float()  # [batch, beam, vocab]
        outputs, beam, scores = likeliest_successors(logits, scores, width)
        token = drafter.to_target_tokens(outputs)
        levels.append((token, parents_at.gather(1, beam), scores))
        parents_at = torch.arange(num_nodes, num_nodes + token.shape[1], device=token.device).expand_as(token)
        num_nodes += token.shape[1]
        if depth + 1 < length:
            state = state.gather(1, beam[..., None].expand(-1, -1, state.shape[-1]))
            state = drafter.next_state(state, drafter.embed(token))
    tokens, parents, all_scores = (torch.cat(values, dim=1) for values in zip(*levels, strict=True))
    sizes = tuple(level[0].shape[1] for level in levels)
    return SearchTree(tokens=tokens, parents=parents, scores=all_scores, level_sizes=sizes)


def likeliest_successors(
    logits: Float[torch.Tensor, "batch beam vocab"], scores: Float[torch.Tensor, "batch beam"], width: int
) -> tuple[Int[torch.Tensor, "batch next"], Int[torch.Tensor, "batch next"], Float[torch.Tensor, "batch next"]]:
    """The `width` likeliest among all successors of all beams: outputs, the beam that each follows, and its score."""
    # No beam can keep more than `width` of its successors: rank those alone, not beam x vocab of them.
    top, outputs = logits.topk(min(width, logits.shape[-1]), dim=-1)
    # In this order no rounding lifts a child above its parent: what is added is never above 0.
    candidates = (scores[..., None] + (top - logits.logsumexp(-1, keepdim=True))).flatten(1)
    scores, chosen = candidates.topk(min(width, candidates.shape[1]), dim=-1)
    return outputs.flatten(1).gather(1, chosen), chosen // top.shape[-1], scores


def pack_survivors(search: SearchTree) -> DraftTree:
    """The beams that the search ended with, each shared prefix once: the paper's tree (section 3.3).

        beams  A B C        depth 1: A        parents  -1
               A B D   ->   depth 2: B E               0 0
               A E F        depth 3: C D F             1 1 2

    The paper finds shared prefixes by comparing beams; here the search has back-pointers.
    All rows are padded to the most nodes that a tree could have, so the host reads nothing;
    `DraftTree.trimmed` cuts the padding.
    """
    alive = torch.zeros_like(search.tokens)
    end = alive.shape[1]
    alive[:, end - search.level_sizes[-1] :] = 1
    for size in reversed(search.level_sizes[1:]):  # a node lives where a child of its does
        level = slice(end - size, end)
        alive.scatter_reduce_(1, search.parents[:, level], alive[:, level].clone(), "amax")
        end -= size
    return pack(search, alive.bool(), alive.shape[1])


def pack_separately(search: SearchTree) -> DraftTree:
    """The beams that the search ended with, each written out in full, as if none shared a prefix: what `pack_survivors` saves.

        beams  A B C        depth 1: A A A        parents  -1 -1 -1
               A B D   ->   depth 2: B B E                  0  1  2
               A E F        depth 3: C D F                  3  4  5

    Siblings may be the same token here, which acceptance can bear: what is chosen after a text doesn't depend on the node.
    """
    size = search.level_sizes[-1]
    num_nodes = search.tokens.shape[1]
    nodes = [torch.arange(num_nodes - size, num_nodes, device=search.tokens.device).expand(len(search.tokens), size)]
    for _ in search.level_sizes[1:]:
        nodes.insert(0, search.parents.gather(1, nodes[0]))
    tokens = search.tokens.gather(1, torch.cat(nodes, dim=1))
    parents = (torch.arange(tokens.shape[1], device=tokens.device) - size).clamp(min=NO_NODE)
    return DraftTree(tokens=tokens, parents=parents.expand_as(tokens), max_depth=len(search.level_sizes))


def pack_likeliest(search: SearchTree, num_nodes: int) -> DraftTree:
    """The `num_nodes` likeliest of all nodes that the search held, dropped beams' too: EAGLE-2's choice (arXiv 2406.16858,
    section 4.2).

    No other tree of so many of these nodes has a greater expected number of accepted tokens, where the drafter's
    probabilities are right. All rows have the same number of nodes (all there are, if fewer), so the host reads nothing.
    """
    num_nodes = min(num_nodes, search.tokens.shape[1])
    return pack(search, likeliest_nodes(search, num_nodes), num_nodes)


def likeliest_nodes(search: SearchTree, num_nodes: int) -> Bool[torch.Tensor, "batch node"]:
    """Mark the `num_nodes` likeliest nodes.

    Parents come before their children and are at least as likely, so a stable order never takes a child alone.
    """
    order = search.scores.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    return torch.zeros_like(search.tokens, dtype=torch.bool).scatter_(1, order, True)


def pack(search: SearchTree, kept: Bool[torch.Tensor, "batch node"], num_nodes: int) -> DraftTree:
    """Return the kept nodes as a tree, in their order, padded to `num_nodes`. The parents of kept nodes must be kept too."""
    index = kept.cumsum(1) - 1  # new number of each kept node
    # Nodes that aren't kept write to a dummy last column, which is cut off below.
    column = torch.where(kept, index, num_nodes)
    parents = torch.where(search.parents == NO_NODE, NO_NODE, index.gather(1, search.parents.clamp(min=0)))
    blank = torch.full((len(kept), num_nodes + 1), NO_NODE, device=kept.device)
    return DraftTree(
        tokens=blank.scatter(1, column, search.tokens)[:, :num_nodes],
        parents=blank.scatter(1, column, parents)[:, :num_nodes],
        max_depth=len(search.level_sizes),
    )
