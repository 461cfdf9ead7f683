"""Time limits for which the processes of a training run wait for each other."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from outrider.train import loop as loop_module
from outrider.train.processes import RECORDED_COLLECTIVES, make_accelerator

from ..forks import result_of
from . import late_process
from .conftest import Run


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_a_missing_process_ends_training_but_nothing_before_or_after(tmp_path: Path) -> None:
    assert result_of(late_process.main, tmp_path / "results.json", ACCELERATE_USE_CPU="true") == {
        "before the first step": 2.0,
        "after the training": 2.0,
        "after a step": "RuntimeError",
    }


def test_the_short_limit_begins_with_the_first_step(run_train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    finish_step = loop_module.finish_step
    monkeypatch.setattr(loop_module, "finish_step", lambda *args: (calls.append("step"), finish_step(*args))[1])

    def shorten(accelerator: Accelerator, training: ExitStack) -> None:
        calls.append("short limit")
        training.callback(calls.append, "long limit")

    monkeypatch.setattr(loop_module, "limit_waiting", shorten)
    run_train(steps=2)
    assert calls == ["step", "short limit", "step", "long limit"]


@pytest.mark.parametrize("older_name", [False, True])
def test_collectives_are_recorded_unless_the_user_sets_the_number(older_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    if older_name:
        monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    make_accelerator()
    assert os.environ.get("TORCH_FR_BUFFER_SIZE") == (None if older_name else str(RECORDED_COLLECTIVES))
