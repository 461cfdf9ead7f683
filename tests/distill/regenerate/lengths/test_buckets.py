"""Buckets of lengths, predictors, and the reservations that follow from them."""

import random
import statistics
from dataclasses import replace

import pytest
import torch

from outrider.distill.regenerate.engine import Request
from outrider.distill.regenerate.lengths.buckets import LEARN_FIRST, NUM_BUCKETS, Buckets, LightPredictor, Predicted
from outrider.distill.regenerate.lengths.schedule import SHORTEST, Decoded, supervise

SHORT, LONG = 70, 200
"""First tokens of prompts with short and with long answers."""


def make_requests(count: int, *, known: bool = False) -> list[Request]:
    draw = random.Random(count)
    requests = []
    for index in range(count):
        ids = [SHORT if index % 2 else LONG, *(draw.randrange(100, 190) for _ in range(draw.randint(3, 12)))]
        length = (5 if index % 2 else 80) if known else None
        requests.append(Request(id=f"{count}/{index}", prompt_ids=torch.tensor(ids), seed=0, num_known_tokens=length))
    return requests


def lengths_of(count: int) -> list[int]:
    draw = random.Random(-count)
    return [draw.randint(1, 10) if index % 2 else draw.randint(60, 100) for index in range(count)]


def test_buckets_are_deciles_and_the_last_is_open():
    buckets = Buckets.of(range(1, 101))
    assert buckets.index([1, 10, 11, 95, 100, 5000]).tolist() == [0, 0, 1, 9, 9, 9]
    counts = torch.bincount(buckets.index(list(range(1, 101))), minlength=NUM_BUCKETS)
    assert counts.tolist() == [10] * NUM_BUCKETS


def test_quantiles_interpolate_within_buckets():
    buckets = Buckets(torch.arange(1, 11, dtype=torch.float64) * 10)
    probs = torch.zeros(2, NUM_BUCKETS)
    probs[0, 3] = 1.0
    probs[1, [0, 9]] = 0.5
    assert buckets.quantile(probs, 0.5) == [35, 10]
    assert buckets.quantile(probs, 0.75) == [38, 95]
    assert buckets.quantile(probs, 1.0) == [40, 100]


def test_quantiles_are_correct_with_empty_buckets():
    buckets = Buckets.of([7] * 40)
    assert buckets.quantile(torch.full((1, NUM_BUCKETS), 1 / NUM_BUCKETS), 0.5) in ([1], [7])
    assert buckets.index([7, 8]).tolist() == [0, 9]


def test_the_light_predictor_learns_lengths_from_prompts():
    predictor = LightPredictor()
    buckets = Buckets.of(lengths_of(96))
    predictor.learn(make_requests(96), buckets.index(lengths_of(96)))
    probs = predictor.predict(make_requests(40))
    assert probs.shape == (40, NUM_BUCKETS)
    assert torch.allclose(probs.sum(1), torch.ones(40), atol=1e-5)
    medians = buckets.quantile(probs, 0.5)
    assert statistics.mean(medians[0::2]) > 2 * statistics.mean(medians[1::2])


def test_predictions_depend_only_on_the_last_training_data():
    first, second = LightPredictor(), LightPredictor()
    second.learn(make_requests(32), torch.zeros(32, dtype=torch.long))
    second.predict(make_requests(8))
    before = torch.get_rng_state()
    for predictor in (first, second):
        predictor.learn(make_requests(40), torch.arange(40) % 10)
    assert torch.equal(first.predict(make_requests(8)), second.predict(make_requests(8)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_length_of_the_old_answer_is_used_as_a_feature():
    requests = make_requests(64, known=True)
    blind = [Request(id=r.id, prompt_ids=torch.tensor([9]), seed=0, num_known_tokens=r.num_known_tokens) for r in requests]
    predictor = LightPredictor()
    buckets = Buckets.of(lengths_of(64))
    predictor.learn(blind, buckets.index(lengths_of(64)))
    medians = buckets.quantile(predictor.predict(blind), 0.5)
    assert min(medians[0::2]) > max(medians[1::2])


def test_prompts_without_common_words_are_predicted_by_their_lengths():
    lessons = [Request(id=str(k), prompt_ids=torch.arange(3 * k, 3 * k + 3 + k % 2 * 40), seed=0) for k in range(0, 4000, 100)]
    predictor = LightPredictor()
    predictor.learn(lessons, torch.tensor([9 if index % 2 else 0 for index in range(40)]))
    probs = predictor.predict([Request(id="none", prompt_ids=torch.tensor([99999]), seed=0)])
    assert torch.allclose(probs.sum(1), torch.ones(1), atol=1e-5)


def test_the_light_predictor_limits_its_training_data(monkeypatch):
    monkeypatch.setattr("outrider.distill.regenerate.lengths.buckets.MAX_EXAMPLES", 20)
    predictor = LightPredictor()
    buckets = Buckets.of(lengths_of(96))
    predictor.learn(make_requests(96), buckets.index(lengths_of(96)))
    assert len(predictor._regression.X_train_) == 20
    assert predictor.predict(make_requests(50)).shape == (50, NUM_BUCKETS)


class Recorder(LightPredictor):
    """Predictor that returns the first bucket and records its training data."""

    def __init__(self) -> None:
        self.lessons: list[list[tuple[str, int]]] = []

    def learn(self, requests: list[Request], buckets: torch.Tensor) -> None:
        self.lessons.append([(request.id, bucket) for request, bucket in zip(requests, buckets.tolist(), strict=True)])

    def predict(self, requests: list[Request]) -> torch.Tensor:
        return torch.eye(NUM_BUCKETS)[:1].expand(len(requests), -1)


def test_the_predictor_learns_whenever_the_number_of_answers_has_doubled():
    recorder, requests = Recorder(), make_requests(200)
    predicted = Predicted(recorder, requests, share=0.5, unknown=17)
    assert predicted.reserve(range(200)) == [17] * 200
    learnt_at = [num for num in range(1, 201) if predicted.observe(dict.fromkeys(range(num), 9), {})]
    assert learnt_at == [LEARN_FIRST, 2 * LEARN_FIRST, 4 * LEARN_FIRST]
    assert [len(lessons) for lessons in recorder.lessons] == learnt_at


def test_unfinished_answers_count_as_longer_and_mistakes_count_twice():
    recorder, requests = Recorder(), make_requests(LEARN_FIRST + 3)
    predicted = Predicted(recorder, requests, share=0.5, unknown=15)
    predicted.reserve(range(LEARN_FIRST + 3))
    lengths = {index: index + 1 for index in range(LEARN_FIRST)}
    # Only complete answers have known lengths.
    assert not predicted.observe({0: 1}, dict.fromkeys(range(1, LEARN_FIRST + 3), 9))
    assert predicted.observe(lengths, {LEARN_FIRST: 1, LEARN_FIRST + 1: 31, LEARN_FIRST + 2: 32})
    last = NUM_BUCKETS - 1
    num_mistakes = LEARN_FIRST - 2 * 15  # complete answers longer than twice their reservation
    assert recorder.lessons[0][0] == (requests[0].id, 0)
    assert recorder.lessons[0][LEARN_FIRST + num_mistakes :] == [
        (requests[LEARN_FIRST].id, NUM_BUCKETS // 2),
        *[(requests[LEARN_FIRST + 1].id, last)] * 2,
        *[(requests[LEARN_FIRST + 2].id, last)] * 2,
    ]


def test_unfinished_answers_increase_the_deciles():
    assert Buckets.of([1, 2, 3, 4, 5]).ends.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    ends = Buckets.of([1, 2, 3, 4, 5], [5] * 5).ends.tolist()
    assert ends[:4] == [1, 2, 3, 4]
    # The fifth decile is at 5, and the rest is extrapolated.
    assert ends[4:] == pytest.approx([4 + 1 * k for k in range(1, 7)])
    # Half of all answers are unfinished at 2 tokens. The two longer complete ones give their
    # distribution.
    assert Buckets.of([1, 1, 3, 4], [2, 2, 2, 2]).ends.tolist() == [1, 1, 3, 3, 3, 3, 4, 4, 4, 4]


def test_predictions_of_a_cold_start_end_up_near_the_true_lengths():
    """Bucket edges once came from the reservations of the first unfinished answers, for good."""
    draw = random.Random(5)
    requests = make_requests(400)
    lengths = [draw.randint(20, 60) if index % 2 else draw.randint(300, 500) for index in range(400)]
    predictor = Predicted(LightPredictor(), requests, share=0.5, unknown=64, part=0.5)

    def decode(batch, limits, least):
        new = [min(lengths[row.index] - row.num_written, limit) for row, limit in zip(batch, limits, strict=True)]
        return [Decoded(num_new=n, ended=row.num_written + n == lengths[row.index]) for n, row in zip(new, batch, strict=True)]

    # Padded batches, since then the last learning comes late.
    policy = replace(SHORTEST, least_share=0.0, held_budgets=None, most_padded=None)
    list(supervise([len(request.prompt_ids) for request in requests], [1000] * 400, policy, predictor, decode, budget=8000))
    assert predictor.buckets is not None
    error = (predictor.buckets.ends - Buckets.of(lengths).ends).abs()
    assert float(error[:8].max()) < 20  # at the last learning, the longest answers are unfinished
    assert predictor.buckets.ends[-1] < 1000
    again = predictor.buckets.quantile(predictor.predictor.predict(requests), 0.5)
    assert max(again[1::2]) < 150 < min(again[0::2])


def test_before_learning_the_predicted_length_is_that_of_the_old_answer():
    requests = [*make_requests(2, known=True), make_requests(1)[0]]
    predicted = Predicted(Recorder(), requests, share=0.5, unknown=17, part=0.5)
    assert predicted.reserve([0, 1, 2]) == [40, 3, 17]


def test_a_part_is_reserved_and_a_mistake_is_twice_the_predicted_length():
    recorder, requests = Recorder(), make_requests(LEARN_FIRST)
    predicted = Predicted(recorder, requests, share=1.0, unknown=12, part=0.3)
    assert predicted.reserve(range(LEARN_FIRST)) == [12] * LEARN_FIRST
    assert predicted.observe({index: 80 + index // 16 for index in range(LEARN_FIRST)}, {})
    assert len(recorder.lessons[-1]) == LEARN_FIRST + 16


def test_later_requests_are_predicted_by_the_learned_buckets():
    predicted = Predicted(Recorder(), make_requests(43), share=1.0, unknown=17)
    predicted.reserve(range(43))
    assert predicted.observe({index: 10 * (index + 1) for index in range(40)}, {})
    assert predicted.reserve([40, 41, 42]) == [40, 40, 40]  # the first decile of 10, 20, ... 400
