"""The predictor of answer lengths, which learns from similar prompts.

It has few examples, lengths are ordered, and the uncertainty of a prediction matters as much
as the prediction. So a bucket's number becomes a score of a standard normal distribution. A
Gaussian process with a linear kernel predicts this score and its standard deviation.
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
    """

    def learn(self, requests: Sequence[Request], buckets: Int[torch.Tensor, " request"]) -> None:
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
