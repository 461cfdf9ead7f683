"""ReDrafter: a recurrent drafter with beam search (Recurrent Drafter, arXiv 2403.09919).

From the target's last hidden state h and the tokens after it, the drafter computes a recurrent
state and predicts

    s_1 = e_1 (or f(W e_1 + b), Apple's release),   s_t = f(U s_{t-1} + W e_t + b),   f = SiLU,
    g_t = [h ; s_t] -> residual blocks x + SiLU(Linear(x)) -> logits of the token after token t

(section 3.1). Here e are the target's frozen embeddings. The target has already chosen token 1, so
T labelled tokens train T - 1 depths. All depths share the same weights, so a drafter can draft
deeper than it was trained.

The tree of its beam search is a function of the text, or of the text and of draws that the target makes whatever
the tree is (see `foreseen`). So speculative sampling is exact with it at every temperature: at each node the
target's draw decides whether the walk continues (see `SpeculativeSampling`).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.nn import functional as F

from ...data.types import DrafterBatch
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..llm.hf_target import HFTarget
from .base import LastStateDrafter
from .beams import SearchTree, beam_search, pack_survivors
from .labels import Labels
from .objective import Loss, Objective
from .options import RedrafterConfig
from .scoring import score
from .vocabulary import ReducedVocabulary

NUM_SIZES = 5
"""Number of sizes of the paper's tree where each is recorded or compiled once.

On average a tenth of the nodes is padding."""


class ResidualBlock(nn.Module):
    """Block x + SiLU(Linear(x)). Starts as the identity, so at first the head reads [h ; s]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Float[torch.Tensor, "*batch width"]) -> Float[torch.Tensor, "*batch width"]:
        return x + F.silu(self.linear(x))


class Redrafter(ReducedVocabulary, LastStateDrafter):
    """The recurrent drafter.

    Its state is the target's hidden state at the last accepted token, [batch, hidden].
    """

    Config = RedrafterConfig
    DEPTH_OPTION = "beam_length"

    def __init__(self, config: RedrafterConfig, embed_tokens: nn.Module, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        num_outputs = self.add_draft_vocabulary(config.draft_vocab_size, vocab_size)
        self.config = config
        self.has_few_sizes = False
        self.hidden_size = hidden_size
        self.exit_width = exit_width = config.exit_width or 2 * hidden_size
        # A reference only: in a tuple, the target's embeddings are neither saved nor trained with
        # the drafter.
        self._embed_tokens = (embed_tokens,)
        self.recurrence = nn.Linear(hidden_size, hidden_size, bias=False)  # U
        self.input = nn.Linear(hidden_size, hidden_size)  # W, b
        self.projection = nn.Identity() if exit_width == 2 * hidden_size else nn.Linear(2 * hidden_size, exit_width)
        self.blocks = nn.Sequential(*(ResidualBlock(exit_width) for _ in range(config.num_blocks)))
        self.head = nn.Linear(exit_width, num_outputs, bias=False)

    @classmethod
    def for_target(cls, config: RedrafterConfig, target: HFTarget) -> "Redrafter":
        drafter = cls(config, target.embed_tokens, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        drafter.has_few_sizes = target.has_fixed_shapes
        if config.head_init == "target":
            drafter._start_from(target.head)
        return drafter

    def _start_from(self, target_head: nn.Linear) -> None:
        """Start with the target's head, and pass h through to it unchanged.

        At first the drafter then tends to predict the token that the target has just chosen.
        """
        if self.head.in_features != target_head.in_features:
            raise ValueError(
                f"drafter.head_init is target, whose head is {target_head.in_features} wide; "
                "drafter.exit_width must be the same"
            )
        assert isinstance(self.projection, nn.Linear)
        width = target_head.in_features
        self.start_head(self.head, target_head)
        with torch.no_grad():
            self.projection.weight[:, :width] = torch.eye(width)
            self.projection.bias.zero_()

    @property
    def max_nodes(self) -> int:
        most = self.config.beam_width * self.config.beam_length
        return most if self.config.tree_nodes is None else min(most, self.config.tree_nodes)

    # --- decoding

    def search(
        self,
        state: Float[torch.Tensor, "batch hidden"],
        last_token: Int[torch.Tensor, " batch"],
        *,
        generator: Randomness = None,
    ) -> tuple[SearchTree, None]:
        """Search with beams (section 3.2)."""
        hidden = state[:, None].expand(-1, self.config.beam_length, -1)
        options: dict[str, Any] = {"width": self.config.beam_width, "top_k": self.config.top_k, "generator": generator}
        return beam_search(self, hidden, last_token, **options), None

    def pack(self, search: SearchTree) -> DraftTree:
        """Return the final beams (section 3.3), or the most probable nodes of the search."""
        return pack_survivors(search) if self.config.tree_nodes is None else super().pack(search)

    def trim(self, tree: DraftTree) -> DraftTree:
        """Cut the padding of the paper's tree, whose number of nodes depends on shared prefixes.

        Where shapes are recorded or compiled, the tree then has one of NUM_SIZES sizes.
        """
        if self.config.tree_nodes is not None:
            return tree
        return tree.trimmed(-(-self.max_nodes // NUM_SIZES) if self.has_few_sizes else 1)

    # --- the network

    def embed(self, tokens: Int[torch.Tensor, "*batch"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Return the target's embeddings in the drafter's dtype."""
        embeddings: torch.Tensor = self._embed_tokens[0](tokens)
        return embeddings.to(next(self.parameters()).dtype)

    def first_state(self, embedding: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        """Return s_1, from the embedding of the token that the target has already chosen."""
        if self.config.initial_state == "embedding":
            return embedding
        return F.silu(self.input(embedding))

    def next_state(
        self, state: Float[torch.Tensor, "*batch hidden"], embedding: Float[torch.Tensor, "*batch hidden"]
    ) -> Float[torch.Tensor, "*batch hidden"]:
        """Return s_t from s_{t-1} and the embedding of token t."""
        return F.silu(self.recurrence(state) + self.input(embedding))

    def logits(
        self, hidden: Float[torch.Tensor, "*batch hidden"], state: Float[torch.Tensor, "*batch hidden"]
    ) -> Float[torch.Tensor, "*batch draft_vocab"]:
        """Return logits of the next token from hidden state and recurrent state."""
        both = torch.cat([hidden.to(state.dtype), state], dim=-1)
        logits: torch.Tensor = self.head(self.blocks(self.projection(both)))
        return logits

    # --- training

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        """Return the loss of the target's continuations (section 3.4), teacher-forced.

        Depth d reads the continuation's tokens 0..d and predicts token d + 1.
        """
        labels = Labels.of(batch)
        embeddings = self.embed(labels.inputs)  # [position, depth, hidden]
        states = [self.first_state(embeddings[:, 0])]
        for depth in range(1, labels.tokens.shape[1]):
            states.append(self.next_state(states[-1], embeddings[:, depth]))
        hidden = labels.at_positions(self.hidden_states_of(batch))[:, None].expand(-1, labels.tokens.shape[1], -1)
        inputs = hidden, torch.stack(states, dim=1)
        return score(self.logits, inputs, labels, batch, objective, vocabulary=self.vocabulary)

    def has_unused_parameters(self, horizon: int) -> bool:
        """Return whether the recurrence gets no gradient.

        A horizon of 2 trains only the first depth, which doesn't use the recurrence.
        """
        return horizon == 2
