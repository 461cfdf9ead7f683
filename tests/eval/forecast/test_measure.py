"""What the forecast measures: it is what decoding does."""

from types import SimpleNamespace

import pytest
import torch

from outrider.data.suites import Prompt, PromptSet
from outrider.eval.forecast import measure
from outrider.eval.forecast.measure import (
    TIMED_STEPS,
    TURNS,
    WARM_UP_STEPS,
    ForecastPrompt,
    decode,
    draw_prompts,
    in_turns,
    plain_answers,
    step_seconds,
)
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.decoding.acceptance import SpeculativeSampling
from outrider.models.decoding.sampling import Sampling
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.oracle import OracleDrafter

IDS = [[1, 70, 71, 72, 2], [9, 8, 7], [4, 4, 5, 6]]
PROMPTS = [ForecastPrompt(suite="a", category=str(row), input_ids=torch.tensor(ids)) for row, ids in enumerate(IDS)]
NEW = 12


@pytest.fixture
def target(tiny_target):
    yield tiny_target
    tiny_target.release_cache()


def answer(target, ids):
    steps = generate(target, NullDrafter(), GreedyAcceptance(), [ids], max_new_tokens=NEW, stop_ids=target.stop_ids)
    return [token for step in steps for token in step.tokens[0]]


def test_tokens_and_steps_are_those_of_each_prompt_alone(target):
    done = list[int]()
    texts = [answer(target, prompt.input_ids) for prompt in PROMPTS]
    for row, prompt in enumerate(PROMPTS):
        alone = OracleDrafter([texts[row]], [3], target.vocab_size)
        (steps,) = decode(target, alone, GreedyAcceptance(), [prompt], max_new_tokens=NEW, batch_size=1, done=done.append)
        assert steps.tokens == len(texts[row]) - 1
        assert steps.steps < steps.tokens, "a drafter that knows the answer needs fewer steps"
    plain = decode(target, NullDrafter(), GreedyAcceptance(), PROMPTS, max_new_tokens=NEW, batch_size=2, done=done.append)
    assert [(one.tokens, one.steps) for one in plain] == [(len(text) - 1, len(text) - 1) for text in texts]
    assert done == [1, 1, 1, 2, 1]


def test_a_paced_drafter_answers_each_prompt_in_turn_with_plain_decoding(target, monkeypatch):
    turns = []
    decoded = measure.decode

    def record(target, drafter, rule, prompts, **options):
        turns.append((type(drafter).__name__, [prompt.category for prompt in prompts], options["batch_size"]))
        return decoded(target, drafter, rule, prompts, **options)

    monkeypatch.setattr(measure, "decode", record)
    texts = [answer(target, prompt.input_ids) for prompt in PROMPTS]
    drafter, done = OracleDrafter([texts[0]], [3], target.vocab_size), list[int]()
    options = {"max_new_tokens": NEW, "batch_size": 8, "done": done.append}
    plain, drafted = in_turns(target, drafter, GreedyAcceptance(), PROMPTS, **options)
    names = ["NullDrafter", "OracleDrafter"] * 3
    assert turns == [(name, [str(place // 2)], 1) for place, name in enumerate(names)]
    assert [one.steps for one in plain] == [len(text) - 1 for text in texts]
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.seconds > 0 for one in (*plain, *drafted))
    assert done == [1, 1, 1]
    assert in_turns(target, drafter, GreedyAcceptance(), PROMPTS, is_timed=False, **options)[0] == []


@pytest.mark.parametrize("rule", [GreedyAcceptance(), SpeculativeSampling(sampling=Sampling(temperature=1.0))])
def test_certainty_is_that_of_the_targets_logits(rule, target):
    answers = plain_answers(target, rule, PROMPTS, max_new_tokens=NEW, batch_size=2)
    greedy = [answer(target, prompt.input_ids) for prompt in PROMPTS]
    for prompt, text, certainty in zip(PROMPTS, greedy, answers, strict=True):
        logits = target.model(prompt.input_ids[None]).logits[0, -1].float()
        assert certainty.entropies[0] == pytest.approx(
            float(torch.distributions.Categorical(logits=logits).entropy()), abs=1e-4
        )
        assert certainty.likeliest[0] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)
        if isinstance(rule, GreedyAcceptance):
            assert len(certainty.likeliest) == len(text)


def test_prompts_come_in_turns_from_suites_and_leave_room(target):
    long = Prompt(id="9", category="long", turns=("word " * 400,))
    suites = [
        PromptSet(
            name=name, revision="", prompts=(*(Prompt(id=str(i), category=name, turns=("hi",)) for i in range(count)), long)
        )
        for name, count in (("a", 2), ("b", 5))
    ]
    prompts = draw_prompts(suites, target, 100, 6, seed=0)
    assert [prompt.suite for prompt in prompts] == ["a", "b", "a", "b", "b", "b"]
    assert "long" not in {prompt.category for prompt in prompts}
    assert len(draw_prompts(suites, target, 100, 3, seed=0)) == 3


def test_steps_are_timed_in_turns_in_full_batches(target, monkeypatch):
    now, seen = [0.0], list[int]()

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    class Slow(NullDrafter):
        def propose(self, state, last_token, *, generator=None):
            seen.append(len(last_token))
            now[0] += 2.0
            return super().propose(state, last_token, generator=generator)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock))
    drafters = {"plain": NullDrafter(), "slow": Slow()}
    timed = step_seconds(target, drafters, GreedyAcceptance(), PROMPTS, batch_size=4, max_new_tokens=NEW)
    assert timed["plain"].steps == [1.0] * TURNS
    assert timed["slow"].steps == [3.0] * TURNS
    assert timed["plain"].prefill == 1.0
    assert set(seen) == {4}, "prompts are repeated, and no row has left"
    assert len(seen) == TURNS * min(WARM_UP_STEPS + TIMED_STEPS, NEW - 1)


def test_an_answer_of_one_token_has_a_prefill_and_no_faster_step(target):
    timed = step_seconds(target, {"plain": NullDrafter()}, GreedyAcceptance(), PROMPTS, batch_size=1, max_new_tokens=2)
    assert all(seconds > 0 for seconds in timed["plain"].steps)
