"""Regression of length buckets on likeness: the textbook's posterior, honest where lessons say nothing, and never singular."""

import math

import pytest
import torch

from outrider.distill.regenerate.lengths.buckets import NUM_BUCKETS
from outrider.distill.regenerate.lengths.gaussian import EDGES, LEAST_NOISE, LengthRegression


def likeness(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (-(left[:, None] - right[None, :]).square() / 2).exp()[None]


def make_lessons(count: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Places on a line, and the buckets of a sine of them."""
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(count, generator=generator) * 6
    scores = places.sin() + noise * torch.randn(count, generator=generator)
    return places, torch.bucketize(scores.double(), EDGES)


def test_the_posterior_is_that_of_the_textbook():
    places, buckets = make_lessons(40, 0.3)
    new = torch.linspace(0, 6, 7)
    regression = LengthRegression(likeness(places, places), buckets)
    probs = regression.predict(likeness(new, places), torch.ones(1, 7)).double()

    scores = torch.special.ndtri((buckets.double() + 0.5) / NUM_BUCKETS)
    lessons = regression.weights * likeness(places, places)[0].double() + regression.noise * torch.eye(40)
    to_lessons = regression.weights * likeness(new, places)[0].double()
    mean = scores.mean() + to_lessons @ torch.linalg.inv(lessons) @ (scores - scores.mean())
    variance = regression.weights + regression.noise - (to_lessons @ torch.linalg.inv(lessons) * to_lessons).sum(1)
    below = (1 + torch.erf((EDGES - mean[:, None]) / (2 * variance[:, None]).sqrt())) / 2
    expected = torch.cat([below, torch.ones(7, 1)], 1).diff(dim=1, prepend=torch.zeros(7, 1))
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)


def test_what_can_be_told_is_told_and_what_is_far_from_every_lesson_is_not():
    places, buckets = make_lessons(120, 0.2)
    regression = LengthRegression(likeness(places, places), buckets)
    new = torch.tensor([math.pi / 2, 3 * math.pi / 2, 100.0])
    probs = regression.predict(likeness(new, places), torch.ones(1, 3))
    torch.testing.assert_close(probs.sum(1), torch.ones(3))
    high, low, unknown = (probs @ torch.arange(NUM_BUCKETS).float()).tolist()
    assert high > 7
    assert low < 2
    assert 3 < unknown < 6
    assert probs[2].max() < 0.3 < probs[:2].max(1).values.min()


def test_lessons_without_a_pattern_are_taken_for_noise():
    places, _ = make_lessons(200, 0.0)
    buckets = torch.randint(0, NUM_BUCKETS, (200,), generator=torch.Generator().manual_seed(1))
    regression = LengthRegression(likeness(places, places), buckets)
    probs = regression.predict(likeness(places, places), torch.ones(1, 200))
    chance = probs.gather(1, buckets[:, None]).log().mean()
    assert float(regression.noise) > 0.7
    assert float(chance) > -math.log(NUM_BUCKETS) - 0.05
    assert float(probs.max()) < 0.3


@pytest.mark.parametrize("bucket", [0, 4, NUM_BUCKETS - 1])
def test_equal_lessons_are_not_singular(bucket):
    regression = LengthRegression(torch.ones(1, 50, 50), torch.full((50,), bucket))
    probs = regression.predict(torch.ones(1, 2, 50), torch.ones(1, 2))
    assert probs.argmax(1).tolist() == [bucket, bucket]
    assert float(regression.noise) >= LEAST_NOISE


def test_a_single_lesson_is_enough_to_go_on():
    probs = LengthRegression(torch.ones(2, 1, 1), torch.tensor([3])).predict(torch.ones(2, 1, 1), torch.ones(2, 1))
    assert probs.argmax() == 3
