"""Search of a block drafter whose correction depends on one token: beams over a lattice.

A slot's candidates are its most probable tokens before the correction. The corrections of all
pairs of candidates in neighbouring slots are one product of small matrices. So, unlike in
`beam_search`, no depth waits for the head.

    slot            0       1       2
    candidates      a ----- c ----- e
                      \\   /   \\   /          each edge has a correction of its own
                      /   \\   /   \\
                    b ----- d ----- f
"""

import torch
from jaxtyping import Float, Int

from ..decoding.types import NO_NODE
from .beams import SearchTree, likeliest_steps
from .corrections import Pairwise
from .ranking import largest
from .vocabulary import DraftVocabulary


def lattice_search(
    correction: Pairwise,
    hidden: Float[torch.Tensor, "batch slot hidden"],
    logits: Float[torch.Tensor, "batch slot output"],
    last_token: Int[torch.Tensor, " batch"],
    vocabulary: DraftVocabulary,
    *,
    width: int,
    num_candidates: int,
) -> SearchTree:
    """Search for the `width` most probable paths through the candidates of each slot.

    `logits` are those before the correction. Probabilities are normalised over the whole
    vocabulary, where tokens that are no candidates keep their logits without a correction.
    """
    # 1. Each slot's candidates, and the log-sum-exp of all other logits.
    logits = logits.float()
    values, outputs = largest(logits, min(num_candidates, logits.shape[-1]))  # [batch, slot, candidate]
    others = logits.scatter(-1, outputs, -torch.inf).logsumexp(-1, keepdim=True)  # [batch, slot, 1]
    tokens = vocabulary.target_tokens(outputs)
    # 2. Log-probabilities of each candidate after each candidate of the slot before.
    first = edge_log_probs(correction, hidden[:, :1], last_token[:, None, None], outputs[:, :1], values[:, :1], others[:, :1])
    edges = edge_log_probs(correction, hidden[:, 1:], tokens[:, :-1], outputs[:, 1:], values[:, 1:], others[:, 1:])
    # 3. The best paths, slot by slot. `last` is the number of a path's last token among its slot's
    # candidates.
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    scores = torch.zeros(len(tokens), 1, device=tokens.device)
    first_node, steps = NO_NODE, first[:, 0]
    for slot, slot_tokens in enumerate(tokens.unbind(1)):
        last, path, next_scores = likeliest_steps(steps, scores, width)
        levels.append((slot_tokens.gather(1, last), path + first_node, next_scores))
        first_node += scores.shape[1]
        scores = next_scores
        if slot + 1 < tokens.shape[1]:
            steps = edges[:, slot].gather(1, last[..., None].expand(-1, -1, edges.shape[-1]))
    return SearchTree.of(levels)


def edge_log_probs(
    correction: Pairwise,
    hidden: Float[torch.Tensor, "batch slot hidden"],
    previous: Int[torch.Tensor, "batch slot before"],
    outputs: Int[torch.Tensor, "batch slot candidate"],
    values: Float[torch.Tensor, "batch slot candidate"],
    others: Float[torch.Tensor, "batch slot 1"],
) -> Float[torch.Tensor, "batch slot before candidate"]:
    """Return the log-probability of each candidate after each token that may come before it.

    `values` are the candidates' logits before the correction, `others` the log-sum-exp of the
    logits of all tokens that are no candidates.
    """
    factors = correction.factors(hidden[:, :, None], correction.state(previous))
    bias = factors @ correction.rows(outputs).transpose(-1, -2).to(factors.dtype)
    logits = values[:, :, None] + bias.float()
    total = torch.logaddexp(logits.logsumexp(-1), others)
    # Rounding must not lift a child above its parent.
    return (logits - total[..., None]).clamp(max=0)
