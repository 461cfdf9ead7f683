"""Predicted answer lengths in ten buckets, and reservations from them.

After S3 (arXiv 2306.06000). A predictor returns a probability of each bucket for each request. The
edges of the buckets are the deciles of the lengths known when the predictor last learned. An
unfinished answer counts as longer than its tokens so far. S3 instead cuts the maximum length into
ten equal parts; most of these are empty if answers are far shorter than the maximum. We reserve a
quantile of the predicted distribution. The upper end of the most probable bucket would not show how
certain the predictor is.
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
"""Complete answers before a predictor learns; it learns again whenever their number has doubled."""


@runtime_checkable
class LengthPredictor(Protocol):
    """Predictor of the bucket of an answer's length.

    Deterministic: it makes the same predictions after the same training data. `learn` replaces what
    was learned before.
    """

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        """Learn the buckets of these requests' answers from scratch."""

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        """Return the probability of each bucket. Called only after `learn`."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ranges of answer lengths: bucket k ends with the length `ends[k]`."""

    ends: Float[torch.Tensor, " bucket"]

    @classmethod
    def of(cls, lengths: Sequence[int], unfinished: Sequence[int] = ()) -> "Buckets":
        """Build buckets that end at the deciles of answer lengths.

        `lengths` are those of complete answers; `unfinished` answers have at least their length.
        The share of answers longer than a number of tokens is estimated by the method of Kaplan and
        Meier (1958). Deciles beyond the longest complete answer are evenly spaced up to twice the
        longest length. If many answers are equally long, some buckets are empty.
        """
        longer = 1.0
        ends: list[float] = []
        all_lengths = sorted([*lengths, *unfinished])
        for length, count in sorted(Counter(lengths).items()):
            longer *= 1 - count / (len(all_lengths) - bisect_left(all_lengths, length))
            while len(ends) < NUM_BUCKETS and 1 - longer >= (len(ends) + 1) / NUM_BUCKETS - 1e-9:
                ends.append(float(length))
        last = ends[-1] if ends else 0.0
        step = (2 * max([*lengths, *unfinished]) - last) / max(1, NUM_BUCKETS - len(ends))
        ends += [last + step * (index + 1) for index in range(NUM_BUCKETS - len(ends))]
        return cls(torch.tensor(ends, dtype=torch.float64))

    def index(self, lengths: Sequence[int]) -> Int[torch.Tensor, " request"]:
        """Return the bucket of each length; the last bucket also holds all longer ones."""
        return torch.bucketize(torch.tensor(lengths, dtype=torch.float64), self.ends).clamp(max=NUM_BUCKETS - 1)

    def quantile(self, probs: Float[torch.Tensor, "request bucket"], share: float) -> list[int]:
        """Return the length, rounded up, that an answer doesn't exceed with probability `share`.

        Lengths are assumed to be uniform within buckets. Example: buckets that end at 10 and 30
        with probabilities 0.5 and 0.5 have the quantiles 5 at 0.25 and 20 at 0.75.
        """
        upto = probs.double().cumsum(1)
        bucket = (upto < share).sum(1).clamp(max=NUM_BUCKETS - 1)
        starts = nn.functional.pad(self.ends, (1, 0))[:-1]
        row = torch.arange(len(probs))
        within = 1 - (upto[row, bucket] - share) / probs.double()[row, bucket].clamp(min=1e-9)
        tokens = starts[bucket] + within.clamp(0, 1) * (self.ends - starts)[bucket]
        return [max(1, math.ceil(value)) for value in tokens.tolist()]


@dataclass
class Predicted:
    """Reservations by predicted length, for one call's `requests` (see `schedule.Reservation`).

    Reserves `part` x the `share`-quantile of the predicted length. Until LEARN_FIRST answers are
    known, the predicted length is that of the answer in the data set, or `unknown` if there is
    none.

    The predictor learns again, from all answers, whenever the number of complete ones has doubled.
    """

    predictor: LengthPredictor
    requests: Sequence[Request]
    _: KW_ONLY
    share: float
    unknown: int
    part: float = 1.0
    buckets: Buckets | None = field(default=None, init=False)
    """The buckets that the predictor predicts, once it has learned."""
    _num_learnt: int = field(default=LEARN_FIRST // 2, init=False)
    _predicted: dict[int, int] = field(default_factory=dict, init=False)

    def reserve(self, indices: Sequence[int]) -> list[int]:
        if not indices:
            return []
        requests = [self.requests[index] for index in indices]
        if self.buckets is not None:
            predicted = self.buckets.quantile(self.predictor.predict(requests), self.share)
        else:
            # Divided by `part`, so that `unknown` tokens are reserved.
            predicted = [request.num_known_tokens or math.ceil(self.unknown / self.part) for request in requests]
        self._predicted |= dict(zip(indices, predicted, strict=True))
        return [max(1, math.ceil(self.part * tokens)) for tokens in predicted]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        if len(lengths) < 2 * self._num_learnt:
            return False
        self._num_learnt = len(lengths)
        self._learn(lengths, unfinished)
        return True

    def _learn(self, lengths: dict[int, int], unfinished: dict[int, int]) -> None:
        """Train the predictor on the answers so far.

        An unfinished answer gets the middle of the buckets in which it may still end; without it,
        long answers would be missing. An answer longer than twice its prediction counts twice.
        """
        answers = sorted({**lengths, **unfinished}.items())
        self.buckets = Buckets.of(list(lengths.values()), list(unfinished.values()))
        examples: list[Request] = []
        labels: list[int] = []
        for (index, num_tokens), bucket in zip(answers, self.buckets.index([n for _, n in answers]).tolist(), strict=True):
            times = 2 if num_tokens > 2 * self._predicted[index] else 1
            examples += [self.requests[index]] * times
            labels += [bucket if index in lengths else (bucket + NUM_BUCKETS) // 2] * times
        self.predictor.learn(examples, torch.tensor(labels))
