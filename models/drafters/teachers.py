"""The target's distributions that a drafter learns from: over all tokens, or the top k."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import nn

from ...data.types import UNKNOWN, DrafterBatch
from .vocabulary import DraftVocabulary

TINY = 1e-12
"""Lower bound that keeps logarithms and quotients of probabilities finite."""

LEAST_REST = 1e-6
"""Least probability of all tokens outside the top k.

It is 1 minus a sum in float32; a smaller value would be rounding error.
"""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The target's distribution after each token of the texts.

    It is computed from hidden states when needed.
    """

    states: Float[torch.Tensor, "token hidden"]
    head: nn.Linear
    vocabulary: DraftVocabulary

    @property
    def reduced(self) -> bool:
        """Whether the drafter has outputs for only some tokens."""
        return self.vocabulary.tokens is not None

    @property
    def num_columns(self) -> int:
        """Columns of the widest tensor that the teacher computes."""
        return self.vocabulary.size

    def knows(self, text_index: Int[torch.Tensor, "position depth"]) -> Bool[torch.Tensor, "position depth"]:
        """Mark the tokens of the text that have a distribution: all."""
        return torch.ones_like(text_index, dtype=torch.bool)

    def outcomes(
        self, text: Int[torch.Tensor, " label"], log_q: Float[torch.Tensor, "label output"]
    ) -> tuple[Float[torch.Tensor, "label output"], Float[torch.Tensor, "label output"]]:
        """Return p of the drafter's outputs after each token `text`, and `log_q` unchanged.

        In a reduced vocabulary p sums to at most 1. Neighbours with the same `text` share one
        computation of p; the host waits for the number of computations.
        """
        with torch.no_grad():
            tokens, entry = text.unique_consecutive(return_inverse=True)
            logits: torch.Tensor = self.head(self.states[tokens].to(self.head.weight.dtype))
            probs = logits.float().softmax(1)
            probs = probs if self.vocabulary.tokens is None else probs[:, self.vocabulary.tokens]
            return probs[entry] if len(tokens) < len(entry) else probs, log_q


@dataclass(frozen=True, kw_only=True)
class TopTeacher:
    """The target's top-k tokens after each token of the texts, and their probabilities.

    The tokens are indexes of the drafter's outputs. `inside` marks those in a reduced vocabulary.
    The share of "any other" outside the vocabulary is unknown; all of it counts as inside. Where
    nothing is `known`, p is taken as one-hot at the label, as off the text.
    """

    outputs: Int[torch.Tensor, "token top"]
    inside: Bool[torch.Tensor, "token top"]
    probs: Float[torch.Tensor, "token top"]
    known: Bool[torch.Tensor, " token"]
    reduced: bool
    num_columns: int
    """Columns of the widest tensor that the teacher needs: the drafter's logits."""

    def knows(self, text_index: Int[torch.Tensor, "position depth"]) -> Bool[torch.Tensor, "position depth"]:
        """Mark the tokens of the text that have stored top-k tokens."""
        return self.known[text_index]

    @classmethod
    def of(cls, batch: DrafterBatch, vocabulary: DraftVocabulary) -> "TopTeacher":
        """Read the batch's top-k tokens. Raises ValueError if it has none."""
        if batch.top_tokens is None or batch.top_log_probs is None:
            raise ValueError(
                "the teacher top_k needs the target's top-k tokens, and the batch has none; distil with "
                "distill.top_logprobs, or train with train.teacher=full"
            )
        tokens = batch.top_tokens.flatten(0, 1).long()
        outputs, inside = vocabulary.outputs(tokens.clamp(min=0).flatten())
        probs = batch.top_log_probs.flatten(0, 1).float().exp()
        return cls(
            outputs=outputs.view_as(tokens),
            inside=inside.view_as(tokens),
            probs=probs,
            known=tokens[:, 0] != UNKNOWN,
            reduced=vocabulary.tokens is not None,
            num_columns=vocabulary.num_outputs,
        )

    def outcomes(
        self, text: Int[torch.Tensor, " label"], log_q: Float[torch.Tensor, "label output"]
    ) -> tuple[Float[torch.Tensor, "label outcome"], Float[torch.Tensor, "label outcome"]]:
        """Return p and log q of the top-k tokens and, in the last column, of any other token."""
        probs, inside = self.probs[text], self.inside[text]
        top_log_q = log_q.gather(1, self.outputs[text])
        rest = (1 - probs.sum(1, keepdim=True)).clamp(min=LEAST_REST)
        rest_q = (1 - (top_log_q.exp() * inside).sum(1, keepdim=True)).clamp(min=LEAST_REST)
        log_q = torch.cat([top_log_q.masked_fill(~inside, math.log(TINY)), rest_q.log()], dim=1)
        return torch.cat([probs * inside, rest], dim=1), log_q
