"""Killed and resumed runs against an unbroken one: in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from outrider.train.tracking import read_records

from .conftest import DRAFTER, TRAIN

SCRIPTS = Path(__file__).parent
STEPS = 5
# Micro batches of unequal label counts, records over several steps, and checkpoints at every one.
CONFIG = {**TRAIN, "steps": STEPS, "batch_size": 2, "gradient_accumulation": 2, "max_positions": 20, "log_every": 2}


def launch(command: list[str], timeout_seconds: float = 120) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def records(folder: Path) -> list[dict[str, Any]]:
    lines = read_records(folder / "train" / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in ("seconds", "positions_per_second")} for line in lines]


def test_a_run_killed_at_any_moment_ends_with_the_bits_of_an_unbroken_one(
    tiny_target_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    drafter = {**DRAFTER, "kind": "dropout"}
    script = str(SCRIPTS / "kill_and_resume.py")
    report = json.loads(
        launch([script, str(tiny_target_dir), str(shards_dir), str(tmp_path), json.dumps(CONFIG), json.dumps(drafter)])
    )
    assert len(report) == 9
    unbroken = tmp_path / "unbroken"
    expected = records(unbroken)
    assert [record["step"] for record in expected] == [2, 4, 5]
    for moment, outcome in report.items():
        assert records(tmp_path / moment) == expected, moment
        weights = (tmp_path / moment / "drafter" / "model.safetensors").read_bytes()
        assert weights == (unbroken / "drafter" / "model.safetensors").read_bytes(), moment
        assert outcome["losses"] == 2 * (STEPS - outcome["checkpoint"]), f"{moment}: steps were made again"
        left = sorted(path.name for path in (tmp_path / moment / "train" / "checkpoints").iterdir())
        assert left == ["step-00000004", "step-00000005"], moment
        assert sorted(path.name for path in (tmp_path / moment).iterdir()) == ["drafter", "train"], moment
    # What a kill may cost is the step in flight.
    assert {moment: outcome["checkpoint"] for moment, outcome in report.items()} == {
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
