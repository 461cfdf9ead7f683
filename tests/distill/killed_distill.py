"""Script that regenerates and labels answers with processes that are killed repeatedly.

test_faults.py runs it as a process, since it forks.

python killed_distill.py TARGET DATA FOLDER NUM_SHARDS NUM_KILLS SEED

Every attempt has one to three processes. They are forked from this one, so that they need not
import the libraries. One of them, or all, get SIGKILL at a random moment; then the others are
killed too, as a launcher does. There are NUM_KILLS attempts, half of them in each half of the first
NUM_SHARDS shards. The script prints the attempts as JSON.
"""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from outrider.data.config import DataConfig
from outrider.data.manifest import Manifest
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import distill
from outrider.distill.regenerate.run import regenerate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

CONFIG = DistillConfig(
    engine="decoder", max_new_tokens=12, horizon=4, features="last_hidden", shard_examples=3, batch_tokens=128
)
LONGEST_SECONDS = 120.0


def make(target: HFTarget, data: DataConfig, folder: Path, accelerator: Accelerator) -> Manifest:
    """Run both parts of the stage as the pipeline does."""
    examples = regenerate(CONFIG, data, target, folder / "answers", accelerator)
    return distill(CONFIG, data, target, folder / "distill", accelerator, examples=examples)


def start(rank: int, num_processes: int, port: int, target: HFTarget, data: DataConfig, folder: Path) -> int:
    """Fork a process that distils as one of several; return its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == num_processes
        make(target, data, folder, accelerator)
        status = 0
    finally:
        os._exit(status)


def attempt(num_processes: int, target: HFTarget, data: DataConfig, folder: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [start(rank, num_processes, port, target, data, folder) for rank in range(num_processes)]


def wait(children: list[int]) -> list[int]:
    """Wait until all processes have ended; return their exit codes."""
    deadline, codes = time.monotonic() + LONGEST_SECONDS, {}
    while len(codes) < len(children):
        for child in children:
            ended, status = os.waitpid(child, os.WNOHANG) if child not in codes else (0, 0)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        assert time.monotonic() < deadline, "a process hangs"
        time.sleep(0.002)
    return list(codes.values())


def finished(folder: Path) -> dict[str, int]:
    """Map the finished shards to the times at which they were written."""
    patterns = ("answers/answers-*[0-9].json", "distill/shard-*[0-9].json")
    return {path.name: path.stat().st_mtime_ns for pattern in patterns for path in folder.glob(pattern)}


def main() -> None:
    # Forked processes share tqdm's lock, and launched ones don't. A process killed with the lock
    # would block all others.
    tqdm.set_lock(threading.RLock())
    target_dir, data_path, folder, num_shards, num_kills, seed = sys.argv[1:]
    target = load_target(TargetConfig(name_or_path=target_dir, device="cpu"))
    data, rng = DataConfig(source="messages", path=data_path, max_length=60), random.Random(int(seed))
    attempts, half = [], int(num_shards) // 2
    moments = [moment for first in (1, 1 + half) for moment in rng.sample(range(first, first + half), int(num_kills) // 2)]
    for index, enough in enumerate(sorted(moments)):
        before, num_processes = finished(Path(folder)), (2, 1, 3)[index % 3]
        children = attempt(num_processes, target, data, Path(folder))
        # The previous attempt wrote enough shards before it died, so kill this one at its start.
        if len(before) >= enough:
            time.sleep(rng.uniform(0, 0.3))
        deadline = time.monotonic() + LONGEST_SECONDS
        while len(finished(Path(folder))) < enough:
            assert time.monotonic() < deadline, "an attempt makes no shard"
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.01))
        victims = rng.sample(children, rng.choice([1, len(children)]))
        for child in [*victims, *(child for child in children if child not in victims)]:
            os.kill(child, signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.02))
        killed = -signal.SIGKILL in wait(children)  # false if all had ended before the signal
        after = finished(Path(folder))
        kept = all(after.get(name) == moment for name, moment in before.items())
        attempts.append({"num_processes": num_processes, "num_finished": len(after), "killed": killed, "kept": kept})
    assert wait(attempt(2, target, data, Path(folder))) == [0, 0]
    sys.stdout.write(json.dumps(attempts))


if __name__ == "__main__":
    main()
