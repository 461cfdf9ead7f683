"""Script of test_sharded_kills.py that kills trainings of two sharded processes, and resumes them.

python sharded_kills.py TARGET SHARDS OUTPUT 'JSON of TrainConfig' 'JSON of the drafter' WAY

WAY is zero2, zero3 or fsdp2. The processes are forked from one with all slow imports. When one is
killed, the other one is killed too, as a launcher does. The script prints a JSON object: for each
moment, the step of the last checkpoint after the kill.
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from forked import DropoutDrafter, ends, fork, kill_on_call, with_fsdp2

from outrider.models.drafters import DRAFTERS, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train import checkpoint as checkpoint_module
from outrider.train.checkpoint import latest_checkpoint
from outrider.train.config import TrainConfig
from outrider.train.processes import make_accelerator
from outrider.train.run import train

TARGET, SHARDS, OUTPUT = map(Path, sys.argv[1:4])
CONFIG, DRAFTER = TrainConfig(**json.loads(sys.argv[4])), json.loads(sys.argv[5])
WAY = sys.argv[6]
PROCESSES = 2
LAUNCHER_SECONDS = 0.1
"""Time until the launcher kills the other process."""
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": WAY[-1],
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_MIXED_PRECISION": "no",
}
# The moments, with the process that is killed first.
MOMENTS: dict[str, tuple[int, Callable[[], None]]] = {
    "before the first checkpoint": (1, lambda: kill_on_call(DropoutDrafter, "loss", 2)),
    "in the middle of a step": (1, lambda: kill_on_call(DropoutDrafter, "loss", 4)),
    "before a process writes its part": (1, lambda: kill_on_call(Accelerator, "save_state", 2)),
    "after a process has written its part": (1, lambda: kill_on_call(Accelerator, "save_state", 2, after=True)),
    "before a checkpoint is marked complete": (0, lambda: kill_on_call(checkpoint_module, "_write_marker", 2)),
    "before old checkpoints are removed": (0, lambda: kill_on_call(checkpoint_module, "complete_checkpoints", 5)),
}


def start(target: Any, name: str, prepare: Callable[[], None] = lambda: None, killed: int = -1) -> list[int]:
    """Start the processes of a run, one of which prepares its own end."""

    def work() -> None:
        if int(os.environ["RANK"]) == killed:
            prepare()
        if WAY == "fsdp2":
            accelerator = with_fsdp2(make_accelerator())
        else:
            os.environ.update(DEEPSPEED)
            accelerator = make_accelerator()
        folder = OUTPUT / name
        train(CONFIG, parse_drafter(DRAFTER), target, SHARDS, folder / "train", folder / "drafter", accelerator)

    return fork(PROCESSES, work)


def main() -> None:
    torch.set_num_threads(1)  # a fork would lose a pool of threads
    DRAFTERS["dropout"] = DropoutDrafter
    target = load_target(TargetConfig(name_or_path=str(TARGET), dtype="float32"), torch.device("cpu"))
    if WAY != "fsdp2":
        import deepspeed  # noqa: F401 - once, before processes are forked
    gc.freeze()  # garbage collection in children skips the objects of imports
    assert ends(start(target, "unbroken")) == [0] * PROCESSES
    report = {}
    for name, (killed, prepare) in MOMENTS.items():
        pids = start(target, name, prepare, killed)
        status = os.waitstatus_to_exitcode(os.waitpid(pids.pop(killed), 0)[1])
        assert status == -signal.SIGKILL, f"{name}: the moment never came, exit code {status}"
        time.sleep(LAUNCHER_SECONDS)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ends(pids)
        last = latest_checkpoint(OUTPUT / name / "train" / "checkpoints")
        assert ends(start(target, name)) == [0] * PROCESSES, name
        report[name] = int(last.name.removeprefix("step-")) if last else 0
    sys.stdout.write("\n" + json.dumps(report))


main()
