"""Killed and resumed runs, in new processes, against an uninterrupted one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from .conftest import DRAFTER, TRAIN
from .resumed import assert_same_records, assert_same_weights, records

SCRIPTS = Path(__file__).parent
CPU = torch.device("cpu")
"""Device of all runs here: they are forked, which is impossible after using a GPU. tests/gpu/
resumes on a GPU."""
STEPS = 5
# Micro-batches with unequal numbers of labels, records over several steps, and a checkpoint at
# every step.
CONFIG = {**TRAIN, "steps": STEPS, "batch_size": 2, "gradient_accumulation": 2, "max_positions": 20, "log_every": 2}


def launch(command: list[str], timeout_seconds: float = 120) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def report_of(command: list[str]) -> Any:
    """Read the last line that a script prints; libraries print before it."""
    return json.loads(launch(command).splitlines()[-1])


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_to_equal_bits(tiny_target_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    drafter = {**DRAFTER, "kind": "dropout"}
    script = str(SCRIPTS / "kill_and_resume.py")
    report = report_of([script, str(tiny_target_dir), str(shards_dir), str(tmp_path), json.dumps(CONFIG), json.dumps(drafter)])
    assert len(report) == 9
    unbroken = tmp_path / "unbroken"
    expected = records(unbroken)
    assert [record["step"] for record in expected] == [2, 4, 5]
    for moment, outcome in report.items():
        assert_same_records(records(tmp_path / moment), expected, CPU)
        drafters = (folder / "drafter" / "model.safetensors" for folder in (tmp_path / moment, unbroken))
        assert_same_weights(*drafters, CPU)
        assert outcome["losses"] == 2 * (STEPS - outcome["checkpoint"]), f"{moment}: steps were made again"
        left = sorted(path.name for path in (tmp_path / moment / "train" / "checkpoints").iterdir())
        assert left == ["step-00000004", "step-00000005"], moment
        assert sorted(path.name for path in (tmp_path / moment).iterdir()) == ["drafter", "train"], moment
    # A kill may lose the current step, and the checkpoint that is being written.
    lost = {"in the middle of a step", "between a record and its checkpoint"}
    checkpoints = {moment: outcome["checkpoint"] for moment, outcome in report.items()}
    assert all(checkpoints[moment] in (1, 2) for moment in lost)
    assert checkpoints | dict.fromkeys(lost, 2) == {
        "before the first checkpoint": 0,
        "in the middle of a step": 2,
        "between a record and its checkpoint": 2,
        "in a half-written checkpoint": 2,
        "before a checkpoint gets its name": 2,
        "before old checkpoints are removed": 3,
        "after the last step": 5,
        "with half a drafter": 5,
        "before the summary": 5,
    }


def test_a_resumed_run_may_have_rounding_errors_on_a_gpu_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, gpu = torch.randn(9, 9), torch.device("cuda")
    for name, noise in (("unbroken", 0.0), ("rounded", 1e-5), ("wrong", 0.1)):
        save_file({"weight": weight + noise * torch.randn(9, 9)}, tmp_path / name)
    unbroken = tmp_path / "unbroken"
    assert_same_weights(unbroken, unbroken, CPU)
    assert_same_weights(tmp_path / "rounded", unbroken, gpu)
    line = {"step": 1, "loss": 2.0, "positions_seen": 3}
    assert_same_records([line], [line], CPU)
    assert_same_records([{**line, "loss": 2.0001}], [line], gpu)
    for device, file, loss in ((CPU, "rounded", 2.0001), (gpu, "wrong", 2.1)):
        with pytest.raises(AssertionError):
            assert_same_weights(tmp_path / file, unbroken, device)
        with pytest.raises(AssertionError):
            assert_same_records([{**line, "loss": loss}], [line], device)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_sigterm_waits_for_the_write_and_one_process_resumes_for_two(tiny_target_dir, shards_dir, tmp_path, run_train):
    base = {**TRAIN, "steps": 8}
    for_two, for_one = ({**base, "batch_size": size, "global_batch_size": 8} for size in (2, 4))
    folders = [str(tiny_target_dir), str(shards_dir), str(tmp_path / "both")]
    script = str(SCRIPTS / "other_processes.py")
    report = report_of([script, *folders, *map(json.dumps, (for_two, for_one, DRAFTER))])
    assert report["codes"] == [143, 143]
    steps = [int(name.removeprefix("step-")) for name in report["left"]]
    assert len(steps) == 2
    assert 2 <= steps[-1] < 8, "nothing half-written is left, and the step of the signal is saved"
    run_train("one", **for_one)
    pairs = list(zip(records(tmp_path / "both"), records(tmp_path / "one"), strict=True))
    assert len(pairs) == 8
    for ours, theirs in pairs:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["tokens_seen"] == theirs["tokens_seen"]
