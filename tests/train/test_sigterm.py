"""SIGTERM: several processes stop at the same step, and the launcher's end is noticed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from outrider.train import processes
from outrider.train.processes import Sigterm

from ..conftest import REPOSITORY


class OneOfTwo(Accelerator):
    """Accelerator of two processes; the other one is as fast and sends `other_come`."""

    num_processes = 2
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.other_come = 0.0
        self.num_asked = 0

    def reduce(self, stop_votes: torch.Tensor, reduction: str) -> torch.Tensor:  # type: ignore[override]
        assert reduction == "sum"
        self.num_asked += 1
        return stop_votes + torch.stack([torch.tensor(self.other_come), stop_votes[1]])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 100.0

    monkeypatch.setattr(processes.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.mark.parametrize(("seconds", "num_expected"), [(30.0, 100), (1.0, 20), (0.01, 1)])
def test_processes_synchronize_every_few_seconds(clock: Any, seconds: float, num_expected: int) -> None:
    accelerator = OneOfTwo()
    with Sigterm(accelerator, step=7) as sigterm:
        for done in range(8, 108):
            clock.now += seconds
            assert not sigterm.stops(done, host_waits=False)
    assert accelerator.num_asked == pytest.approx(num_expected, abs=1)


def test_a_signal_to_the_other_process_stops_this_one_within_seconds(clock: Any) -> None:
    accelerator = OneOfTwo()
    with suppress(SystemExit), Sigterm(accelerator, step=0) as sigterm:
        for done in range(1, 50):
            clock.now += 2.0
            accelerator.other_come = float(done > 10)
            if sigterm.stops(done, host_waits=False):
                break
    assert done in (11, 12)


def test_a_record_is_used_to_synchronize(clock: Any) -> None:
    accelerator = OneOfTwo()
    with suppress(SystemExit), Sigterm(accelerator, step=0) as sigterm:
        clock.now += 0.001
        assert not sigterm.stops(1, host_waits=False)
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 0.001
        assert not sigterm.stops(2, host_waits=False)
        assert sigterm.stops(3, host_waits=True)


SCRIPT = """
import signal, sys, time
from outrider.train.processes import make_accelerator
make_accelerator()
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + "/ended", "w").close(), sys.exit()))
open(sys.argv[1] + "/begun", "w").close()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process of its parent's death")
def test_training_stops_when_its_launcher_dies(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(tmp_path / "script.py"), str(tmp_path)]
    launcher = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "begun", 120)
    launcher.kill()
    launcher.wait()
    wait_for(tmp_path / "ended", 30)


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.01)
