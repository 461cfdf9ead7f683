"""A whole kind of drafter, as small as one can be: it reads the last hidden state and the last token."""

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import nn

from outrider.data.fields import OPTIONS, PositiveInt
from outrider.models.drafters.base import LastStateDrafter
from outrider.models.drafters.beams import beam_search
from outrider.models.drafters.labels import Labels
from outrider.models.drafters.scoring import score


@dataclass(kw_only=True, config=OPTIONS)
class PairsConfig:
    width: PositiveInt = 3
    length: PositiveInt = 4
    RUNTIME_FIELDS: ClassVar[frozenset[str]] = frozenset({"width", "length"})


class Pairs(LastStateDrafter):
    """Predicts the next token from the target's hidden state and from the token before."""

    Config = PairsConfig

    def __init__(self, config, target):
        super().__init__()
        self.config, self.vocab_size, self._embed_tokens = config, target.vocab_size, (target.embed_tokens,)
        self.head = nn.Linear(2 * target.hidden_size, target.vocab_size)

    @classmethod
    def for_target(cls, config, target):
        return cls(config, target)

    @property
    def max_nodes(self):
        return self.config.width * self.config.length

    def search(self, state, last_token, *, generator=None):
        hidden = state[:, None].expand(-1, self.config.length, -1)
        return beam_search(self, hidden, last_token, width=self.config.width), None

    def embed(self, tokens):
        return self._embed_tokens[0](tokens).to(self.head.weight.dtype)

    def first_state(self, embedding):
        return embedding

    def next_state(self, state, embedding):
        return embedding

    def logits(self, hidden, state):
        return self.head(torch.cat([hidden.to(state.dtype), state], dim=-1))

    def loss(self, batch, objective):
        labels = Labels.of(batch)
        hidden = labels.at_positions(batch.hidden_states)[:, None].expand(-1, labels.tokens.shape[1], -1)
        inputs = hidden, self.embed(labels.inputs)
        return score(self.logits, inputs, labels, batch, objective, vocabulary=self.vocabulary)
