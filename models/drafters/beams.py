"""Beam search with a recurrent drafter, and the draft tree that its beams make (arXiv 2403.09919, sections 3.2 and 3.3)."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int

from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE


@runtime_checkable
class RecurrentDrafter(Protocol):
    """What the beam search asks of a drafter; see `Redrafter`."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def first_state(self, embedding: torch.Tensor) -> torch.Tensor: ...
    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor: ...
    def to_target_tokens(self, outputs: torch.Tensor) -> torch.Tensor: ...


def beam_search(
    drafter: RecurrentDrafter,
    hidden: Float[torch.Tensor, "batch hidden"],
    last_token: Int[torch.Tensor, " batch"],
    *,
    width: int,
    length: int,
) -> Int[torch.Tensor, "batch beam length"]:
    """The `width` likeliest continuations of `length` tokens that a beam search finds, likeliest first.

    There are fewer where the vocabulary is smaller than `width`. All beams advance together: no loop over beams, no read by
    the host.
    """
    hidden = hidden[:, None]  # [batch, 1, hidden]
    state = drafter.first_state(drafter.embed(last_token))[:, None]  # [batch, beam, hidden]
    scores = torch.zeros(state.shape[:2], device=state.device)  # log-probability of each beam
    beams = last_token[:, None, None][:, :, :0]
    for depth in range(length):
        logits = drafter.logits(hidden.expand_as(state), state).float()  # [batch, beam, vocab]
        # No beam can keep more than `width` of its successors: rank those alone, not beam x vocab of them.
        top, outputs = logits.topk(min(width, logits.shape[-1]), dim=-1)
        candidates = (scores[..., None] + top - logits.logsumexp(-1, keepdim=True)).flatten(1)
        scores, chosen = candidates.topk(min(width, candidates.shape[1]), dim=-1)
        parent = chosen // top.shape[-1]  # [batch, beam]
        token = drafter.to_target_tokens(outputs.flatten(1).gather(1, chosen))
        beams = torch.cat([beams.gather(1, parent[..., None].expand(-1, -1, depth)), token[..., None]], dim=-1)
        if depth + 1 < length:
            state = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1]))
            state = drafter.next_state(state, drafter.embed(token))
    return beams


def pack_beams(beams: Int[torch.Tensor, "batch beam length"]) -> DraftTree:
    """One tree out of all beams, each shared prefix in it once; nodes ordered by depth, then by beam.

        beams  A B C        depth 0: A        parents  -1
               A B D   ->   depth 1: B E               0 0
               A E F        depth 2: C D F             1 1 2

    Rows with fewer nodes than the fullest are padded.
    """
    batch, width, length = beams.shape
    equal = beams[:, :, None] == beams[:, None]  # [batch, beam, other beam, depth]
    same_prefix = equal.cumprod(-1).bool()
    # The first beam with the same prefix owns the node; max gives the first of equal maxima.
    owner = same_prefix.int().argmax(2).transpose(1, 2)  # [batch, depth, beam]
    is_owner = owner == torch.arange(width, device=beams.device)
    index = is_owner.flatten(1).cumsum(1) - 1  # node number, where the beam owns it
    node = index.view_as(owner).gather(2, owner)  # [batch, depth, beam]
    parent = torch.nn.functional.pad(node[:, :-1], (0, 0, 1, 0), value=NO_NODE)

    num_nodes = int(index[:, -1].max()) + 1  # the one read by the host: how large a tree the target has to read
    # Everyone who doesn't own a node writes to a column that is cut off.
    place = torch.where(is_owner.flatten(1), index, num_nodes)
    blank = torch.full((batch, num_nodes + 1), NO_NODE, device=beams.device)
    tokens = blank.scatter(1, place, beams.transpose(1, 2).flatten(1))[:, :num_nodes]
    parents = blank.scatter(1, place, parent.flatten(1))[:, :num_nodes]
    return DraftTree(tokens=tokens, parents=parents, max_depth=length)
