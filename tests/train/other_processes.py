"""Script of test_resume.py: SIGTERM to two processes, and resuming with one.

python other_processes.py TARGET SHARDS OUTPUT 'JSON of TrainConfig for two' 'JSON of TrainConfig
for one' 'JSON of the drafter'

SIGTERM comes while a checkpoint is written. The script prints a JSON object with the exit codes of
the two processes and their checkpoints.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from forked import ends, fork

from outrider.models.drafters import parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target
from outrider.train import checkpoint as checkpoint_module
from outrider.train.config import TrainConfig
from outrider.train.run import train

TARGET, SHARDS, OUTPUT = map(Path, sys.argv[1:4])
FOR_TWO, FOR_ONE = (TrainConfig(**json.loads(text)) for text in sys.argv[4:6])
DRAFTER = parse_drafter(json.loads(sys.argv[6]))
WRITE_SECONDS = 0.5


def main() -> None:
    torch.set_num_threads(1)
    target = load_target(TargetConfig(name_or_path=str(TARGET), dtype="float32"), torch.device("cpu"))
    gc.freeze()
    folders = (OUTPUT / "train", OUTPUT / "drafter")
    save = torch.save

    def save_slowly(value: Any, file: Any, **options: Any) -> None:
        if isinstance(file, Path):  # only for files, not for objects sent between processes
            time.sleep(WRITE_SECONDS)
        save(value, file, **options)

    def train_slowly() -> None:
        checkpoint_module.torch.save = save_slowly
        train(FOR_TWO, DRAFTER, target, SHARDS, *folders, Accelerator())

    pids = fork(2, train_slowly)
    checkpoints = OUTPUT / "train" / "checkpoints"
    deadline = time.perf_counter() + 60
    while not (checkpoints / ".step-00000002.outrider-partial").exists():
        assert time.perf_counter() < deadline, "the training doesn't begin"
        time.sleep(0.001)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    # Like launchers: when one process has ended, send the signal to the others again.
    first, status = os.wait()
    (second,) = set(pids) - {first}
    os.kill(second, signal.SIGTERM)
    codes = [os.waitstatus_to_exitcode(status), *ends([second])]
    left = sorted(path.name for path in checkpoints.iterdir())
    one = fork(1, lambda: train(FOR_ONE, DRAFTER, target, SHARDS, *folders, Accelerator(cpu=True)))
    assert ends(one) == [0]
    sys.stdout.write(json.dumps({"codes": codes, "left": left}))


main()
