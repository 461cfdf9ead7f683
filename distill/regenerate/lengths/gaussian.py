"""Which length bucket an answer will be in, from how alike requests are: regression by a Gaussian process.

Lessons are few, lengths are ordered, and how sure a prediction is matters as much as the prediction itself. A Gaussian process
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5) gives all that in closed form. What is
left to choose, how much each kind of likeness counts and how much of a length nothing explains, is what makes the lessons
likeliest.
"""

import torch
from jaxtyping import Float, Int

from .buckets import NUM_BUCKETS

WEIGHED_LESSONS = 256
"""Lessons that weights are chosen on: they are a handful of numbers, and each try costs the cube of the lessons."""

LEAST_NOISE = 1e-3
"""Of the scores' variance of about 1: keeps alike lessons (a mistake counts twice) from being singular."""

PRIOR = 0.02
"""Weights are drawn to 1, logarithm 0, by this; it decides only where the lessons say nothing."""

EDGES = torch.special.ndtri(torch.arange(1, NUM_BUCKETS, dtype=torch.float64) / NUM_BUCKETS)
"""Scores between buckets: a standard normal score falls into each bucket equally often."""


class LengthRegression:
    """What lessons say of lengths: `similarities` [kind, lesson, lesson] between their requests, and their `buckets`.

    A similarity is a kernel: symmetric and positive semi-definite, about 1 between a request and itself.
    """

    def __init__(self, similarities: Float[torch.Tensor, "kind lesson lesson"], buckets: Int[torch.Tensor, " lesson"]) -> None:
        similarities = similarities.double()
        scores = torch.special.ndtri((buckets.double() + 0.5) / NUM_BUCKETS)
        self.mean = scores.mean()
        count = len(buckets)
        few = torch.linspace(0, count - 1, min(count, WEIGHED_LESSONS)).long()
        weights = likeliest_weights(similarities[:, few][:, :, few], scores[few] - self.mean)
        self.weights, self.noise = weights[:-1], weights[-1]
        self._factor = torch.linalg.cholesky(covariance(similarities, weights))
        self._solved = torch.cholesky_solve((scores - self.mean)[:, None], self._factor)[:, 0]

    def predict(
        self, similarities: Float[torch.Tensor, "kind request lesson"], own: Float[torch.Tensor, "kind request"]
    ) -> Float[torch.Tensor, "request bucket"]:
        """The probability of each bucket, from the similarities to the lessons and of each request to itself."""
        to_lessons = torch.einsum("k,krl->rl", self.weights, similarities.double())
        mean = self.mean + to_lessons @ self._solved
        explained = torch.linalg.solve_triangular(self._factor, to_lessons.T, upper=False).square().sum(0)
        variance = (self.weights @ own.double() - explained).clamp(min=0) + self.noise
        below = torch.special.ndtr((EDGES - mean[:, None]) / variance.sqrt()[:, None])
        bounds = torch.nn.functional.pad(below, (1, 1))
        bounds[:, -1] = 1
        return bounds.diff(dim=1).float()


def covariance(
    similarities: Float[torch.Tensor, "kind lesson lesson"], weights: Float[torch.Tensor, " kind_and_noise"]
) -> Float[torch.Tensor, "lesson lesson"]:
    noise = weights[-1] * torch.eye(similarities.shape[1], dtype=torch.float64)
    return torch.einsum("k,kij->ij", weights[:-1], similarities) + noise


def likeliest_weights(
    similarities: Float[torch.Tensor, "kind lesson lesson"], scores: Float[torch.Tensor, " lesson"]
) -> Float[torch.Tensor, " kind_and_noise"]:
    """A weight per kind of similarity and the variance of the noise, by the marginal likelihood (equation 5.8 there)."""
    logs = torch.full((len(similarities) + 1,), -1.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=20, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        factor = torch.linalg.cholesky(covariance(similarities, positive(logs)))
        whitened = torch.linalg.solve_triangular(factor, scores[:, None], upper=False)
        value = whitened.square().sum() / 2 + factor.diagonal().log().sum() + PRIOR * logs.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return positive(logs.detach())


def positive(logs: Float[torch.Tensor, " kind_and_noise"]) -> Float[torch.Tensor, " kind_and_noise"]:
    """Within bounds that no line search can overflow."""
    return logs.clamp(-12, 6).exp() + LEAST_NOISE
