"""Monitoring of training: the best drafter, patience, and changed divisions."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.models.drafters import load_drafter
from outrider.models.drafters.base import TrainableDrafter
from outrider.train.batches import BatchStream
from outrider.train.checkpoint import complete_checkpoints, read_marker
from outrider.train.records import read_records
from outrider.train.validation import Validator

from .conftest import Run, edit_marker
from .test_run import assert_close, records, spy, weights

__all__ = ["spy"]
RunTrain = Callable[..., Run]
MEASURED = {"validation_texts": 4, "validation_tokens": 4, "validate_every": 2, "steps": 12}


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return a function that sets the tokens per step of the next validations.

    It returns a list to which each validation appends its number.
    """

    def script(*values: float | None) -> list[int]:
        taken: list[int] = []

        def measured(self: Validator, drafter: TrainableDrafter) -> dict[str, Any]:
            taken.append(len(taken))
            return {"validation_tokens_per_step": values[len(taken) - 1], "validation_loss": 1.0}

        monkeypatch.setattr(Validator, "__call__", measured)
        return taken

    return script


def summary(run: Run) -> dict[str, Any]:
    return json.loads((run.train_dir / "summary.json").read_text())


def state_of(run: Run, step: int) -> dict[str, torch.Tensor]:
    """Read the drafter's weights in the checkpoint of a step."""
    state = torch.load(run.train_dir / f"checkpoints/step-{step:08d}/state.pt")["model"]
    return {name.removeprefix("drafter."): value for name, value in state.items()}


def is_of_step(run: Run, step: int) -> bool:
    exported, state = weights(run), state_of(run, step)
    assert len(exported) >= 4
    return all(torch.equal(value, state[name]) for name, value in exported.items())


def test_the_best_drafter_is_kept_after_its_checkpoint_and_exported(run_train, measure, target):
    measure(1.5, 1.9, 1.7, 1.6, 1.8, 1.75)
    run = run_train(**MEASURED, keep_checkpoints=12)
    assert not is_of_step(run, 12)
    assert (summary(run)["drafter_step"], summary(run)["steps"]) == (4, 12)
    assert summary(run)["validation"]["validation_tokens_per_step"] == 1.9
    load_drafter(run.train_dir / "best", target)
    measure(1.5, 1.9, 1.7, 1.6, 1.8, 1.75)
    few = run_train("few", **MEASURED, keep_checkpoints=1)
    assert [path.name for path in complete_checkpoints(few.train_dir / "checkpoints")] == ["step-00000012"]
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(few).items())


def test_a_new_setting_of_a_finished_run_trains_no_step(run_train: RunTrain, measure: Any, spy: Any) -> None:
    taken = measure(1.5, 1.9, 1.7, 1.6, 1.8, 1.75)
    run = run_train(**MEASURED, drafter={"kind": "spy"})
    steps = spy.calls
    run_train(**MEASURED, drafter={"kind": "spy", "beam_width": 7})
    assert summary(run)["drafter_step"] == 4
    assert json.loads((run.drafter_dir / "config.json").read_text())["drafter"]["beam_width"] == 7, "it drafts as asked for now"
    assert (spy.calls, len(taken)) == (steps, 6)


def test_training_ends_when_tokens_per_step_have_peaked_and_stays_ended(run_train: RunTrain, measure: Any, spy: Any) -> None:
    taken = measure(1.5, 1.9, 1.9, 1.6, 1.7, 2.0)
    options = {**MEASURED, "drafter": {"kind": "spy"}, "log_every": 5, "checkpoint_every": 100}
    run = run_train(**options, patience=2)
    assert (spy.calls, len(taken)) == (8, 4)
    assert summary(run)["steps"] == 8
    assert summary(run)["drafter_step"] == 6
    lines = read_records(run.train_dir / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 5, 6, 8]
    # a finished run, and one killed before its result was written
    for lost in ("nothing", "summary.json"):
        (run.train_dir / lost).unlink(missing_ok=True)
        run_train(**options, patience=2)
        assert (spy.calls, len(taken)) == (8, 4), lost
    run_train(**options, patience=4)
    assert (spy.calls, len(taken)) == (12, 6), "with more patience it goes on to the end"
    assert summary(run)["validation"]["validation_tokens_per_step"] == 2.0


def test_an_interrupted_run_remembers_its_measurements(run_train: RunTrain, measure: Any, spy: Any) -> None:
    measure(1.9, 1.5, 1.6)
    spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGTERM) or 0.0 if call == 5 else 0.0)
    with pytest.raises(SystemExit):
        run_train(**MEASURED, drafter={"kind": "spy"}, patience=2, log_every=5)
    measure(1.6)
    run = run_train(**MEASURED, drafter={"kind": "spy"}, patience=2)
    assert summary(run)["steps"] == 6
    assert summary(run)["drafter_step"] == 2
    steps = [line["step"] for line in read_records(run.train_dir / "metrics.jsonl") if "validation_loss" in line]
    assert steps == [2, 4, 6]


def test_a_new_run_ignores_the_best_drafter_of_the_run_before(run_train: RunTrain, measure: Any) -> None:
    measure(1.5, 1.9, 1.7, 1.6, 1.8, 1.75)
    run = run_train(**MEASURED)
    for folder in (run.train_dir / "checkpoints", run.drafter_dir):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    (run.train_dir / "summary.json").unlink()
    measure(1.0, 1.1, 1.2, 1.3, 1.4, 1.2)
    run = run_train(**MEASURED, seed=1)
    assert summary(run)["drafter_step"] == 10


def test_another_division_of_the_same_texts_resumes_to_the_same_drafter(run_train, spy, caplog):
    unbroken = run_train("unbroken", drafter={"kind": "spy"}, batch_size=4)
    spy.calls = 0
    spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGTERM) or 0.0 if call == 3 else 0.0)
    with pytest.raises(SystemExit):
        run_train("broken", drafter={"kind": "spy"}, batch_size=4)
    run = run_train("broken", drafter={"kind": "spy"}, batch_size=2, gradient_accumulation=2)
    assert_close(run, unbroken)
    assert records(run)[-1]["tokens_seen"] == records(unbroken)[-1]["tokens_seen"]
    (message,) = [record.message for record in caplog.records if "the run resumes with" in record.message]
    assert "with 1 process x gradient_accumulation 2 x batch_size 2: 4 texts a step" in message
    assert "Before, it was 1 process x gradient_accumulation 1 x batch_size 4: 4 texts" in message
    with pytest.raises(ValueError, match=r"train\.batch_size \(was 2, is 8\)"):
        run_train("broken", drafter={"kind": "spy"}, batch_size=8)


def test_another_number_of_texts_per_step_resumes_at_the_same_text(run_train, spy, tmp_path, monkeypatch, caplog):
    spy.on_loss = staticmethod(lambda call, batch: os.kill(os.getpid(), signal.SIGTERM) or 0.0 if call == 3 else 0.0)
    with pytest.raises(SystemExit):
        run_train(drafter={"kind": "spy"}, batch_size=4)
    # Like three steps of two processes: 24 texts, the 22 of the first epoch and two of the second.
    (*_, last) = complete_checkpoints(tmp_path / "run/train/checkpoints")
    state = read_marker(last).state
    edit_marker(last, num_processes=2, state={**state, "run": {**state["run"], "num_processes": 2}, "examples_read": 24})
    read: list[int] = []
    rows = BatchStream._rows
    monkeypatch.setattr(BatchStream, "_rows", lambda self, start, count: read.append(start) or rows(self, start, count))
    run = run_train(drafter={"kind": "spy"}, batch_size=4)
    assert read == [24, 28, 32]
    (message,) = [record.message for record in caplog.records if "the run resumes with" in record.message]
    assert ": 4 texts a step" in message
    assert "Before, it was 2 processes x gradient_accumulation 1 x batch_size 4: 8 texts" in message
    assert summary(run)["steps"] == 6
