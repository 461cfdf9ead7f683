"""Corrections of a block drafter: how a slot's logits depend on the drafted tokens before it.

A block drafter computes all slots of a block in one pass, so no slot reads the tokens that are
drafted before it. A correction adds their influence. Below, h is a slot's output, and y the token
before the slot.

    markov     head(h) + W2 W1[y]                              (DSpark's Markov head)
    rnn        head(z + f(M2 z)),  z = h + f(M1 [h ; s]),      (ReDrafter's recurrence,
               s = f(U s' + W e(y) + b),  f = SiLU              arXiv 2403.09919, section 3.1)

In `rnn`, s' is the state at the slot before (0 for the first slot), and e(y) the target's frozen
embedding. The correction `markov` has no memory. Without a correction (DFlash, arXiv 2602.06036),
the demo's drafters had 23 % fewer tokens per step than with `rnn`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn import functional as F

from ..decoding.types import NO_NODE
from .beams import SearchTree, largest, likeliest_steps
from .vocabulary import DraftVocabulary

EMBEDDING_STD = 0.02
"""Standard deviation of W1 before training. W2 is zero then, so no logit is corrected."""

Apply = Callable[[torch.Tensor], torch.Tensor]


class Recurrent(nn.Module):
    """ReDrafter's recurrence over the tokens of a block."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.recurrence = nn.Linear(hidden_size, hidden_size, bias=False)  # U
        self.input = nn.Linear(hidden_size, hidden_size)  # W, b
        self.mix = nn.Linear(2 * hidden_size, hidden_size, bias=False)  # M1
        self.block = nn.Linear(hidden_size, hidden_size, bias=False)  # M2
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.block.weight)

    def first_state(self, embedding: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Return the state at the first slot, from the token that the target has chosen."""
        return F.silu(self.input(embedding))

    def next_state(
        self, state: Float[torch.Tensor, "*batch hidden"], embedding: Float[torch.Tensor, "*batch hidden"]
    ) -> Float[torch.Tensor, "*batch hidden"]:
        """Return the state at the next slot."""
        return F.silu(self.recurrence(state) + self.input(embedding))

    def states(self, tokens: Int[torch.Tensor, "*batch slot"], embed: Apply) -> Float[torch.Tensor, "*batch slot hidden"]:
        """Return the state at each slot from the tokens before the slots; `embed` is the target's."""
        embeddings = embed(tokens)
        states = [self.first_state(embeddings[..., 0, :])]
        for slot in range(1, tokens.shape[-1]):
            states.append(self.next_state(states[-1], embeddings[..., slot, :]))
        return torch.stack(states, dim=-2)

    def logits(
        self, hidden: Float[torch.Tensor, "*batch hidden"], state: Float[torch.Tensor, "*batch hidden"], head: Apply
    ) -> Float[torch.Tensor, "*batch output"]:
        """Return a slot's corrected logits."""
        mixed = hidden + F.silu(self.mix(torch.cat([hidden, state], dim=-1)))
        return head(mixed + F.silu(self.block(mixed)))


class Markov(nn.Module):
    """A bias for each pair of neighbouring tokens, as a product of small matrices.

    So `lattice_search` computes the corrections of all pairs of candidates at once.
    """

    def __init__(self, vocab_size: int, num_outputs: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=EMBEDDING_STD)
        nn.init.zeros_(self.markov_w2.weight)

    def state(self, tokens: Int[torch.Tensor, "*batch"]) -> Float[torch.Tensor, "*batch rank"]:
        """Return the state after each of these tokens: its product with an output's row is the correction."""
        state: torch.Tensor = self.markov_w1(tokens)
        return state

    def rows(self, outputs: Int[torch.Tensor, "*batch"]) -> Float[torch.Tensor, "*batch rank"]:
        """Return the rows of W2 of these outputs."""
        return self.markov_w2.weight[outputs]

    def states(self, tokens: Int[torch.Tensor, "*batch slot"], embed: Apply) -> Float[torch.Tensor, "*batch slot rank"]:
        """Return the state at each slot, as a recurrence does, from the tokens before the slots."""
        return self.state(tokens)

    def logits(
        self, hidden: Float[torch.Tensor, "*batch hidden"], state: Float[torch.Tensor, "*batch rank"], head: Apply
    ) -> Float[torch.Tensor, "*batch output"]:
        """Return a slot's corrected logits."""
        correction: torch.Tensor = self.markov_w2(state)
        return head(hidden) + correction


# --- search of a drafter whose correction depends on one token: beams over a lattice


def lattice_search(
    correction: Markov,
    logits: Float[torch.Tensor, "batch slot output"],
    last_token: Int[torch.Tensor, " batch"],
    vocabulary: DraftVocabulary,
    *,
    width: int,
    num_candidates: int,
    scale: float = 1.0,
) -> SearchTree:
    """Search for the `width` most probable paths through the candidates of each slot.

    `logits` are those before the correction, maybe times a `scale`. Probabilities are normalised over the whole
    vocabulary, where tokens that are no candidates keep their logits without a correction.

    A slot's candidates are its most probable tokens before the correction. The corrections of all
    pairs of candidates in neighbouring slots are one product of small matrices. So, unlike in
    `beam_search`, no depth waits for the head.

        slot            0       1       2
        candidates      a ----- c ----- e
                          \\   /   \\   /          each edge has a correction of its own
                          /   \\   /   \\
                        b ----- d ----- f
    """
    # 1. Each slot's candidates, and the log-sum-exp of all other logits.
    logits = logits.float()
    values, outputs = largest(logits, min(num_candidates, logits.shape[-1]))  # [batch, slot, candidate]
    others = logits.scatter(-1, outputs, -torch.inf).logsumexp(-1, keepdim=True)  # [batch, slot, 1]
    tokens = vocabulary.target_tokens(outputs)
    # 2. Log-probabilities of each candidate after each candidate of the slot before.
    first = edge_log_probs(correction, last_token[:, None, None], outputs[:, :1], values[:, :1], others[:, :1], scale)
    edges = edge_log_probs(correction, tokens[:, :-1], outputs[:, 1:], values[:, 1:], others[:, 1:], scale)
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
    correction: Markov,
    previous: Int[torch.Tensor, "batch slot before"],
    outputs: Int[torch.Tensor, "batch slot candidate"],
    values: Float[torch.Tensor, "batch slot candidate"],
    others: Float[torch.Tensor, "batch slot 1"],
    scale: float = 1.0,
) -> Float[torch.Tensor, "batch slot before candidate"]:
    """Return the log-probability of each candidate after each token that may come before it.

    The correction counts `scale` times. `values` are the candidates' logits before the correction, `others` the
    log-sum-exp of the logits of all tokens that are no candidates.
    """
    states = correction.state(previous)
    bias = states @ correction.rows(outputs).transpose(-1, -2).to(states.dtype)
    logits = values[:, :, None] + scale * bias.float()
    total = torch.logaddexp(logits.logsumexp(-1), others)
    # Rounding must not lift a child above its parent.
    return (logits - total[..., None]).clamp(max=0)
