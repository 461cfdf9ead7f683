"""Trainings of two sharded processes that are killed: the resumed run equals the unbroken one, in bits."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ..conftest import REPOSITORY
from .conftest import DRAFTER, TRAIN
from .launching import numbers, weights

SCRIPT = Path(__file__).parent / "sharded_kills.py"
CONFIG = {**TRAIN, "steps": 6, "batch_size": 2, "checkpoint_every": 2}
LAST_CHECKPOINTS = {
    "before the first checkpoint": 0,
    "in the middle of a step": 2,
    "before a process writes its part": 2,
    "after a process has written its part": 2,
    "before a checkpoint is marked complete": 2,
    "before old checkpoints are removed": 4,
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero2", "zero3", "fsdp2"])
def test_a_sharded_run_killed_at_any_moment_resumes_to_equal_bits(way, tiny_target_dir, shards_dir, tmp_path):
    if way != "fsdp2" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed isn't installed: pip install 'outrider[deepspeed]'")
    drafter = json.dumps({**DRAFTER, "kind": "dropout"})
    arguments = [str(SCRIPT), *map(str, (tiny_target_dir, shards_dir, tmp_path)), json.dumps(CONFIG), drafter, way]
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stderr[-8000:]
    assert json.loads(result.stdout.splitlines()[-1]) == LAST_CHECKPOINTS
    expected, expected_numbers = weights(tmp_path / "unbroken"), numbers(tmp_path / "unbroken")
    assert len(expected_numbers) == CONFIG["steps"]
    for name in LAST_CHECKPOINTS:
        actual = weights(tmp_path / name)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected), name
        assert numbers(tmp_path / name) == expected_numbers, name
        assert not list((tmp_path / name / "train").rglob(".*.outrider-partial")), name
