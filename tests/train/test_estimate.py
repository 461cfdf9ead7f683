"""Estimates in a plan of what a training takes.

They are medians of warm steps, and include all that a training does beside the steps.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from outrider.models.drafters import parse_drafter
from outrider.models.llm.hf_target import HFTarget
from outrider.train import estimate
from outrider.train.config import TrainConfig
from outrider.train.estimate import TrainingEstimate, estimate_training

from .conftest import DRAFTER, TRAIN, make_example

BURSTS = {0: 100.0, 1: 50.0, 4: 70.0}
"""Seconds of the micro-batches that are slow: the first ones, and one beside another program."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock by which each micro-batch takes a second, bursts aside."""
    now, draw = [0.0], estimate.draw_batch

    def slow_draw(config: TrainConfig, examples: Any, reads: Any, index: int) -> Any:
        now[0] += BURSTS.get(index, 1.0)
        return draw(config, examples, reads, index)

    monkeypatch.setattr(estimate, "draw_batch", slow_draw)
    monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def plan(target: HFTarget, accelerator: Accelerator, steps_done: int = 0, **changes: Any) -> TrainingEstimate:
    config = TrainConfig(**{**TRAIN, **changes})
    examples = [make_example(index, target.vocab_size) for index in range(8)]
    return estimate_training(config, parse_drafter(DRAFTER), target, examples, accelerator, steps_done=steps_done)


@pytest.mark.usefixtures("clock")
def test_neither_warm_up_nor_a_burst_of_another_program_counts(target: HFTarget, accelerator: Accelerator) -> None:
    assert plan(target, accelerator).seconds_per_step == 1.0
    accumulated = plan(target, accelerator, gradient_accumulation=3, steps_done=2)
    assert accumulated.seconds_per_step == 3.0
    assert accumulated.seconds == (TRAIN["steps"] - 2) * 3.0  # type: ignore[operator]


@pytest.mark.parametrize(("every", "expected"), [(1, 3 * (1.0 + 8.0)), (4, 3 * (1.0 + 2.0))])
def test_the_choice_of_positions_counts(
    every: int, expected: float, target: HFTarget, accelerator: Accelerator, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_choice(*_: Any) -> None:
        clock[0] += 8.0

    monkeypatch.setattr(estimate, "step_starts", slow_choice)
    planned = plan(target, accelerator, max_positions=9, on_policy_every=every, gradient_accumulation=3)
    assert planned.seconds_per_step == expected


def test_the_logits_are_those_of_a_micro_batch_or_of_a_chunk(
    target: HFTarget, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.0)
    examples = [make_example(index, target.vocab_size) for index in range(8)]
    config = TrainConfig(**{**TRAIN, "batch_size": 2})
    planned = estimate_training(config, parse_drafter(DRAFTER), target, examples, accelerator)
    labels = sorted(example.continuations.numel() for example in examples)[-2:]
    assert planned.chunk_bytes == 4 * sum(labels) * target.vocab_size
    assert replace(planned, max_chunk=100).chunk_bytes == 400


def test_checkpoints_and_validation_count(target: HFTarget, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "_time_copy", lambda copy, content: 10.0)
    monkeypatch.setattr(estimate, "_time_decoding", lambda *_, max_new_tokens: 1.0 + max_new_tokens)
    short = plan(target, accelerator, checkpoint_every=4, validation_texts=0)
    assert (short.checkpoint_seconds, short.validation_seconds) == (20.0, 0.0)  # after steps 4 and 6
    assert plan(target, accelerator, checkpoint_in_background=False).checkpoint_seconds == 0.0
    measured = plan(target, accelerator, validation_texts=6, validate_every=4, validation_tokens=10)
    answers = 2 * (2.0 + 9)  # batches of 4 prompts; a prefill with one token, and 9 more tokens
    assert measured.validation_seconds == 3 * answers  # plain decoding, and after steps 4 and 6
    assert measured.seconds > measured.checkpoint_seconds + measured.validation_seconds


def test_the_real_decoding_is_timed(target: HFTarget, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.0)
    assert plan(target, accelerator, validation_texts=4, validation_tokens=8).validation_seconds > 0
