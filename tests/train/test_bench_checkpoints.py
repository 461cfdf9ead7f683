"""The benchmark of checkpoints, at a tiny size."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_checkpoints.py"


def test_every_method_of_checkpoints_is_measured(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "record.json"
    sizes = ["--width", "8", "--layers", "2", "--rows", "2", "--steps", "3", "--cycles", "2"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *sizes, "--folder", str(tmp_path), "--output", str(output)])
    accelerator.free_memory()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(output.read_text())
    assert report["parameters"] == 2 * (8 * 8 + 8)
    assert list(report["methods"]) == ["none", "save_state", "at_once", "background"]
    assert all(len(cycles) == 2 for cycles in report["cycles"].values())
    assert report["methods"]["none"]["held_up_seconds"] < report["methods"]["at_once"]["held_up_seconds"]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"], "what was written is removed"
