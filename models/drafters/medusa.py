"""Medusa: heads on the target's last hidden state, each for one of the tokens to come (arXiv 2401.10774).

From the hidden state h at the last accepted token, head k draws up, for k = 0..K-1,

    s_k = h + SiLU(W_k h + b_k)  (a residual block, or several),   logits of token k + 2 behind h = H_k s_k   (section 2.1.1)

Token 1 behind h is the one that the target has already chosen, so head k is trained on depth k of the labels, and K heads need
labels of K + 1 tokens. No head knows what the others say: a draft tree is a fixed set of paths of ranks, such as "the likeliest
token of head 0, then the third likeliest of head 1" (section 2.3.3). Blockwise parallel decoding (arXiv 1811.03115, sections 4
and 6) is the configuration conf/drafter/blockwise.yaml: feed-forward heads under the target's own output layer.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

from ...data.fields import OPTIONS, NonNegativeInt, PositiveInt, Share, one_of, raise_problems
from ...data.types import DrafterBatch
from ..decoding.tree import DraftTree
from ..decoding.types import NO_NODE
from ..target.hf_target import HFTarget
from .last_state import LastStateDrafter
from .objective import HIT_RANKS, Labels, Loss, Objective, score
from .redrafter import ResidualBlock
from .vocabulary import DraftVocabulary

RankPath = tuple[int, ...]
"""A node of a static tree: the rank of each token on the way to it, 0 being a head's likeliest."""

MAX_TREE_NODES = 2**12
"""Far above what any target gains from."""


@dataclass(kw_only=True, config=OPTIONS)
class MedusaConfig:
    """Shape of the heads, how they are trained, and the draft tree."""

    num_heads: PositiveInt = 4
    """Heads, and so the longest path of a draft tree; distil with a horizon of at least one more."""
    num_layers: PositiveInt = 1
    """Blocks of each head."""
    heads: Annotated[str, one_of("residual", "ffn")] = "residual"
    """`residual`: blocks x + SiLU(Linear(x)), as Medusa's; `ffn`: x + Linear(ReLU(Linear(x))), as blockwise parallel
    decoding's. Both start as the identity."""
    share_head: bool = False
    """All heads end in the target's own output layer, frozen and not saved. Off, each has one that starts as a copy of it."""
    head_rank: PositiveInt | None = None
    """All heads end in one trained output layer of this rank, which starts as the best approximation of the target's."""
    head_decay: Share = 0.8
    """The loss of head k counts head_decay^k times (section 2.2.1, less a common factor)."""
    one_head_per_step: bool = False
    """Train one head at a time, drawn anew for every batch; its loss counts num_heads times, so that the mean gradient is that
    of all heads (arXiv 1811.03115, section 6)."""
    tree_nodes: Annotated[int, Field(ge=1, le=MAX_TREE_NODES)] = 24
    """Nodes of the draft tree, chosen by how often each head was right at each rank when training ended. May be changed when
    the drafter is loaded."""
    tree_paths: Annotated[list[Annotated[list[NonNegativeInt], Field(min_length=1)]], Field(min_length=1)] | None = None
    """The draft tree itself, as paths of ranks, such as [[0], [1], [0, 0]], whatever `tree_nodes` says; None is the chosen
    tree. May be changed when the drafter is loaded."""

    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"tree_nodes", "tree_paths"})

    def __post_init__(self) -> None:
        problems = []
        if self.share_head and self.head_rank is not None:
            problems.append("share_head leaves no head for head_rank to factorise; drop one of them")
        paths = self.tree_paths or []
        for index, path in enumerate(paths):
            if len(path) > self.num_heads:
                problems.append(f"tree_paths has {path}, of more ranks than the {self.num_heads} heads; shorten it")
            elif path in paths[:index]:
                problems.append(f"tree_paths has {path} twice; name each path once")
            elif len(path) > 1 and path[:-1] not in paths:
                problems.append(f"tree_paths has {path} but not its parent {path[:-1]}; add that")
        raise_problems(problems)


class FeedForwardBlock(nn.Module):
    """x + Linear(ReLU(Linear(x))), the inner width four times the outer one. Starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Float[torch.Tensor, "*batch width"]) -> Float[torch.Tensor, "*batch width"]:
        return x + self.outer(F.relu(self.inner(x)))


BLOCKS: dict[str, type[nn.Module]] = {"residual": ResidualBlock, "ffn": FeedForwardBlock}


class Medusa(LastStateDrafter):
    """The heads and their tree. Its state is the target's hidden state at the last accepted token, [batch, hidden]."""

    Config = MedusaConfig
    accuracies: Float[torch.Tensor, "head rank"]
    node_tokens: Int[torch.Tensor, " node"]
    node_parents: Int[torch.Tensor, " node"]

    def __init__(self, config: MedusaConfig, target_head: nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, width = target_head.weight.shape
        if config.head_rank is not None and config.head_rank > width:
            raise ValueError(
                f"drafter.head_rank is {config.head_rank}, more than the target's width of {width}; lower it, or null"
            )
        # The target's head is read, not owned: in a tuple, it is neither saved nor trained with the drafter.
        self._target_head = (target_head,)
        block = BLOCKS[config.heads]
        self.blocks = nn.ModuleList(
            nn.Sequential(*(block(width) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        if config.head_rank is not None:
            self.lm_heads = nn.ModuleList([low_rank_head(target_head, config.head_rank)])
        else:
            self.lm_heads = nn.ModuleList(copied_head(target_head) for _ in range(0 if config.share_head else config.num_heads))
        # Until training measures them, a guess: halves with every head and every rank.
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
        """The accuracies must be shares. With them the tree is chosen."""
        if (self.accuracies < 0).any() or (self.accuracies.sum(1) > 1.01).any():
            raise ValueError("accuracies must be shares of all labels, at most 1 in sum; copy or export the drafter again")
        self._plant(self.accuracies.tolist())

    def calibrate(self, measured: Loss) -> None:
        """Keep how often each head's label was of each rank, and choose the tree with that."""
        up_to_rank = measured.hits / measured.counts.clamp(min=1)[:, None]
        self.accuracies = up_to_rank.diff(dim=1, prepend=torch.zeros_like(up_to_rank[:, :1])).to(self.accuracies)
        self._plant(self.accuracies.tolist())

    def _plant(self, accuracies: list[list[float]]) -> None:
        """Make the tree ready, so that `propose` finds all that it needs on its device."""
        if self.config.tree_paths is not None:
            paths = [tuple(path) for path in self.config.tree_paths]
        else:
            paths = likeliest_paths([ranks[: self.vocab_size] for ranks in accuracies], self.config.tree_nodes)
        paths.sort(key=len)  # parents before their children
        self.max_depth = len(paths[-1])
        self.num_ranks = 1 + max(path[-1] for path in paths)
        if self.num_ranks > self.vocab_size:
            raise ValueError(
                f"drafter.tree_paths names rank {self.num_ranks - 1}, and the target has {self.vocab_size} tokens; lower it"
            )
        index = {path: node for node, path in enumerate(paths)}
        device = self.accuracies.device
        tokens = torch.tensor([(len(path) - 1) * self.num_ranks + path[-1] for path in paths], device=device)
        parents = torch.tensor([index.get(path[:-1], NO_NODE) for path in paths], device=device)
        self.register_buffer("node_tokens", tokens, persistent=False)  # where in the list of [head, rank] each token is
        self.register_buffer("node_parents", parents, persistent=False)

    # --- decoding

    @property
    def max_nodes(self) -> int:
        return len(self.node_tokens)

    def draft(self, state: Float[torch.Tensor, "batch hidden"], last_token: Int[torch.Tensor, " batch"]) -> DraftTree:
        """Draft the same tree for every text, with each head's likeliest tokens (section 2.1.2)."""
        ranked = self.logits(state).topk(self.num_ranks, dim=-1).indices  # [batch, head, rank]
        tokens = ranked.flatten(1)[:, self.node_tokens]
        return DraftTree(tokens=tokens, parents=self.node_parents.expand_as(tokens), max_depth=self.max_depth)

    # --- the network

    @property
    def heads(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        """The output layer of each head; a single one where they share it."""
        target_head = self._target_head[0]
        return [lambda x: target_head(x.to(target_head.weight.dtype))] if self.config.share_head else list(self.lm_heads)

    def states(self, hidden: Float[torch.Tensor, "batch hidden"]) -> Float[torch.Tensor, "batch head hidden"]:
        """What each head's blocks make of the target's hidden state."""
        hidden = hidden.to(next(self.parameters()).dtype)
        return torch.stack([blocks(hidden) for blocks in self.blocks], dim=1)

    def logits(self, hidden: Float[torch.Tensor, "batch hidden"]) -> Float[torch.Tensor, "batch head vocab"]:
        """Head k's logits of the token k + 2 behind the hidden state."""
        states, heads = self.states(hidden), self.heads
        if len(heads) == 1:
            return heads[0](states)
        return torch.stack([head(state) for head, state in zip(heads, states.unbind(1), strict=True)], dim=1)

    def _logits_of(
        self, states: Float[torch.Tensor, "label hidden"], index: Int[torch.Tensor, " label"]
    ) -> Float[torch.Tensor, "label vocab"]:
        """Logits of mixed rows: head `index[n]` reads state n."""
        heads = self.heads
        if len(heads) == 1:
            return heads[0](states)
        order = index.argsort(stable=True)
        parts = states[order].split(index.bincount(minlength=len(heads)).tolist())
        return torch.cat([head(part) for head, part in zip(heads, parts, strict=True)])[order.argsort()]

    # --- training

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Medusa-1 (section 2.2.1): the heads alone are trained, head k on depth k of the labels.

        `sums` are of weighted losses; counts and hits are those of all heads, also where one alone is trained.
        """
        if batch.hidden_states is None:
            raise ValueError("Medusa reads the target's hidden states, and the batch has none; distil them or recompute them")
        labels, num_heads = Labels.of(batch), self.config.num_heads
        self.require_horizon(self.config, labels.tokens.shape[1] + 1)
        labels = labels.first(num_heads)
        states = self.states(batch.hidden_states[batch.positions])
        index = torch.arange(num_heads, device=states.device).expand_as(labels.tokens)
        inputs = states[labels.known], index[labels.known]
        vocabulary = DraftVocabulary(size=self.vocab_size)
        loss = score(self._logits_of, inputs, labels, batch, objective, vocabulary=vocabulary)
        return replace(loss, sums=loss.sums * self._head_weights().to(loss.sums))

    def _head_weights(self) -> Float[torch.Tensor, " head"]:
        num_heads = self.config.num_heads
        weights = self.config.head_decay ** torch.arange(num_heads)
        if self.config.one_head_per_step and self.training:
            weights = weights * num_heads * F.one_hot(torch.randint(num_heads, ()), num_heads)
        return weights


def copied_head(head: nn.Linear) -> nn.Linear:
    """A head of one's own that starts as the target's."""
    copy = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    with torch.no_grad():
        copy.weight.copy_(head.weight)
        if head.bias is not None:
            copy.bias.copy_(head.bias)
    return copy


def low_rank_head(head: nn.Linear, rank: int) -> nn.Sequential:
    """A head of `rank` that starts as the nearest to the target's, which is its projection on the leading eigenvectors of its
    Gram matrix."""
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


def likeliest_paths(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[RankPath]:
    """The tree of `num_nodes` with the greatest expected number of accepted tokens (section 2.3.3), or all there are, if fewer.

    `accuracies[k][r]` is how often the token of rank r is the right one at head k. Heads are taken to be right independently
    of each other: a path is accepted with the product of its accuracies, which is what its last node adds to the expectation.
    So the likeliest node whose parent is there comes next. Example: [[0.6, 0.2], [0.5, 0.3]] and 3 nodes -> (0), (0, 0), (1).
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
