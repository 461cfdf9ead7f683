"""The vocabulary of a drafter: all tokens of the target, or the most frequent ones."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import nn

from ...data.types import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """The target's tokens that a drafter's outputs stand for.

    These are all `size` tokens, or only `tokens`, in order of their ids.
    """

    size: int
    tokens: Int[torch.Tensor, " output"] | None = None

    @property
    def num_outputs(self) -> int:
        return self.size if self.tokens is None else len(self.tokens)

    def target_tokens(self, outputs: Int[torch.Tensor, "*batch"]) -> Int[torch.Tensor, "*batch"]:
        """Return the target's token ids of outputs."""
        return outputs if self.tokens is None else self.tokens[outputs]

    def outputs(self, tokens: Int[torch.Tensor, " label"]) -> tuple[Int[torch.Tensor, " label"], Bool[torch.Tensor, " label"]]:
        """Return the output of each token, and which tokens have one.

        A token without an output gets an arbitrary one.
        """
        if self.tokens is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        output = torch.searchsorted(self.tokens, tokens).clamp(max=len(self.tokens) - 1)
        inside = self.tokens[output] == tokens
        return torch.where(inside, output, 0), inside


class ReducedVocabulary(nn.Module):
    """Mixin of drafters that may draft only the `config.draft_vocab_size` most frequent tokens.

    The buffer `draft_tokens` exists only with a reduced vocabulary. Output o is the target's token
    `draft_tokens[o]`. It is UNKNOWN until training chooses the tokens.
    """

    config: Any
    vocab_size: int
    draft_tokens: torch.Tensor
    _heads: tuple[nn.Linear, ...] = ()

    def add_draft_vocabulary(self, size: int | None, vocab_size: int) -> int:
        """Return the number of outputs, after adding the buffer `draft_tokens` unless `size` is None.

        Raises ValueError if `size` exceeds the target's vocabulary.
        """
        self.vocab_size = vocab_size
        if size is None:
            return vocab_size
        if size > vocab_size:
            raise ValueError(
                f"drafter.draft_vocab_size is {size}, more than the target's {vocab_size} tokens; "
                "make it smaller, or null for the whole vocabulary"
            )
        self.register_buffer("draft_tokens", torch.full((size,), UNKNOWN))
        return size

    def start_head(self, head: nn.Linear, target_head: nn.Linear) -> None:
        """Start a head as the target's: now, or with a reduced vocabulary when its tokens are chosen."""
        self._heads = head, target_head  # references only: in a tuple, the target's is neither saved nor trained
        if self.vocabulary.tokens is None:
            with torch.no_grad():
                head.weight.copy_(target_head.weight)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that the head's outputs stand for."""
        return DraftVocabulary(size=self.vocab_size, tokens=self._buffers.get("draft_tokens"))

    @property
    def wants_token_counts(self) -> bool:
        """Whether there is a reduced vocabulary whose tokens aren't chosen yet."""
        tokens = self.vocabulary.tokens
        return tokens is not None and bool((tokens == UNKNOWN).any())

    def choose_draft_vocabulary(self, token_counts: Int[torch.Tensor, " vocab"]) -> None:
        """Choose the most frequent tokens of the distilled data, in order of their ids.

        A head that starts as the target's gets their rows. Without a reduced vocabulary this does
        nothing. Raises ValueError for counts of another vocabulary.
        """
        tokens = self.vocabulary.tokens
        if tokens is None:
            return
        if token_counts.shape != (self.vocab_size,):
            raise ValueError(f"token_counts is {tuple(token_counts.shape)}; the target has {self.vocab_size} tokens")
        self.draft_tokens = token_counts.topk(len(tokens)).indices.sort().values.to(tokens.device)
        if self._heads:
            head, target_head = self._heads
            with torch.no_grad():
                head.weight.copy_(target_head.weight[self.draft_tokens])

    def check_weights(self) -> None:
        """Raise ValueError unless a reduced vocabulary has distinct target tokens in order."""
        tokens = self.vocabulary.tokens
        if tokens is not None and (tokens[0] < 0 or tokens[-1] >= self.vocab_size or not (tokens[1:] > tokens[:-1]).all()):
            raise ValueError(
                f"the drafter's draft_tokens must be distinct tokens of the target's {self.vocab_size}, in order; "
                "export it again"
            )
