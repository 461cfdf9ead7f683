"""Padded batches by predicted length: answers equal those of requests alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.distill.config import DECODER_ROWS, DistillConfig
from outrider.distill.regenerate.engine import Limits, Request
from outrider.distill.regenerate.engines import batch as module
from outrider.distill.regenerate.engines.batch import BatchEngine, cache_bytes, closed_up
from outrider.distill.regenerate.engines.decoder import DecoderEngine
from outrider.distill.regenerate.engines.registry import MOST_TRIED_ROWS, open_engine, tried_rows
from outrider.distill.regenerate.lengths.buckets import LightPredictor
from outrider.distill.regenerate.lengths.schedule import Decoded, Waiting
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
        budget_tokens=tokens,
    )


def texts(engine: BatchEngine | DecoderEngine, requests: list[Request]) -> dict[str, tuple[list[int], bool]]:
    answers = {answer.id: (answer.tokens.tolist(), answer.cut) for answer in engine.answer(requests)}
    assert len(answers) == len(requests)
    return answers


Batches = list[list[tuple[Waiting, Decoded]]]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """Record the batches of all calls."""
    seen: Batches = []
    supervise = module.supervise

    def record(*args: Any, **kwargs: Any) -> Iterator[list[tuple[Waiting, Decoded]]]:
        for batch in supervise(*args, **kwargs):
            seen.append(batch)
            yield batch

    monkeypatch.setattr(module, "supervise", record)
    return seen


def num_evicted(batches: Batches) -> int:
    return sum(not decoded.ended for batch in batches for _, decoded in batch)


class CountingPredictor(LightPredictor):
    """Predictor that counts its predictions."""

    num_predicted = 0

    def predict(self, requests: Sequence[Request]) -> torch.Tensor:
        type(self).num_predicted += len(requests)
        return super().predict(requests)


def test_evicted_rows_get_the_answers_of_requests_alone(exact_target, many, limits, batches, monkeypatch):
    monkeypatch.setattr(module, "LightPredictor", CountingPredictor)
    alone = DecoderEngine(exact_target, NullDrafter(), sampling=SAMPLINGS[1], limits=limits, batch_size=1)
    actual = texts(make_engine(exact_target, SAMPLINGS[1], limits), many)
    some = texts(alone, many[::3])
    assert {id: actual[id] for id in some} == some
    assert {cut for _, cut in actual.values()} == {True, False}
    assert num_evicted(batches) > 20
    assert CountingPredictor.num_predicted > 20
    assert sum(decoded.num_new for batch in batches for _, decoded in batch) == sum(
        len(tokens) for tokens, _ in actual.values()
    )


@pytest.mark.slow
def test_batches_do_not_depend_on_earlier_calls(target, many, limits, batches):
    first, second = make_engine(target, SAMPLINGS[1], limits), make_engine(target, SAMPLINGS[1], limits)
    expected = [(answer.id, answer.tokens.tolist()) for answer in first.answer(many)]
    expected_batches = batches.copy()
    list(second.answer(many[30:]))
    batches.clear()
    torch.manual_seed(3)
    assert [(answer.id, answer.tokens.tolist()) for answer in second.answer(many)] == expected
    assert batches == expected_batches


def test_the_kv_cache_never_exceeds_the_budget(target, many, limits, monkeypatch):
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


@pytest.mark.parametrize(
    ("stays", "places"),
    [("11011", [0, 1, 4, 3]), ("0011", [3, 2]), ("1100", [0, 1]), ("10101", [0, 4, 2]), ("0001", [3]), ("00", [])],
)
def test_few_rows_move_when_some_have_ended(stays: str, places: list[int]) -> None:
    assert closed_up([one == "1" for one in stays]) == places
    assert all(place >= index for index, place in enumerate(places)), "as the cache wants them"


def test_a_call_without_requests_returns_no_answers(target: HFTarget, limits: Limits) -> None:
    assert list(make_engine(target, SAMPLINGS[0], limits).answer([])) == []


def test_a_budget_below_the_longest_text_is_refused_before_any_work(target: HFTarget, limits: Limits) -> None:
    gib = (limits.max_tokens - 0.5) * cache_bytes(target)[0] / 2**30
    config = DistillConfig(engine="batch", kv_budget_gib=gib)
    with (
        pytest.raises(
            ValueError, match=f"of {limits.max_tokens - 1} tokens, and a text may have {limits.max_tokens} .*raise it"
        ),
        open_engine(config, target, limits),
    ):
        pass


def test_a_targets_own_memory_budget_bounds_the_batches(exact_target, many, limits, monkeypatch):
    config = DistillConfig(engine="batch", temperature=0.0)
    with open_engine(config, exact_target, limits) as engine:
        expected = texts(engine, many)
    monkeypatch.setattr(exact_target, "budget_tokens", 200)
    with open_engine(config, exact_target, limits) as engine:
        assert texts(engine, many) == expected
    monkeypatch.setattr(exact_target, "budget_tokens", limits.max_tokens - 1)
    with (
        pytest.raises(ValueError, match=f"target.budget_tokens={limits.max_tokens - 1} holds .*raise it"),
        open_engine(config, exact_target, limits),
    ):
        pass


def test_a_plan_tries_as_many_rows_as_the_engine_decodes_together(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DistillConfig(engine="batch", shard_examples=50)
    assert tried_rows(config, target, 100) == 50
    assert tried_rows(replace(config, shard_examples=MOST_TRIED_ROWS + 1), target, 100) == MOST_TRIED_ROWS
    gib = 100 * 7.5 * cache_bytes(target)[0] / 2**30
    assert tried_rows(replace(config, kv_budget_gib=gib), target, 100) == 7
    monkeypatch.setattr(target, "budget_tokens", 350)
    assert tried_rows(config, target, 100) == 3
    assert tried_rows(DistillConfig(engine="decoder"), target, 100) == DECODER_ROWS
    assert tried_rows(DistillConfig(engine="decoder", decode_batch_size=99), target, 100) == 99


@pytest.mark.parametrize("hole_is_in_prompt", [True, False])
def test_logits_that_are_not_numbers_name_the_request(exact_target, requests, limits, hole_is_in_prompt):
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


def test_cache_bytes_follow_from_the_configuration(target: HFTarget) -> None:
    config = target.model.config
    expected = (
        config.num_hidden_layers * 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4
    )
    assert cache_bytes(target) == (expected, 0)
    target.model.to(torch.float16)
    assert cache_bytes(target) == (expected / 2, 0)
