"""Script of test_resume.py that kills training runs at given moments, and resumes them.

python kill_and_resume.py TARGET SHARDS OUTPUT 'JSON of TrainConfig' 'JSON of the drafter'

A process with all slow imports forks a child for every training run. The child kills itself with
SIGKILL. The script prints a JSON object: for each moment, the step of the last checkpoint after the
kill, and the number of losses of the resumed run.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from forked import DropoutDrafter, kill_on_call

from outrider.models.drafters import DRAFTERS, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train import checkpoint as checkpoint_module
from outrider.train import results as results_module
from outrider.train import run as run_module
from outrider.train.checkpoint import Checkpoints, latest_checkpoint
from outrider.train.config import TrainConfig

TARGET, SHARDS, OUTPUT = map(Path, sys.argv[1:4])
CONFIG, DRAFTER = TrainConfig(**json.loads(sys.argv[4])), json.loads(sys.argv[5])


# All moments at which a kill may leave incomplete files, from the outer to the inner code.
MOMENTS: dict[str, Callable[[], None]] = {
    "before the first checkpoint": lambda: kill_on_call(DropoutDrafter, "loss", 1),
    "in the middle of a step": lambda: kill_on_call(DropoutDrafter, "loss", 6),
    "between a record and its checkpoint": lambda: kill_on_call(Checkpoints, "save", 3),
    "in a half-written checkpoint": lambda: kill_on_call(torch, "save", 3),
    "before a checkpoint gets its name": lambda: kill_on_call(os, "replace", 4),
    "before old checkpoints are removed": lambda: kill_on_call(checkpoint_module, "complete_checkpoints", 6),
    "after the last step": lambda: kill_on_call(run_module, "save_results", 1),
    "with half a drafter": lambda: kill_on_call(results_module, "save_drafter", 1, after=True),
    "before the summary": lambda: kill_on_call(results_module, "write_json", 1),
}


def in_child(work: Callable[[], Any]) -> tuple[int, int]:
    """Run `work` in a forked process; return its exit code and its number of losses.

    A negative exit code is the signal that ended the process.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        work()
        os.write(writer, str(DropoutDrafter.calls).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        calls = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(calls or -1)


def main() -> None:
    torch.set_num_threads(1)  # a fork would lose a pool of threads
    DRAFTERS["dropout"] = DropoutDrafter
    accelerator = Accelerator(cpu=True)
    target = load_target(TargetConfig(name_or_path=str(TARGET), dtype="float32"), torch.device("cpu"))

    def train(name: str) -> None:
        folder = OUTPUT / name
        run_module.train(CONFIG, parse_drafter(DRAFTER), target, SHARDS, folder / "train", folder / "drafter", accelerator)

    def train_and_die(name: str) -> None:
        MOMENTS[name]()
        train(name)

    gc.freeze()  # garbage collection in children skips the objects of imports
    assert in_child(lambda: train("unbroken"))[0] == 0
    report = {}
    for name in MOMENTS:
        code, _ = in_child(lambda name=name: train_and_die(name))
        assert code == -signal.SIGKILL, f"{name}: the moment never came, exit code {code}"
        last = latest_checkpoint(OUTPUT / name / "train" / "checkpoints")
        code, losses = in_child(lambda name=name: train(name))
        assert code == 0, name
        report[name] = {"checkpoint": int(last.name.removeprefix("step-")) if last else 0, "losses": losses}
    sys.stdout.write(json.dumps(report))


main()
