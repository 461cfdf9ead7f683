"""What may be run as a module, and what a module that is no program does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outrider.cli.launch import launch_command
from outrider.data import require_entry


def run_module(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("outrider.train.run", "accelerate launch -m outrider.train conf=RECIPE"),
        ("outrider.cli.run", "outrider run conf=RECIPE"),
        ("outrider.cli.main", "outrider --help"),
        ("outrider.eval", "outrider eval"),
        ("outrider.models.drafters.eagle", "outrider --help"),
        ("outrider.data.chat", "outrider data"),
    ],
)
def test_a_module_that_is_no_program_never_ends_well(module: str, command: str, tmp_path: Path) -> None:
    result = run_module(module, cwd=tmp_path)
    assert result.returncode != 0
    assert f"Use: {command}" in result.stderr
    assert module in result.stderr


def test_the_entry_of_launchers_and_the_command_run_as_modules(tmp_path: Path) -> None:
    result = run_module("outrider.train", "conf=demo", "--show", "train.steps=70", cwd=tmp_path)
    assert "steps: 70" in result.stdout, result.stderr
    assert "redrafter_vicuna7b" in run_module("outrider.cli", "recipes", cwd=tmp_path).stdout


def test_the_guard_leaves_other_programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["python", "-m", "pytest"], ["python", "-um", "outrider.train"], ["python", "-c", "x"]):
        monkeypatch.setattr(sys, "argv", ["-m"])
        monkeypatch.setattr(sys, "orig_argv", arguments)
        require_entry()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-um", "outrider.train.run"])
    with pytest.raises(SystemExit, match="no program"):
        require_entry()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    require_entry()


def test_a_launch_file_is_named_or_a_path(tmp_path: Path) -> None:
    command = launch_command("one_node", ["--num_processes", "4"], ["outrider.train", "conf=demo", "train.steps=3"])
    config = Path(command[command.index("--config_file") + 1])
    assert yaml.safe_load(config.read_text())["num_processes"] == 8
    assert command[-6:] == ["--num_processes", "4", "-m", "outrider.train", "conf=demo", "train.steps=3"]
    (tmp_path / "mine.yaml").write_text("num_processes: 2\n")
    assert str(tmp_path / "mine.yaml") in launch_command(str(tmp_path / "mine.yaml"), [], ["outrider.cli"])
    with pytest.raises(ValueError, match="did you mean one_node"):
        launch_command("one_nod", [], ["outrider.cli"])


@pytest.mark.slow
def test_two_processes_are_launched_by_name(tmp_path: Path) -> None:
    script = "from outrider.cli.main import main; main()"
    arguments = ["run", "--launch", "cpu", "demo", "data.limit=2", "data.max_length=64", "stages=[distill]", "num_threads=1"]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "outputs/demo/distill/manifest.json").exists()
