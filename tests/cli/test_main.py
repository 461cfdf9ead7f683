"""The command line in separate processes, started from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OUTRIDER = [sys.executable, "-c", "from outrider.cli.main import main; main()"]


def call(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_recipe_is_found_from_any_folder_and_printed_without_loading_torch(tmp_path: Path) -> None:
    script = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    train = REPOSITORY / "train.py"
    result = call(sys.executable, "-c", script, train, "conf=redrafter_vicuna7b", "--show", "train.steps=300", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "steps: 3" in result.stdout
    assert "lmsys/vicuna-7b-v1.3" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("debug", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_mistake_prints_a_traceback_only_with_debugging(tmp_path: Path, debug: str) -> None:
    result = call(*OUTRIDER, "run", "conf=demo", "stages=[distil]", cwd=tmp_path, OUTRIDER_DEBUG=debug)
    assert 'stages[0]="distil": must be one of' in result.stderr
    assert ("Traceback" in result.stderr) == (debug == "1")
    assert result.returncode == (1 if debug == "1" else 2)
    assert list(tmp_path.iterdir()) == []
