"""Division of a loss's labels by what they are compared with, as index tensors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import nn

from ...data.bundles import Bundle, move_to
from ...data.types import DrafterBatch
from .labels import Labels
from .vocabulary import DraftVocabulary

Column = Shaped[torch.Tensor, "_ *_"] | Shaped[np.ndarray, "_ *_"]
"""Values of labels, on the device or on the host."""


def chunks(column: Column, size: int) -> Sequence[Column]:
    """Return chunks of `size` rows."""
    if isinstance(column, np.ndarray):
        return np.split(column, range(size, len(column), size))
    return column.split(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokens:
    """The token of the text after which each label follows, for a teacher's distribution.

    Labels are in the order of the text. So labels of one token are adjacent, and share an entry of
    `tokens`: label n has entry `entry[n]`.
    """

    tokens: Int[torch.Tensor, " token"]
    """Indexes among all batch x seq tokens, each once."""
    entry: Int[torch.Tensor, " label"]
    host_entry: Int[np.ndarray, " label"]

    @property
    def is_shared(self) -> bool:
        """Whether several labels share a token."""
        return len(self.tokens) < len(self.entry)

    def split(self, size: int) -> "list[TextTokens]":
        """Return chunks of `size` labels, each with the tokens of its labels only."""
        chunks = []
        for start in range(0, len(self.host_entry), size):
            host = self.host_entry[start : start + size]
            first, last = host[0], host[-1]
            entry = self.entry[start : start + size] - int(first)
            chunks.append(TextTokens(tokens=self.tokens[first : last + 1], entry=entry, host_entry=host - first))
        return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Labels whose losses are computed alike."""

    index: Int[torch.Tensor, " taken"] | None
    """Which of the known labels these are; None if they are all of them, in their order."""
    host_index: Int[np.ndarray, " taken"] | None
    text: TextTokens | None = None
    """Tokens of the text, for labels with a teacher."""

    def of(self, column: Column) -> Column:
        """Return the rows of this part, in its order."""
        if self.index is None or self.host_index is None:
            return column
        return column[self.host_index] if isinstance(column, np.ndarray) else column.index_select(0, self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """The known labels of a batch, divided. A part may have no labels."""

    alone: Part
    """Labels to be trained that are compared with the label alone."""
    taught: Part | None
    """Labels to be trained that have a teacher, in the order of the text; None without a teacher."""
    untrained: Part | None
    """Labels at untrained depths; None if all depths are trained."""
    order: Int[torch.Tensor, " label"] | None
    """Where each label is in all parts together; None if that is its own place."""

    @classmethod
    def of(
        cls,
        labels: Labels,
        knows: Callable[[Int[np.ndarray, " label"]], Bool[np.ndarray, " label"]] | None,
        trained_depths: int | None,
    ) -> "LossParts":
        """Divide the known labels.

        `knows` returns which labels have a teacher's distribution, of those on the text; None if
        there is no teacher. All indexes are moved to the device in one copy.
        """
        # 1. Which labels are in which part, on the host.
        known = labels.known_labels
        host, count = known.host, len(known.host.index)
        trained = np.ones(count, bool) if trained_depths is None else host.depth < trained_depths
        parts, alone, tokens = {}, trained, np.empty(0, np.int64)
        if knows is not None:
            in_text = host.in_text[trained[host.in_text]]
            text_index = host.text_index.ravel()[host.index[in_text]]
            has_teacher = knows(text_index)
            parts["taught"], tokens = in_text[has_teacher], text_index[has_teacher]
            alone = trained.copy()
            alone[parts["taught"]] = False
        if trained_depths is not None:
            parts["untrained"] = np.flatnonzero(~trained)
        if not parts:
            return cls(alone=Part(index=None, host_index=None), taught=None, untrained=None, order=None)
        parts = {"alone": np.flatnonzero(alone), **parts}
        # 2. Their tensors.
        is_first = np.diff(tokens, prepend=-1) != 0
        entry = is_first.cumsum() - 1
        order = np.empty(count, np.int64)
        order[np.concatenate(list(parts.values()))] = np.arange(count)
        bundle = Bundle.of({**parts, "order": order, "tokens": tokens[is_first], "entry": entry})
        moved = bundle.moved(move_to(labels.known.device)).tensors()
        made = {name: Part(index=moved[name], host_index=index) for name, index in parts.items()}
        if "taught" in made:
            text = TextTokens(tokens=moved["tokens"], entry=moved["entry"], host_entry=entry)
            made["taught"] = replace(made["taught"], text=text)
        return cls(alone=made["alone"], taught=made.get("taught"), untrained=made.get("untrained"), order=moved["order"])

    def in_order(self, values: Sequence[Shaped[torch.Tensor, " _"]]) -> Shaped[torch.Tensor, " label"]:
        """Return the values of all parts in the order of the labels."""
        return values[0] if self.order is None else torch.cat(list(values))[self.order]


# --- the target's distributions that a drafter learns from: over all tokens, or the top k


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

    def knows(self, index: Int[np.ndarray, " label"]) -> Bool[np.ndarray, " label"]:
        """Return which labels have a distribution: all."""
        return np.ones_like(index, dtype=bool)

    def outcomes(
        self, text: TextTokens, log_q: Float[torch.Tensor, "label output"]
    ) -> tuple[Float[torch.Tensor, "label output"], Float[torch.Tensor, "label output"]]:
        """Return p of the drafter's outputs, and `log_q` unchanged.

        In a reduced vocabulary p sums to less than 1. Labels of one token of the text share its
        distribution.
        """
        with torch.no_grad():
            logits: torch.Tensor = self.head(self.states[text.tokens].to(self.head.weight.dtype))
            probs = logits.float().softmax(1)
            probs = probs if self.vocabulary.tokens is None else probs[:, self.vocabulary.tokens]
            return probs[text.entry] if text.is_shared else probs, log_q


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
    known: Bool[np.ndarray, " token"]
    reduced: bool
    num_columns: int
    """Columns of the widest tensor that the teacher needs: the drafter's logits."""

    def knows(self, index: Int[np.ndarray, " label"]) -> Bool[np.ndarray, " label"]:
        """Return which labels have stored top-k tokens."""
        return self.known[index]

    @classmethod
    def of(cls, batch: DrafterBatch, vocabulary: DraftVocabulary) -> "TopTeacher":
        """Read the batch's top-k tokens. Raises ValueError if it has none."""
        has_top = batch.on_host.has_top
        if batch.top_tokens is None or batch.top_log_probs is None or has_top is None:
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
            known=has_top.ravel(),
            reduced=vocabulary.tokens is not None,
            num_columns=vocabulary.num_outputs,
        )

    def outcomes(
        self, text: TextTokens, log_q: Float[torch.Tensor, "label output"]
    ) -> tuple[Float[torch.Tensor, "label outcome"], Float[torch.Tensor, "label outcome"]]:
        """Return p and log q of the top-k tokens and, in the last column, of any other token."""
        tokens = text.tokens[text.entry]
        probs, inside = self.probs[tokens], self.inside[tokens]
        top_log_q = log_q.gather(1, self.outputs[tokens])
        rest = (1 - probs.sum(1, keepdim=True)).clamp(min=LEAST_REST)
        rest_q = (1 - (top_log_q.exp() * inside).sum(1, keepdim=True)).clamp(min=LEAST_REST)
        log_q = torch.cat([top_log_q.masked_fill(~inside, math.log(TINY)), rest_q.log()], dim=1)
        return torch.cat([probs * inside, rest], dim=1), log_q
