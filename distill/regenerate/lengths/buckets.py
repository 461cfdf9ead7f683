"""Predicted lengths of answers in ten buckets, and reservations made of them (S3, arXiv 2306.06000).

A predictor gives each request a probability for each bucket. The edges of the buckets are the deciles of
the lengths that were known when the predictor last learned; an unfinished answer counts as longer than its
tokens so far. S3 instead cuts the maximum length into ten equal parts, and most of these are empty where
answers are far shorter than the maximum. We reserve a quantile of the predicted distribution: the upper end
of the likeliest bucket would not show how sure the predictor is.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import nn

from ..engine import Request

NUM_BUCKETS = 10

LEARN_FIRST = 32
"""Complete answers that a predictor first learns from; it learns again whenever there are twice as many."""


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
    def of(cls, lengths: Sequence[int], unfinished: Sequence[int] = ()) -> "Buckets":
        """The deciles of complete answers' `lengths` and of `unfinished` ones, which have so many tokens so far.

        The share of answers that are longer than so many tokens is Kaplan and Meier's (1958). Deciles beyond the longest
        complete answer lie evenly from there up to twice the longest. Where many answers are equally long, buckets are empty.
        """
        longer = 1.0
        ends: list[float] = []
        every = sorted([*lengths, *unfinished])
        for length, count in sorted(Counter(lengths).items()):
            longer *= 1 - count / (len(every) - bisect_left(every, length))
            while len(ends) < NUM_BUCKETS and 1 - longer >= (len(ends) + 1) / NUM_BUCKETS - 1e-9:
                ends.append(float(length))
        last = ends[-1] if ends else 0.0
        step = (2 * max([*lengths, *unfinished]) - last) / max(1, NUM_BUCKETS - len(ends))
        ends += [last + step * (index + 1) for index in range(NUM_BUCKETS - len(ends))]
        return cls(torch.tensor(ends, dtype=torch.float64))

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


@dataclass(slots=True)
class Predicted:
    """Reservations by predicted length, for one call's `requests` (see `schedule.Reservation`).

    Reserves `part` x the `share`-quantile of the predicted length. Until LEARN_FIRST answers are known,
    those of `seen` included: the length of the answer in the data set, or `unknown` if there is none.

    The predictor learns again, from all answers, whenever the number of complete ones has doubled. An
    unfinished answer counts for the middle of the buckets that it may still end in: without it, long answers
    would be missing. An answer that grew longer than twice its prediction counts twice.
    """

    predictor: LengthPredictor
    requests: Sequence[Request]
    _: KW_ONLY
    share: float
    unknown: int
    part: float = 1.0
    seen: Sequence[Seen] = ()
    buckets: Buckets | None = field(default=None, init=False)
    _first: dict[int, tuple[Buckets, int]] = field(default_factory=dict, init=False)
    """The first bucket that was predicted of each request, and among which buckets."""
    _num_learnt: int = field(default=LEARN_FIRST // 2, init=False)
    _predicted: dict[int, int] = field(default_factory=dict, init=False)

    def reserve(self, indices: Sequence[int]) -> list[int]:
        if self.buckets is None:
            self.observe({}, {})  # what was seen before may do
        if not indices:
            return []
        requests = [self.requests[index] for index in indices]
        if self.buckets is not None:
            probs = self.predictor.predict(requests)
            for index, bucket in zip(indices, probs.argmax(1).tolist(), strict=True):
                self._first.setdefault(index, (self.buckets, bucket))
            predicted = self.buckets.quantile(probs, self.share)
        else:
            # What is reserved where nothing is known is `unknown`.
            predicted = [request.num_known_tokens or math.ceil(self.unknown / self.part) for request in requests]
        self._predicted |= dict(zip(indices, predicted, strict=True))
        return [max(1, math.ceil(self.part * tokens)) for tokens in predicted]

    def compare(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """The buckets that were predicted first, where any were, and those of the `lengths` that all answers had."""
        first = sorted(self._first.items())
        return [bucket for _, (_, bucket) in first], [int(buckets.index([lengths[index]])) for index, (buckets, _) in first]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        num_complete = len(self.seen) + len(lengths)
        if num_complete < 2 * self._num_learnt:
            return False
        self._num_learnt = num_complete
        seen = [lesson.num_tokens for lesson in self.seen]
        self.buckets = Buckets.of([*seen, *lengths.values()], list(unfinished.values()))
        lessons = [lesson.request for lesson in self.seen]
        buckets = self.buckets.index(seen).tolist()
        answers = dict(sorted({**lengths, **unfinished}.items()))
        for index, bucket in zip(answers, self.buckets.index(list(answers.values())).tolist(), strict=True):
            times = 2 if answers[index] > 2 * self._predicted[index] else 1
            lessons += [self.requests[index]] * times
            buckets += [(bucket + NUM_BUCKETS) // 2 if index in unfinished else bucket] * times
        self.predictor.learn(lessons, torch.tensor(buckets))
        return True
