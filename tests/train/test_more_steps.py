"""A finished training that gets more steps."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.data.files import sha256_file
from outrider.data.types import DrafterBatch
from outrider.train.batches import with_hidden_states

from .conftest import Run
from .resumed import assert_same_weights, records
from .test_resume import CPU

RunTrain = Callable[..., Run]
STEPS, MORE = 4, 10


def rates(run: Run) -> list[float]:
    return [record["learning_rate"] for record in records(run.train_dir.parent) if "learning_rate" in record]


def test_it_resumes_from_its_last_checkpoint_on_the_schedule_of_the_new_number(run_train, caplog):
    schedule = "cosine"
    caplog.set_level(logging.INFO, "outrider.train")
    whole = rates(run_train("whole", steps=MORE, schedule=schedule, warmup_steps=2))
    first = run_train("run", steps=STEPS, schedule=schedule, warmup_steps=2)
    digest, before = sha256_file(first.drafter_dir / "model.safetensors"), records(first.train_dir.parent)
    run = run_train("run", steps=MORE, schedule=schedule, warmup_steps=2)
    assert records(run.train_dir.parent)[:STEPS] == before[:STEPS], "no step is made twice"
    assert rates(run)[STEPS:] == pytest.approx(whole[STEPS:])
    assert rates(run)[STEPS] > 0
    (message,) = [record.message for record in caplog.records if record.message.startswith("train.steps was")]
    assert f"was {STEPS} and is {MORE}: the training resumes after step {STEPS}" in message
    assert f"The {schedule} schedule now ends at step {MORE}" in message
    assert f"resumes at {whole[STEPS]:.3g}, where it was" in message
    assert "the stage eval starts a new evaluation" in message
    summary = json.loads((run.train_dir / "summary.json").read_text())
    assert summary["steps"] == summary["drafter_step"] == MORE
    assert sha256_file(run.drafter_dir / "model.safetensors") != digest, "an evaluation compares this digest"
    # The finished run is finished.
    caplog.clear()
    run_train("run", steps=MORE, schedule=schedule, warmup_steps=2)
    assert "already trained" in caplog.text


def test_a_kill_in_between_leaves_no_trace(run_train: RunTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unbroken", "broken"):
        run_train(name, steps=STEPS)
    unbroken = run_train("unbroken", steps=MORE)
    for steps_made in (0, 2):  # in its first step, before any checkpoint of the longer training, and later
        calls = iter(range(MORE))

        def read(*args: Any, last: int = steps_made, calls: Iterator[int] = calls) -> DrafterBatch:
            if next(calls) == last:
                raise KeyboardInterrupt
            return with_hidden_states(*args)

        monkeypatch.setattr("outrider.train.loop.with_hidden_states", read)
        with pytest.raises(KeyboardInterrupt):
            run_train("broken", steps=MORE)
    monkeypatch.undo()
    broken = run_train("broken", steps=MORE)
    assert records(broken.train_dir.parent) == records(unbroken.train_dir.parent)
    assert_same_weights(*(run.drafter_dir / "model.safetensors" for run in (broken, unbroken)), CPU)


def test_fewer_steps_and_other_changes_are_errors(run_train: RunTrain) -> None:
    run = run_train(steps=STEPS)
    with pytest.raises(ValueError, match=r"train\.steps \(was 4, is 3\): a training can get more steps, but not fewer"):
        run_train(steps=3)
    with pytest.raises(ValueError, match=r"another configuration: train\.learning_rate \(was 0\.01, is 0\.5\)\."):
        run_train(steps=MORE, learning_rate=0.5)
    shutil.rmtree(run.train_dir / "checkpoints")
    with pytest.raises(ValueError, match=r"train\.steps is 10, .*of 4 steps, .* no checkpoint to resume from"):
        run_train(steps=MORE)


def test_a_training_that_ended_early_names_the_patience(run_train: RunTrain, caplog: pytest.LogCaptureFixture) -> None:
    options = {"validation_texts": 2, "validation_tokens": 4, "validate_every": 1, "patience": 1, "learning_rate": 1e-9}
    run = run_train(steps=STEPS, **options)
    (end,) = {record["step"] for record in records(run.train_dir.parent)[-1:]}
    assert end < STEPS
    run_train(steps=MORE, **options)
    assert f"train.patience=1 has ended this training after step {end}" in caplog.text
    assert records(run.train_dir.parent)[-1]["step"] == end
