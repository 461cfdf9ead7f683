"""Medusa: heads on the target's last hidden state, one for each draft position.

Paper: arXiv 2401.10774. From the hidden state h at the last accepted token, head k = 0..K-1
predicts

    s_k = h + SiLU(W_k h + b_k)  (a residual block, or several)
    logits of token k + 2 after h = H_k s_k

(section 2.1.1). The target has already chosen token 1 after h. So head k is trained on depth k of
the labels, and K heads need labels of K + 1 tokens. Heads are independent of each other. A draft
tree is therefore a fixed set of paths of ranks, such as "the most probable token of head 0, then
the third most probable of head 1" (section 2.3.3).
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import nn

from ...data.types import DrafterBatch
from ..decoding.sampling import Randomness, foreseen
from ..decoding.types import NO_NODE
from ..llm.hf_target import HFTarget
from .base import LastStateDrafter
from .beams import SearchTree, largest
from .labels import Labels
from .objective import HIT_RANKS, Loss, Objective
from .options import MedusaConfig
from .redrafter import ResidualBlock
from .scoring import score

RankPath = tuple[int, ...]
"""A node of the tree: the ranks of the tokens on its path. Rank 0 is a head's most probable
token."""

MIN_ACCURACY = 1e-6
"""Of ranks that were never right in the measurement, so that all scores are finite."""


class Medusa(LastStateDrafter):
    """Medusa's heads and tree.

    Its state is the target's hidden state at the last accepted token, [batch, hidden].
    """

    Config = MedusaConfig
    accuracies: Float[torch.Tensor, "head rank"]
    node_tokens: Int[torch.Tensor, " node"]
    node_parents: Int[torch.Tensor, " node"]
    node_scores: Float[torch.Tensor, " node"]

    def __init__(self, config: MedusaConfig, target_head: nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, width = target_head.weight.shape
        if config.head_rank is not None and config.head_rank > width:
            raise ValueError(
                f"drafter.head_rank is {config.head_rank}, more than the target's width of {width}; lower it, or null"
            )
        # A reference only: in a tuple, it is neither saved nor trained with the drafter.
        self._target_head = (target_head,)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        if config.head_rank is not None:
            self.lm_heads = nn.ModuleList([low_rank_head(target_head, config.head_rank)])
        else:
            self.lm_heads = nn.ModuleList(copied_head(target_head) for _ in range(0 if config.share_head else config.num_heads))
        # A guess until training measures the accuracies: half for each further head and rank.
        guess = [[0.5 ** (head + rank + 1) for rank in range(HIT_RANKS)] for head in range(config.num_heads)]
        self.register_buffer("accuracies", torch.tensor(guess))
        self._plant(guess)

    @classmethod
    def for_target(cls, config: MedusaConfig, target: HFTarget) -> "Medusa":
        return cls(config, target.head)

    @classmethod
    def require_horizon(cls, config: MedusaConfig, horizon: int) -> None:
        super().require_horizon(config, horizon)
        if horizon <= config.num_heads:
            raise ValueError(
                f"drafter.num_heads is {config.num_heads} and distill.horizon {horizon}, and labels of {horizon} tokens train "
                f"only {horizon - 1} heads; lower num_heads to that, or distil with distill.horizon of at least "
                f"{config.num_heads + 1}"
            )

    def check_weights(self) -> None:
        """Raise ValueError unless the accuracies are shares; then choose the tree with them."""
        if not ((self.accuracies >= 0).all() and (self.accuracies.sum(1) <= 1.01).all()):  # also for NaN
            raise ValueError(
                "accuracies must be shares of all labels, and a head's must sum to at most 1; copy or export the drafter again"
            )
        self._plant(self.accuracies.tolist())

    def calibrate(self, measured: Loss) -> None:
        """Store how often each head's label had each rank, and choose the tree accordingly."""
        up_to_rank = measured.hits / measured.counts.clamp(min=1)[:, None]
        self.accuracies = up_to_rank.diff(dim=1, prepend=torch.zeros_like(up_to_rank[:, :1])).to(self.accuracies)
        self._plant(self.accuracies.tolist())

    def _plant(self, accuracies: list[list[float]]) -> None:
        """Store the tree as tensors on the drafter's device, for `search`."""
        if self.config.tree_paths is not None:
            paths = [tuple(path) for path in self.config.tree_paths]
        else:
            paths = likeliest_paths([ranks[: self.vocab_size] for ranks in accuracies], self.config.tree_nodes)
        paths.sort(key=len)  # parents before their children
        self.num_ranks = 1 + max(path[-1] for path in paths)
        if self.num_ranks > self.vocab_size:
            raise ValueError(
                f"drafter.tree_paths has rank {self.num_ranks - 1}, and the target has {self.vocab_size} tokens; lower it"
            )
        index = {path: node for node, path in enumerate(paths)}
        device = self.accuracies.device
        tokens = torch.tensor([(len(path) - 1) * self.num_ranks + path[-1] for path in paths], device=device)
        parents = torch.tensor([index.get(path[:-1], NO_NODE) for path in paths], device=device)
        # Index of each node's token in the flattened [head, rank] list.
        self.register_buffer("node_tokens", tokens, persistent=False)
        self.register_buffer("node_parents", parents, persistent=False)
        scores = [sum(log_accuracy(accuracies, head, rank) for head, rank in enumerate(path)) for path in paths]
        self.register_buffer("node_scores", torch.tensor(scores, device=device), persistent=False)
        self.level_sizes = tuple(Counter(map(len, paths)).values())

    # --- decoding

    @property
    def max_nodes(self) -> int:
        return len(self.node_tokens)

    def search(
        self,
        state: Float[torch.Tensor, "batch hidden"],
        last_token: Int[torch.Tensor, " batch"],
        *,
        generator: Randomness = None,
    ) -> tuple[SearchTree, None]:
        """Return the same tree for every text, of the heads' most probable tokens (2.1.2).

        Its scores are the measured accuracies of the ranks.
        """
        logits = self.logits(state)
        _, ranked = largest(foreseen(logits, range(logits.shape[1]), generator), self.num_ranks)  # [batch, head, rank]
        tokens = ranked.flatten(1)[:, self.node_tokens]
        parents, scores = self.node_parents.expand_as(tokens), self.node_scores.expand(tokens.shape)
        return SearchTree(tokens=tokens, parents=parents, scores=scores, level_sizes=self.level_sizes), None

    # --- the network

    @property
    def heads(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        """The output layer of each head; a single layer if the heads share it."""
        target_head = self._target_head[0]
        return [lambda x: target_head(x.to(target_head.weight.dtype))] if self.config.share_head else list(self.lm_heads)

    def states(self, hidden: Float[torch.Tensor, "batch hidden"]) -> Float[torch.Tensor, "batch head hidden"]:
        """Return the output of each head's blocks for the target's hidden state."""
        hidden = hidden.to(next(self.parameters()).dtype)
        return torch.stack([blocks(hidden) for blocks in self.blocks], dim=1)

    def logits(self, hidden: Float[torch.Tensor, "batch hidden"]) -> Float[torch.Tensor, "batch head vocab"]:
        """Return head k's logits of token k + 2 after the hidden state."""
        states, heads = self.states(hidden), self.heads
        if len(heads) == 1:
            return heads[0](states)
        return torch.stack([head(state) for head, state in zip(heads, states.unbind(1), strict=True)], dim=1)

    def _logits_of(
        self, states: Float[torch.Tensor, "label hidden"], head: Int[torch.Tensor, " label"]
    ) -> Float[torch.Tensor, "label vocab"]:
        """Return the logits of mixed rows: head `head[n]` reads state n. The host waits for their numbers."""
        heads = self.heads
        if len(heads) == 1:
            return heads[0](states)
        order, sizes = head.argsort(stable=True), head.bincount(minlength=len(heads)).tolist()
        parts = states[order].split(sizes)
        return torch.cat([layer(part) for layer, part in zip(heads, parts, strict=True)])[order.argsort()]

    # --- training

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the loss of Medusa-1 (section 2.2.1): head k is trained on depth k.

        `sums` are weighted by powers of LOSS_DECAY.
        """
        labels, num_heads = Labels.of(batch), self.config.num_heads
        self.require_horizon(self.config, labels.tokens.shape[1] + 1)
        labels = labels.first(num_heads)
        states = self.states(labels.at_positions(self.hidden_states_of(batch)))
        heads = torch.arange(num_heads, device=states.device).expand(len(states), -1)
        loss = score(self._logits_of, (states, heads), labels, batch, objective, vocabulary=self.vocabulary)
        return loss.decayed(objective)


def copied_head(head: nn.Linear) -> nn.Linear:
    """Return a trainable head that starts as a copy of the target's."""
    new_head = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    with torch.no_grad():
        new_head.weight.copy_(head.weight)
        if head.bias is not None:
            new_head.bias.copy_(head.bias)
    return new_head


def low_rank_head(head: nn.Linear, rank: int) -> nn.Sequential:
    """Return a head of `rank` that starts as the nearest one to the target's.

    This is the projection of the target's head on the leading eigenvectors of its Gram matrix.
    """
    down, up = nn.Linear(head.in_features, rank, bias=False), nn.Linear(rank, head.out_features, bias=head.bias is not None)
    if not down.weight.is_meta:
        with torch.no_grad():
            weight = head.weight.float()
            leading = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -rank:]
            down.weight.copy_(leading.T)
            up.weight.copy_(weight @ leading)
            if head.bias is not None:
                up.bias.copy_(head.bias)
    return nn.Sequential(down, up)


def log_accuracy(accuracies: Sequence[Sequence[float]], head: int, rank: int) -> float:
    """Return the logarithm of how often the token of `rank` is right at `head`."""
    accuracy = accuracies[head][rank] if rank < len(accuracies[head]) else 0.0
    return math.log(max(accuracy, MIN_ACCURACY))


def likeliest_paths(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[RankPath]:
    """Return the tree of `num_nodes` with the most expected accepted tokens (section 2.3.3).

    It has fewer nodes if there are fewer. `accuracies[k][r]` is how often the token of rank r is
    right at head k. Heads are assumed to be right independently of each other. So a path is
    accepted with the product of its accuracies, and its last node adds this probability to the
    expectation. The tree grows by the most probable node whose parent is in it.

    Example: [[0.6, 0.2], [0.5, 0.3]] and 3 nodes -> (0), (0, 0), (1).
    """
    paths: list[RankPath] = []
    candidates: list[tuple[float, RankPath]] = [(-probability, (rank,)) for rank, probability in enumerate(accuracies[0])]
    heapq.heapify(candidates)
    while candidates and len(paths) < num_nodes:
        probability, path = heapq.heappop(candidates)
        paths.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                heapq.heappush(candidates, (probability * accuracy, (*path, rank)))
    return paths
