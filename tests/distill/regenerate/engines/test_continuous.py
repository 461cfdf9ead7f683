"""transformers' continuous batching as an engine: it gives our decoder's tokens."""

import pytest
import torch
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines.continuous import ContinuousEngine
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.models.decoding import Sampling
from outrider.models.drafters import NullDrafter
from outrider.models.llm.hf_target import HFTarget

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, top_k=50, top_p=0.95)


def texts(engine: ContinuousEngine | DecoderEngine, requests: list[Request]) -> dict[str, tuple[list[int], bool]]:
    answers = {answer.id: (answer.tokens.tolist(), answer.cut) for answer in engine.answer(requests)}
    assert len(answers) == len(requests)
    return answers


def test_greedy_answers_are_the_decoders_and_the_target_is_unchanged(
    target: HFTarget, requests: list[Request], limits: Limits
) -> None:
    decoder = DecoderEngine(target, NullDrafter(), sampling=GREEDY, limits=limits)
    before = texts(decoder, requests)
    random_state = torch.get_rng_state()
    engine = ContinuousEngine(target, sampling=GREEDY, limits=limits, max_requests_per_batch=4)
    assert texts(engine, requests) == before
    assert texts(engine, requests[:3]) == {request.id: before[request.id] for request in requests[:3]}
    assert texts(decoder, requests) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_answer_without_room_for_a_token_is_empty_and_cut(target: HFTarget, requests: list[Request]) -> None:
    longest = max(len(request.prompt_ids) for request in requests)
    engine = ContinuousEngine(target, sampling=GREEDY, limits=Limits(max_new_tokens=2, max_tokens=longest))
    actual = texts(engine, requests)
    full = [request.id for request in requests if len(request.prompt_ids) == longest]
    assert [actual[id] for id in full] == [([], True)] * len(full)
    assert all(tokens for id, (tokens, _) in actual.items() if id not in full)


def test_the_same_call_samples_the_same_answers(target: HFTarget, requests: list[Request], limits: Limits) -> None:
    engine = ContinuousEngine(target, sampling=SAMPLED, limits=limits, max_requests_per_batch=4)
    first = texts(engine, requests)
    torch.manual_seed(5)
    assert texts(engine, requests) == first
    reseeded = [Request(id=request.id, prompt_ids=request.prompt_ids, seed=request.seed + 1) for request in requests]
    assert texts(engine, reseeded) != first


def test_the_models_generation_config_is_ignored(target: HFTarget, requests: list[Request], limits: Limits) -> None:
    engine = ContinuousEngine(target, sampling=GREEDY, limits=limits)
    plain = texts(engine, requests)
    assert target.model.generation_config is not None
    target.model.generation_config.repetition_penalty = 5.0
    target.model.generation_config.do_sample = True
    assert texts(engine, requests) == plain


def test_a_given_scheduler_is_used(target: HFTarget, requests: list[Request], limits: Limits) -> None:
    schedulers: list[FIFOScheduler] = []
    received: list[Request] = []

    def make(*args: object, requests: list[Request], **kwargs: object) -> FIFOScheduler:
        received.extend(requests)
        schedulers.append(FIFOScheduler(*args, **kwargs))
        return schedulers[-1]

    plain = ContinuousEngine(target, sampling=GREEDY, limits=limits)
    scheduled = ContinuousEngine(target, sampling=GREEDY, limits=limits, scheduler=make)
    assert texts(scheduled, requests) == texts(plain, requests)
    assert len(schedulers) == 1
    assert [request.id for request in received] == [request.id for request in requests]
    assert set(SCHEDULER_MAPPING) == {"fifo", "prefill_first"}


def test_a_failure_inside_the_engine_is_raised_without_a_hang(
    target: HFTarget, requests: list[Request], limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no more pages")

    monkeypatch.setattr(FIFOScheduler, "schedule_batch", fail)
    engine = ContinuousEngine(target, sampling=GREEDY, limits=limits)
    with pytest.raises(RuntimeError, match="no more pages"):
        list(engine.answer(requests))
