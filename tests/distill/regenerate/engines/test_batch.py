"""Padded batches by predicted length: answers equal those of requests alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.batch import BatchEngine
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.distill.regenerate.lengths.buckets import Experience, Lesson
from outrider.distill.regenerate.lengths.light import LightPredictor
from outrider.distill.regenerate.lengths.policies import POLICIES
from outrider.distill.regenerate.lengths.schedule import ScheduleStatistics, kv_bytes_per_token
from outrider.models.decoding import Sampling
from outrider.models.drafters import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.llm.tree_cache import TreeCache

SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, top_p=0.95)]


@pytest.fixture
def exact_target(tiny_target_dir: Path) -> HFTarget:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu", dtype="float64"))
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = [3, *range(20, 30)]
    return target


@pytest.fixture
def many(requests: list[Request]) -> list[Request]:
    """Make so many requests that the predictor learns lengths during the run."""
    return [
        replace(request, id=f"{request.id}/{copy}", seed=100 * copy + request.seed) for copy in range(8) for request in requests
    ]


def make_engine(target: HFTarget, sampling: Sampling, limits: Limits, *, tokens: int = 200) -> BatchEngine:
    return BatchEngine(
        target,
        sampling=sampling,
        limits=limits,
        kv_budget_bytes=tokens * kv_bytes_per_token(target),
        experience=Experience(LightPredictor),
    )


def texts(engine: BatchEngine | DecoderEngine, requests: list[Request]) -> dict[str, tuple[list[int], bool]]:
    answers = {answer.id: (answer.tokens.tolist(), answer.cut) for answer in engine.answer(requests)}
    assert len(answers) == len(requests)
    return answers


def counts(engine: BatchEngine) -> list[ScheduleStatistics]:
    return [replace(it, seconds=0.0, moving_seconds=0.0, learning_seconds=0.0) for it in engine.statistics]


@pytest.mark.parametrize(
    "sampling", [pytest.param(SAMPLINGS[0], marks=pytest.mark.slow), SAMPLINGS[1]], ids=["greedy", "sampled"]
)
def test_evicted_rows_get_the_answers_of_requests_alone(
    exact_target: HFTarget, many: list[Request], limits: Limits, sampling: Sampling
) -> None:
    alone = DecoderEngine(exact_target, NullDrafter(), sampling=sampling, limits=limits, batch_size=1)
    engine = make_engine(exact_target, sampling, limits)
    actual = texts(engine, many)
    assert actual == texts(alone, many)
    assert {cut for _, cut in actual.values()} == {True, False}
    (statistics,) = engine.statistics
    assert statistics.num_evictions > 20
    assert statistics.num_predicted > 20
    assert statistics.num_answers == len(many)
    assert statistics.num_tokens == sum(len(tokens) for tokens, _ in actual.values())


@pytest.mark.slow
def test_batches_do_not_depend_on_earlier_calls(target: HFTarget, many: list[Request], limits: Limits) -> None:
    first, second = make_engine(target, SAMPLINGS[1], limits), make_engine(target, SAMPLINGS[1], limits)
    expected = [(answer.id, answer.tokens.tolist()) for answer in first.answer(many)]
    list(second.answer(many[30:]))
    second.statistics.clear()
    torch.manual_seed(3)
    assert [(answer.id, answer.tokens.tolist()) for answer in second.answer(many)] == expected
    assert counts(first) == counts(second)


def test_the_schedule_s3_gives_the_same_answers_in_other_batches(target: HFTarget, many: list[Request], limits: Limits) -> None:
    shortest = make_engine(target, SAMPLINGS[1], limits)
    s3 = replace(shortest, schedule=POLICIES["s3"], statistics=[])
    assert texts(s3, many[:22]) == texts(shortest, many[:22])
    (ours,), (theirs,) = shortest.statistics, s3.statistics
    assert ours.num_tokens == theirs.num_tokens
    assert ours.num_steps != theirs.num_steps
    assert 0 < theirs.num_evictions < ours.num_evictions  # S3 reserves more, and keeps a batch's last rows
    assert ours.mean_rows == ours.num_tokens / ours.num_steps


def test_seconds_are_split_into_generation_moving_and_learning(target: HFTarget, many: list[Request], limits: Limits) -> None:
    engine = make_engine(target, SAMPLINGS[0], limits)
    list(engine.answer(many[:44]))
    (statistics,) = engine.statistics
    assert statistics.num_predicted > 0
    assert statistics.num_moved_tokens > statistics.num_evictions > 0
    parts = (statistics.generation_seconds, statistics.moving_seconds, statistics.learning_seconds)
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(statistics.seconds)
    assert all(word in str(statistics) for word in ("rows in a step", "s of generation", "s of moving", "s of learning"))
    assert {"generation_seconds", "moving_seconds", "learning_seconds", "mean_rows"} <= statistics.record().keys()


class CountingPredictor(LightPredictor):
    """Predictor that counts how often it learns."""

    num_learnt = 0

    def learn(self, requests: Sequence[Request], buckets: torch.Tensor) -> None:
        type(self).num_learnt += 1
        super().learn(requests, buckets)


def test_calls_that_share_lessons_learn_them_once_and_do_not_change_them(
    target: HFTarget, many: list[Request], limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.distill.regenerate.lengths.buckets.LEARN_FIRST", 10)
    lessons = [Lesson(request=request, num_tokens=1 + 5 * (index % 4)) for index, request in enumerate(many[:10])]
    engines = [
        replace(make_engine(target, SAMPLINGS[0], limits), experience=Experience(CountingPredictor, lessons)) for _ in "ab"
    ]
    list(engines[0].answer(many[:6]))
    assert engines[0].statistics[0].num_predicted == 6  # from the first answer on
    list(engines[0].answer(many[20:31]))  # the number of answers doubles, so the call learns again
    assert CountingPredictor.num_learnt == 2
    list(engines[0].answer(many[:6]))
    list(engines[1].answer(many[:6]))
    assert CountingPredictor.num_learnt == 3  # by the second engine
    assert counts(engines[0])[2] == counts(engines[0])[0] == counts(engines[1])[0]


def test_the_kv_cache_never_exceeds_the_budget(
    target: HFTarget, many: list[Request], limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    begin_pass = TreeCache.begin_pass

    def record(cache: TreeCache, *args: int, **kwargs: int) -> bool:
        has_moved = begin_pass(cache, *args, **kwargs)
        taken.append(cache.max_batch * cache.capacity)
        return has_moved

    engine = make_engine(target, SAMPLINGS[0], limits, tokens=150)
    # Before its first answer the target is probed with another cache.
    list(engine.answer(many[:1]))
    monkeypatch.setattr(TreeCache, "begin_pass", record)
    list(engine.answer(many))
    assert len(taken) > 50
    assert 100 < max(taken) <= 150


def test_a_call_without_requests_returns_no_answers(target: HFTarget, limits: Limits) -> None:
    assert list(make_engine(target, SAMPLINGS[0], limits).answer([])) == []


def test_requests_without_room_are_refused_before_any_work(target: HFTarget, requests: list[Request], limits: Limits) -> None:
    with pytest.raises(ValueError, match="holds 59 tokens, and a request may take 60"):
        list(make_engine(target, SAMPLINGS[0], limits, tokens=59).answer(requests))
    too_long = Request(id="long", prompt_ids=torch.full((60,), 5), seed=0)
    with pytest.raises(ValueError, match="request long has a prompt of 60 tokens"):
        list(make_engine(target, SAMPLINGS[0], limits).answer([too_long]))


@pytest.mark.parametrize("hole_is_in_prompt", [True, False])
def test_logits_that_are_not_numbers_name_the_request(
    exact_target: HFTarget, requests: list[Request], limits: Limits, hole_is_in_prompt: bool
) -> None:
    engine = make_engine(exact_target, SAMPLINGS[1], limits, tokens=2000)
    hole, token, damaged = 299, 1, requests[-1]
    if hole_is_in_prompt:
        damaged = replace(damaged, prompt_ids=damaged.prompt_ids.index_fill(0, torch.tensor([0]), hole))
    else:
        # A token that only one answer has, and no prompt.
        answers = {id: tokens for id, (tokens, _) in texts(engine, requests).items()}
        seen = Counter(token for tokens in answers.values() for token in set(tokens[:-1]))
        seen.update(token for request in requests for token in request.prompt_ids.tolist())
        damaged = next(request for request in requests if any(seen[token] == 1 for token in answers[request.id][:-1]))
        place, hole = next((place, token) for place, token in enumerate(answers[damaged.id]) if seen[token] == 1)
        token = place + 2
    exact_target.embed_tokens.weight.data[hole] = torch.nan
    changed = [damaged if request.id == damaged.id else request for request in requests]
    with pytest.raises(ValueError, match=f"not numbers \\(NaN\\) at token {token} of the answer to {damaged.id}: "):
        texts(engine, changed)
