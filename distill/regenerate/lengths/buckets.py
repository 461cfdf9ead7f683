"""Predicted answer lengths in ten buckets, and reservations from them.

After S3 (arXiv 2306.06000). A predictor returns a probability of each bucket for each request. The
edges of the buckets are the deciles of the lengths known when the predictor last learned. An
unfinished answer counts as longer than its tokens so far. S3 instead cuts the maximum length into
ten equal parts; most of these are empty if answers are far shorter than the maximum. We reserve a
quantile of the predicted distribution. The upper end of the most probable bucket would not show how
certain the predictor is.
"""

import copy
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import nn

from ..engine import Request
from .stopwatch import Stopwatch

NUM_BUCKETS = 10

LEARN_FIRST = 32
"""Complete answers before a predictor learns; it learns again whenever their number has doubled."""


@runtime_checkable
class LengthPredictor(Protocol):
    """Predictor of the bucket of an answer's length.

    Deterministic: it makes the same predictions after the same training data. `learn` replaces what
    was learned and changes nothing of it, so a shallow copy keeps its predictions.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Length of the answer to a request, as training data of a predictor."""

    request: Request
    num_tokens: int
    is_complete: bool = True
    """Whether the answer has this length; otherwise it has at least as many tokens."""
    is_mistake: bool = False
    """Whether the answer is longer than twice its prediction. Such a lesson counts twice."""


def learn(predictor: LengthPredictor, lessons: Sequence[Lesson]) -> Buckets:
    """Train a predictor, and return the buckets that it predicts.

    An unfinished answer gets the middle of the buckets in which it may still end; without it, long
    answers would be missing.
    """
    lengths = [lesson.num_tokens for lesson in lessons]
    buckets = Buckets.of(
        [lesson.num_tokens for lesson in lessons if lesson.is_complete],
        [lesson.num_tokens for lesson in lessons if not lesson.is_complete],
    )
    examples: list[Request] = []
    labels: list[int] = []
    for lesson, bucket in zip(lessons, buckets.index(lengths).tolist(), strict=True):
        times = 2 if lesson.is_mistake else 1
        examples += [lesson.request] * times
        labels += [bucket if lesson.is_complete else (bucket + NUM_BUCKETS) // 2] * times
    predictor.learn(examples, torch.tensor(labels))
    return buckets


@dataclass
class Experience:
    """Lessons that a predictor knows before a call; calls that share them learn them once."""

    make_predictor: Callable[[], LengthPredictor]
    lessons: Sequence[Lesson] = ()
    _recalled: tuple[LengthPredictor, Buckets | None] | None = field(default=None, init=False)

    def recall(self) -> tuple[LengthPredictor, Buckets | None]:
        """Return a predictor, with its buckets if the lessons have LEARN_FIRST complete answers."""
        if self._recalled is None:
            predictor = self.make_predictor()
            has_learned = num_complete(self.lessons) >= LEARN_FIRST
            self._recalled = predictor, learn(predictor, self.lessons) if has_learned else None
        predictor, buckets = self._recalled
        return copy.copy(predictor), buckets


def num_complete(lessons: Sequence[Lesson]) -> int:
    return sum(lesson.is_complete for lesson in lessons)


@dataclass
class Predicted:
    """Reservations by predicted length, for one call's `requests` (see `schedule.Reservation`).

    Reserves `part` x the `share`-quantile of the predicted length. Until LEARN_FIRST answers are
    known, the predicted length is that of the answer in the data set, or `unknown` if there is
    none.

    The predictor learns again, from all answers, whenever the number of complete ones has doubled.
    `lessons` are answers from before the call. If the predictor has learned them already, `buckets`
    are those that it predicts.
    """

    predictor: LengthPredictor
    requests: Sequence[Request]
    _: KW_ONLY
    share: float
    unknown: int
    part: float = 1.0
    lessons: Sequence[Lesson] = ()
    buckets: Buckets | None = None
    learning: Stopwatch = field(default_factory=Stopwatch)
    """Time of learning and predicting."""
    _first: dict[int, tuple[Buckets, int]] = field(default_factory=dict, init=False)
    """First predicted bucket of each request, with the buckets at that time."""
    _num_learnt: int = field(init=False)
    _predicted: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        num_learnt = 0 if self.buckets is None else num_complete(self.lessons)
        self._num_learnt = max(num_learnt, LEARN_FIRST // 2)

    def reserve(self, indices: Sequence[int]) -> list[int]:
        with self.learning:
            return self._reserve(indices) if indices else []

    def _reserve(self, indices: Sequence[int]) -> list[int]:
        requests = [self.requests[index] for index in indices]
        if self.buckets is not None:
            probs = self.predictor.predict(requests)
            for index, bucket in zip(indices, probs.argmax(1).tolist(), strict=True):
                self._first.setdefault(index, (self.buckets, bucket))
            predicted = self.buckets.quantile(probs, self.share)
        else:
            # Divided by `part`, so that `unknown` tokens are reserved.
            predicted = [request.num_known_tokens or math.ceil(self.unknown / self.part) for request in requests]
        self._predicted |= dict(zip(indices, predicted, strict=True))
        return [max(1, math.ceil(self.part * tokens)) for tokens in predicted]

    def compare(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the first predicted buckets, and the actual buckets of the same answers."""
        first = sorted(self._first.items())
        return [bucket for _, (_, bucket) in first], [int(buckets.index([lengths[index]])) for index, (buckets, _) in first]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        num_known = num_complete(self.lessons) + len(lengths)
        if num_known < 2 * self._num_learnt:
            return False
        self._num_learnt = num_known
        answers = [
            Lesson(
                request=self.requests[index],
                num_tokens=num_tokens,
                is_complete=index in lengths,
                is_mistake=num_tokens > 2 * self._predicted[index],
            )
            for index, num_tokens in sorted({**lengths, **unfinished}.items())
        ]
        with self.learning:
            self.buckets = learn(self.predictor, [*self.lessons, *answers])
        return True
