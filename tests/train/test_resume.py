"""Killed and resumed runs, in processes of their own, against an uninterrupted one."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ..forks import result_of
from . import kills, other_processes
from .conftest import DRAFTER, TRAIN
from .resumed import assert_same_records, assert_same_weights, records

CPU = torch.device("cpu")
"""Device of all runs here: they are forked, which is impossible after using a GPU. tests/gpu/
resumes on a GPU."""
# Micro-batches with unequal numbers of labels, records over several steps, and a checkpoint at
# every step.
OF_ONE = {**TRAIN, "steps": 5, "batch_size": 2, "gradient_accumulation": 2, "max_positions": 20, "log_every": 2}
OF_TWO = {**TRAIN, "steps": 6, "batch_size": 2, "gradient_accumulation": 1, "checkpoint_every": 2}
CHECKPOINTS_OF_ONE = {
    "before the first checkpoint": [0],
    "in the middle of a step": [1, 2],  # a kill may lose the checkpoint that is being written
    "between a record and its checkpoint": [1, 2],
    "in a half-written checkpoint": [2],
    "before a checkpoint gets its name": [2],
    "before old checkpoints are removed": [3],
    "after the last step": [5],
    "with half a drafter": [5],
    "before the summary": [5],
}
CHECKPOINTS_OF_TWO = {
    "before the first checkpoint": [0],
    "in the middle of a step": [2],
    "before a process writes its part": [2],
    "after a process has written its part": [2],
    "before a checkpoint is marked complete": [2],
    "before old checkpoints are removed": [4],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one", *(pytest.param(way, marks=pytest.mark.long) for way in ("zero2", "zero3", "fsdp2"))])
def test_a_run_killed_at_any_moment_resumes_to_equal_bits(way, tiny_target_dir, shards_dir, tmp_path):
    if way.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("deepspeed isn't installed: pip install 'outrider[deepspeed]'")
    config, checkpoints = (OF_ONE, CHECKPOINTS_OF_ONE) if way == "one" else (OF_TWO, CHECKPOINTS_OF_TWO)
    options = (config, {**DRAFTER, "kind": "dropout"}, way)
    report = result_of(kills.main, tiny_target_dir, shards_dir, tmp_path, *options, ACCELERATE_USE_CPU="true")
    assert report.keys() == checkpoints.keys()
    unbroken = tmp_path / "unbroken"
    expected = records(unbroken)
    assert [record["step"] for record in expected] == ([2, 4, 5] if way == "one" else [1, 2, 3, 4, 5, 6])
    for moment, outcome in report.items():
        assert outcome["checkpoint"] in checkpoints[moment], moment
        assert_same_records(records(tmp_path / moment), expected, CPU)
        drafters = (folder / "drafter" / "model.safetensors" for folder in (tmp_path / moment, unbroken))
        assert_same_weights(*drafters, CPU)
        steps = config["steps"] - outcome["checkpoint"]
        assert outcome["losses"] == config["gradient_accumulation"] * steps, f"{moment}: steps were made again"
        left = sorted(path.name for path in (tmp_path / moment / "train" / "checkpoints").iterdir())
        assert left == [f"step-0000000{step}" for step in ((4, 5) if way == "one" else (4, 6))], moment
        assert sorted(path.name for path in (tmp_path / moment).iterdir()) == ["drafter", "train"], moment


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
def test_sigterm_waits_for_the_write_and_one_process_resumes_for_two(tiny_target_dir, shards_dir, tmp_path, run_train):
    base = {**TRAIN, "steps": 8}
    for_two, for_one = ({**base, "batch_size": size, "global_batch_size": 8} for size in (2, 4))
    folders = (tiny_target_dir, shards_dir, tmp_path / "both")
    codes, left = result_of(other_processes.main, *folders, for_two, for_one, DRAFTER, ACCELERATE_USE_CPU="true")
    assert codes == [143, 143]
    steps = [int(name.removeprefix("step-")) for name in left]
    assert len(steps) == 2
    assert 2 <= steps[-1] < 8, "nothing half-written is left, and the step of the signal is saved"
    run_train("one", **for_one)
    pairs = list(zip(records(tmp_path / "both"), records(tmp_path / "one"), strict=True))
    assert len(pairs) == 8
    for ours, theirs in pairs:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["tokens_seen"] == theirs["tokens_seen"]


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
