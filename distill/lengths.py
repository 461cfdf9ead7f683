"""How long answers will be: predictors of ten length buckets, and the reservations made of them (S3, arXiv 2306.06000).

A predictor gives each request a probability for each bucket. The buckets' edges are the deciles of the lengths that it has
learnt from: S3 cuts the maximum length into ten equal parts, most of which are empty where most answers are far shorter than
the maximum. Reserved is a quantile of the predicted distribution, since the upper end of the likeliest bucket alone would say
nothing of how sure the predictor is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import nn

from .engine import Request

NUM_BUCKETS = 10

LEARN_FIRST = 32
"""Lengths that a predictor first learns from; it learns again whenever there are twice as many."""


@runtime_checkable
class LengthPredictor(Protocol):
    """Says in which bucket of lengths an answer will be. Deterministic: the same lessons give the same predictions."""

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        """Forget everything and learn the buckets of these requests' answers."""

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        """The probability of each bucket. Asked for after `learn` only."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ranges of answer lengths: bucket k holds those above `ends[k - 1]`, up to and with `ends[k]`."""

    ends: Float[torch.Tensor, " bucket"]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Buckets":
        """The deciles of `lengths`. Where many answers are equally long, some buckets are empty."""
        shares = torch.arange(1, NUM_BUCKETS + 1, dtype=torch.float64) / NUM_BUCKETS
        return cls(torch.tensor(lengths, dtype=torch.float64).quantile(shares))

    def index(self, lengths: Sequence[int]) -> Int[torch.Tensor, " request"]:
        """The bucket of each length; what is beyond the last end is in the last bucket."""
        return torch.bucketize(torch.tensor(lengths, dtype=torch.float64), self.ends).clamp(max=NUM_BUCKETS - 1)

    def quantile(self, probs: Float[torch.Tensor, "request bucket"], share: float) -> list[int]:
        """The length, rounded up, that an answer keeps to with probability `share`, were lengths uniform within buckets.

        Buckets that end at 10 and 30 with probabilities 0.5 and 0.5 have the quantiles 5 at 0.25 and 20 at 0.75.
        """
        upto = probs.double().cumsum(1)
        bucket = (upto < share).sum(1).clamp(max=NUM_BUCKETS - 1)
        starts = nn.functional.pad(self.ends, (1, 0))[:-1]
        row = torch.arange(len(probs))
        within = 1 - (upto[row, bucket] - share) / probs.double()[row, bucket].clamp(min=1e-9)
        tokens = starts[bucket] + within.clamp(0, 1) * (self.ends - starts)[bucket]
        return [max(1, math.ceil(value)) for value in tokens.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An answer that was given before: what a predictor may start from."""

    request: Request
    num_tokens: int


class Predicted:
    """Reservations by predicted length, for one call's `requests` (see `schedule.Reservation`).

    Reserved is `part` of the length that an answer keeps to with probability `share`. It starts from the lengths of `seen`, the
    same in every call. Fewer than LEARN_FIRST of them predict nothing: each answer then gets `unknown` tokens. It learns
    again, from all it knows, whenever the number of answers has doubled. Unfinished ones count as long as they are reserved for
    by then, so that long answers aren't missing; those that outgrew what was predicted, the mistakes, count twice.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        requests: Sequence[Request],
        *,
        share: float,
        unknown: int,
        part: float = 1.0,
        seen: Sequence[Seen] = (),
    ) -> None:
        self.predictor = predictor
        self.requests = requests
        self.share = share
        self.part = part
        self.unknown = unknown
        self.seen = seen
        self.first_buckets: dict[int, int] = {}
        """The first bucket predicted of each request."""
        self.buckets: Buckets | None = None
        self._num_learnt = LEARN_FIRST // 2
        self._predicted: dict[int, int] = {}

    def reserve(self, indices: Sequence[int]) -> list[int]:
        if self.buckets is None:
            self.observe({}, {})  # what was seen before may do
        reserved = predicted = [self.unknown] * len(indices)
        if self.buckets is not None and indices:
            probs = self.predictor.predict([self.requests[index] for index in indices])
            self.first_buckets = dict(zip(indices, probs.argmax(1).tolist(), strict=True)) | self.first_buckets
            predicted = self.buckets.quantile(probs, self.share)
            reserved = [math.ceil(self.part * tokens) for tokens in predicted]
        self._predicted |= dict(zip(indices, predicted, strict=True))
        return reserved

    def compare(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """The buckets that were predicted first, where any were, and those of the `lengths` that all answers had."""
        if self.buckets is None:
            return [], []
        actual = self.buckets.index(lengths).tolist()
        indices = sorted(self.first_buckets)
        return [self.first_buckets[index] for index in indices], [actual[index] for index in indices]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        known = len(self.seen) + len(lengths) + len(unfinished)
        if known < 2 * self._num_learnt:
            return False
        self._num_learnt = known
        answers = {**lengths, **unfinished}
        lessons = [(lesson.request, lesson.num_tokens) for lesson in self.seen]
        for index in sorted(answers):
            is_mistake = answers[index] > self._predicted[index]
            lessons += [(self.requests[index], answers[index])] * (2 if is_mistake else 1)
        if self.buckets is None:
            self.buckets = Buckets.of([num_tokens for _, num_tokens in lessons])
        self.predictor.learn([request for request, _ in lessons], self.buckets.index([tokens for _, tokens in lessons]))
        return True
