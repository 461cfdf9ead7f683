"""Predicted answer lengths in ten buckets, and reservations from them.

After S3 (arXiv 2306.06000). A predictor returns a probability of each bucket for each request. The
edges of the buckets are the deciles of the lengths known when the predictor last learned. An
unfinished answer counts as longer than its tokens so far. S3 instead cuts the maximum length into
ten equal parts; most of these are empty if answers are far shorter than the maximum. We reserve a
quantile of the predicted distribution. The upper end of the most probable bucket would not show how
certain the predictor is.
"""

import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from ..engine import Request

NUM_BUCKETS = 10

LEARN_FIRST = 32
"""Complete answers before a predictor learns; it learns again whenever their number has doubled."""


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


MAX_EXAMPLES = 512
"""Most examples to learn from, sampled evenly from more: the cost grows with the cube of their
number."""

MAX_WORDS = 16384
"""Most features: the most frequent tokens and pairs of tokens."""

READ_TOKENS = (None, 6)
"""Tokens to read: the whole prompt, and its start, which often has the instruction (write, list,
how many)."""

EDGES = torch.special.ndtri(torch.arange(1, NUM_BUCKETS, dtype=torch.float64) / NUM_BUCKETS)
"""Scores between buckets: a standard normal score falls into each bucket equally often."""

LEAST_NOISE = 0.2
"""Least noise, for scores with a variance of about 1: no prompt determines a length, and buckets of
unfinished answers are guesses."""

LEAST_DEVIATION = 1e-3
"""Least deviation of logarithms of lengths, which may all be equal."""


class LightPredictor:
    """Compares prompts by their words, their lengths, and the lengths of the data's answers.

    Words are tokens and pairs of neighbouring tokens; rare words count more. Learning from hundreds
    of answers takes some seconds on a CPU.

    It has few examples, lengths are ordered, and the uncertainty of a prediction matters as much as the
    prediction. So a bucket's number becomes a score of a standard normal distribution. A Gaussian process
    with a linear kernel predicts this score and its standard deviation.
    """

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        """Learn the buckets of these requests' answers from scratch."""
        # These imports take a second, and only this predictor needs them.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel

        selected = torch.linspace(0, len(requests) - 1, min(len(requests), MAX_EXAMPLES)).long()
        requests = [requests[index] for index in selected.tolist()]
        # 1. Fit the features: how rare each word is, and mean and deviation of the lengths.
        prompts = [request.prompt_ids.tolist() for request in requests]
        self._words: list[Any] = [
            TfidfVectorizer(analyzer=partial(_words, count=count), sublinear_tf=True, min_df=2, max_features=MAX_WORDS).fit(
                prompts
            )
            for count in READ_TOKENS
        ]
        lengths = np.ma.masked_invalid(_lengths(requests))
        self._means, self._deviations = lengths.mean(0).filled(0), lengths.std(0).filled(0).clip(LEAST_DEVIATION)
        # 2. Fit the regression: kernel weight and noise maximise the likelihood of the examples.
        scores = torch.special.ndtri((buckets[selected].double() + 0.5) / NUM_BUCKETS)
        noise = WhiteKernel(noise_level_bounds=(LEAST_NOISE, 10.0))
        kernel = ConstantKernel() * DotProduct(sigma_0_bounds="fixed") + noise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # raised for a weight at its bound
            self._regression: Any = GaussianProcessRegressor(kernel).fit(self._features(requests), scores.numpy())

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        """Return the probability of each bucket. Called only after `learn`."""
        probs = []
        for start in range(0, len(requests), MAX_EXAMPLES):
            mean, deviation = self._regression.predict(self._features(requests[start : start + MAX_EXAMPLES]), return_std=True)
            below = torch.special.ndtr((EDGES - torch.from_numpy(mean)[:, None]) / torch.from_numpy(deviation)[:, None])
            bounds = torch.nn.functional.pad(below, (1, 1))
            bounds[:, -1] = 1
            probs.append(bounds.diff(dim=1).float())
        return torch.cat(probs)

    def _features(self, requests: Sequence[Request]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a row of features per request; an unknown length becomes the mean."""
        prompts = [request.prompt_ids.tolist() for request in requests]
        lengths = np.nan_to_num((_lengths(requests) - self._means) / self._deviations)
        return np.hstack([*(words.transform(prompts).toarray() for words in self._words), lengths])


def _words(ids: list[int], count: int | None) -> list[tuple[int, ...]]:
    """Return tokens and pairs of the first `count` tokens, and a word that all have."""
    ids = ids[:count]
    return [(), *((token,) for token in ids), *pairwise(ids)]


def _lengths(requests: Sequence[Request]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return logarithms of the lengths of prompts and of the data's answers, or NaN."""
    known = [math.nan if request.num_known_tokens is None else math.log1p(request.num_known_tokens) for request in requests]
    return np.array([[math.log1p(len(request.prompt_ids)), length] for request, length in zip(requests, known, strict=True)])


@dataclass
class Predicted:
    """Reservations by predicted length, for one call's `requests` (see `schedule.Reservation`).

    Reserves `part` x the `share`-quantile of the predicted length. Until LEARN_FIRST answers are
    known, the predicted length is that of the answer in the data set, or `unknown` if there is
    none.

    The predictor learns again, from all answers, whenever the number of complete ones has doubled.
    """

    predictor: LightPredictor
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
