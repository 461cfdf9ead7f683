"""Prediction of an answer's length by those of the answers to like prompts: regression by a Gaussian process.

Lessons are few, lengths are ordered, and how sure a prediction is matters as much as the prediction
itself, so a bucket's number becomes a score of a standard normal distribution, which a Gaussian process
with a linear kernel predicts together with its standard deviation.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from ..engine import Request
from .buckets import NUM_BUCKETS

MOST_LESSONS = 512
"""Evenly taken of more: learning costs the cube of their number."""

MOST_WORDS = 16384
"""The commonest tokens and pairs of tokens."""

READ_TOKENS = (None, 6)
"""Whole prompts, and their openings: what is asked for mostly comes first (write, list, what, how many)."""

EDGES = torch.special.ndtri(torch.arange(1, NUM_BUCKETS, dtype=torch.float64) / NUM_BUCKETS)
"""Scores between buckets: a standard normal score falls into each bucket equally often."""

LEAST_NOISE = 0.2
"""Of the scores' variance of about 1: no prompt says all about a length, and unfinished answers' buckets are guesses."""

LEAST_DEVIATION = 1e-3
"""Of logarithms of lengths, which may all be equal."""


class LightPredictor:
    """Compares prompts by their words, their lengths, and the lengths of the answers that the data has.

    Words are tokens and pairs of neighbours, and rare ones count more. It learns from hundreds of answers in
    some seconds on a CPU.
    """

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
        # They take a second, and only this predictor needs them.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel

        taken = torch.linspace(0, len(requests) - 1, min(len(requests), MOST_LESSONS)).long()
        requests = [requests[index] for index in taken.tolist()]
        # 1. What the lessons say of words (how rare each is) and of lengths (mean and deviation).
        prompts = [request.prompt_ids.tolist() for request in requests]
        self._words: list[Any] = [
            TfidfVectorizer(analyzer=partial(_words, count=count), sublinear_tf=True, min_df=2, max_features=MOST_WORDS).fit(
                prompts
            )
            for count in READ_TOKENS
        ]
        lengths = np.ma.masked_invalid(_lengths(requests))
        self._means, self._deviations = lengths.mean(0).filled(0), lengths.std(0).filled(0).clip(LEAST_DEVIATION)
        # 2. The kernel's weight and the noise are those under which the lessons are likeliest.
        scores = torch.special.ndtri((buckets[taken].double() + 0.5) / NUM_BUCKETS)
        noise = WhiteKernel(noise_level_bounds=(LEAST_NOISE, 10.0))
        kernel = ConstantKernel() * DotProduct(sigma_0_bounds="fixed") + noise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a weight at its bound does
            self._regression: Any = GaussianProcessRegressor(kernel).fit(self._features(requests), scores.numpy())

    def predict(self, requests: Sequence[Request]) -> Float[torch.Tensor, "request bucket"]:
        probs = []
        for start in range(0, len(requests), MOST_LESSONS):
            mean, deviation = self._regression.predict(self._features(requests[start : start + MOST_LESSONS]), return_std=True)
            below = torch.special.ndtr((EDGES - torch.from_numpy(mean)[:, None]) / torch.from_numpy(deviation)[:, None])
            bounds = torch.nn.functional.pad(below, (1, 1))
            bounds[:, -1] = 1
            probs.append(bounds.diff(dim=1).float())
        return torch.cat(probs)

    def _features(self, requests: Sequence[Request]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a row per request; a length that isn't known is the mean one."""
        prompts = [request.prompt_ids.tolist() for request in requests]
        lengths = np.nan_to_num((_lengths(requests) - self._means) / self._deviations)
        return np.hstack([*(words.transform(prompts).toarray() for words in self._words), lengths])


def _words(ids: list[int], count: int | None) -> list[tuple[int, ...]]:
    """Return the tokens and the pairs among the first `count` tokens, and a word that every prompt has."""
    ids = ids[:count]
    return [(), *((token,) for token in ids), *pairwise(ids)]


def _lengths(requests: Sequence[Request]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return logarithms of the lengths of the prompts and of the answers that the data has; NaN where it has none."""
    known = [math.nan if request.num_known_tokens is None else math.log1p(request.num_known_tokens) for request in requests]
    return np.array([[math.log1p(len(request.prompt_ids)), length] for request, length in zip(requests, known, strict=True)])
