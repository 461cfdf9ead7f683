"""Trainings of test_resume.py that are killed at given moments, and resumed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from outrider.models.drafters import DRAFTERS, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train import checkpoint as checkpoint_module
from outrider.train import results as results_module
from outrider.train import run as run_module
from outrider.train.checkpoint import Checkpoints, latest_checkpoint
from outrider.train.config import TrainConfig
from outrider.train.processes import make_accelerator

from .forked import DropoutDrafter, ends, fork, kill_on_call, with_fsdp2

LAUNCHER_SECONDS = 0.1
"""Time until the launcher kills the other process."""
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_MIXED_PRECISION": "no",
}
# All moments at which a kill may leave incomplete files, with the process that is killed first.
OF_ONE: dict[str, tuple[int, Callable[[], None]]] = {
    "before the first checkpoint": (0, lambda: kill_on_call(DropoutDrafter, "loss", 1)),
    "in the middle of a step": (0, lambda: kill_on_call(DropoutDrafter, "loss", 6)),
    "between a record and its checkpoint": (0, lambda: kill_on_call(Checkpoints, "save", 3)),
    "in a half-written checkpoint": (0, lambda: kill_on_call(torch, "save", 3)),
    "before a checkpoint gets its name": (0, lambda: kill_on_call(os, "replace", 4)),
    "before old checkpoints are removed": (0, lambda: kill_on_call(checkpoint_module, "complete_checkpoints", 6)),
    "after the last step": (0, lambda: kill_on_call(run_module, "save_results", 1)),
    "with half a drafter": (0, lambda: kill_on_call(results_module, "save_drafter", 1, after=True)),
    "before the summary": (0, lambda: kill_on_call(results_module, "write_json", 1)),
}
OF_TWO: dict[str, tuple[int, Callable[[], None]]] = {
    "before the first checkpoint": (1, lambda: kill_on_call(DropoutDrafter, "loss", 2)),
    "in the middle of a step": (1, lambda: kill_on_call(DropoutDrafter, "loss", 4)),
    "before a process writes its part": (1, lambda: kill_on_call(Accelerator, "save_state", 2)),
    "after a process has written its part": (1, lambda: kill_on_call(Accelerator, "save_state", 2, after=True)),
    "before a checkpoint is marked complete": (0, lambda: kill_on_call(checkpoint_module, "_write_marker", 2)),
    "before old checkpoints are removed": (0, lambda: kill_on_call(checkpoint_module, "complete_checkpoints", 5)),
}


def main(target_dir: Path, shards: Path, output: Path, options: Any, drafter: Any, way: str) -> dict[str, dict[str, int]]:
    """Kill and resume trainings `one` way (in one process), or with zero2, zero3 or fsdp2 in two sharded processes.

    When one is killed, the other one is killed too, as a launcher does. Return for each moment the step of the last
    checkpoint after the kill, and the number of losses of the resumed run's first process.
    """
    DRAFTERS["dropout"] = DropoutDrafter
    num_processes, config, spec = 1 if way == "one" else 2, TrainConfig(**options), parse_drafter(drafter)
    target = load_target(TargetConfig(name_or_path=str(target_dir), dtype="float32"), torch.device("cpu"))

    def start(name: str, prepare: Callable[[], None] = lambda: None, killed: int = -1) -> list[int]:
        """Start the processes of a run, one of which prepares its own end."""

        def work() -> None:
            rank = int(os.environ.get("RANK", "0"))
            if rank == killed:
                prepare()
            if way.startswith("zero"):
                os.environ.update(DEEPSPEED, ACCELERATE_DEEPSPEED_ZERO_STAGE=way[-1])
            accelerator = Accelerator(cpu=True) if way == "one" else make_accelerator()
            if way == "fsdp2":
                accelerator = with_fsdp2(accelerator)
            run_module.train(config, spec, target, shards, output / name / "train", output / name / "drafter", accelerator)
            if rank == 0:
                (output / f"{name}.losses").write_text(str(DropoutDrafter.calls))

        return fork(num_processes, work)

    assert ends(start("unbroken")) == [0] * num_processes
    report = {}
    for name, (killed, prepare) in (OF_ONE if way == "one" else OF_TWO).items():
        pids = start(name, prepare, killed)
        status = os.waitstatus_to_exitcode(os.waitpid(pids.pop(killed), 0)[1])
        assert status == -signal.SIGKILL, f"{name}: the moment never came, exit code {status}"
        if pids:
            time.sleep(LAUNCHER_SECONDS)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ends(pids)
        last = latest_checkpoint(output / name / "train" / "checkpoints")
        assert ends(start(name)) == [0] * num_processes, name
        losses = int((output / f"{name}.losses").read_text())
        report[name] = {"checkpoint": int(last.name.removeprefix("step-")) if last else 0, "losses": losses}
    return report
