"""Script that measures the parts of a decode step."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_drafting.py"


def test_the_benchmark_of_drafting_measures_both_checkouts_in_turns(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, settings = tmp_path / "drafting.json", ["plain", "draft_model 5x8"]
    arguments = ["--target", tiny_target_dir, "--settings", *settings, "--against", ROOT, "--output", output]
    sizes = ["--rounds", 1, "--new-tokens", 9]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments + sizes)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    report = json.loads(output.read_text())
    assert report["milliseconds_per_step"].keys() == {"here", "against"}
    for parts in report["milliseconds_per_step"].values():
        assert list(parts) == settings
        assert parts["plain"]["linears"] == 0
        drafted = parts["draft_model 5x8"]
        assert 0 < drafted["linears"] < drafted["draft"]
        assert min(drafted["forward"], drafted["rest"]) > 0
    assert "draft_model 5x8, against" in capsys.readouterr().out
