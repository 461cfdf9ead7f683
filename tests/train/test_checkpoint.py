"""What counts as a checkpoint."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator

from outrider.train.checkpoint import (
    complete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    remove_incomplete,
    save_checkpoint,
)


def saved(accelerator: Accelerator, directory: Path, *steps: int, keep: int = 9) -> torch.nn.Module:
    accelerator.free_memory()
    model = torch.nn.Linear(2, 2)
    prepared = accelerator.prepare(model)
    for step in steps:
        torch.nn.init.constant_(model.weight, step)
        save_checkpoint(accelerator, directory, step, {"extra": step * 10}, keep=keep)
    return prepared


def test_only_the_newest_are_kept_and_the_last_comes_back(accelerator: Accelerator, tmp_path: Path) -> None:
    model = saved(accelerator, tmp_path, 9, 10, 11, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]
    torch.nn.init.constant_(model.weight, 0)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    marker = load_checkpoint(accelerator, latest)
    assert (marker["step"], marker["extra"]) == (11, 110)
    assert torch.equal(model.weight, torch.full((2, 2), 11.0))


def test_what_is_not_whole_does_not_count_and_is_removed(accelerator: Accelerator, tmp_path: Path) -> None:
    saved(accelerator, tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-00000005" / "complete.json").unlink()  # killed while it was being removed
    (tmp_path / "step-00000004" / "complete.json").write_text('{"step": 4, "fil')  # a power cut tore the marker
    weights = tmp_path / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])  # a power cut tore the weights
    half = tmp_path / ".step-00000006.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]
    remove_incomplete(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_half_written_checkpoint_is_written_anew(accelerator: Accelerator, tmp_path: Path) -> None:
    half = tmp_path / ".step-00000001.partial"
    half.mkdir()
    (half / "leftover").write_bytes(b"")
    saved(accelerator, tmp_path, 1)
    files = json.loads((tmp_path / "step-00000001" / "complete.json").read_text())["files"]
    assert "leftover" not in files
    assert "model.safetensors" in files


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    remove_incomplete(tmp_path / "nowhere")
    assert latest_checkpoint(tmp_path / "nowhere") is None
