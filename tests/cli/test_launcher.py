"""A launch of several processes: mistakes are printed once, and before anything is launched."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli import compose, errors, launch
from outrider.cli.errors import user_errors
from outrider.cli.main import main

SCRIPT = """
import os, sys
from outrider.cli.errors import user_errors
with user_errors():
    if sys.argv[1] == "raise":
        raise ValueError("data.limit is 0; raise it")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    import time
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("what", "message", "status"),
    [
        pytest.param("raise", "data.limit is 0", 2, marks=pytest.mark.slow),
        ("kill", "process 1 of the launch was ended by SIGKILL", 128 + signal.SIGKILL),
    ],
)
def test_an_error_of_launched_processes_is_printed_once(what: str, message: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = launch.launch_command("pipeline_cpu", ["--main_process_port", "0"], ["script", what])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.stderr.count(message) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert result.returncode == status
    assert not [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"]


@pytest.mark.parametrize(("local_rank", "waits"), [(None, False), ("0", False), ("2", True)])
def test_the_first_process_prints_an_error_before_the_others(local_rank, waits, monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit), user_errors():
        raise ValueError("data.limit is 0")
    assert waited == [errors.SAME_ERROR_SECONDS] * waits
    assert "data.limit is 0" in capsys.readouterr().err


def launch_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run a command, and return the commands of the launches that it would start."""
    launched: list[list[str]] = []

    def record(file: str, options: list[str], program: list[str]) -> None:
        launched.append(launch.launch_command(file, options, program))
        raise SystemExit(0)

    monkeypatch.setattr(launch, "launch", record)
    monkeypatch.setattr(compose, "launch", record)
    program, start = (["outrider run"], compose.main) if arguments[0] == "run" else (["outrider", arguments[0]], main)
    monkeypatch.setattr(sys, "argv", [*program, *arguments[1:]])
    with pytest.raises(SystemExit):
        start()
    return launched


def arguments_of(command: str, target: Path, *changes: str, drafter: str = "suffix") -> list[str]:
    options = ["--target", str(target), "--drafter", drafter, "--suite", "stdlib", "--limit", "1"]
    return [command, *options, "--launch", "pipeline_cpu", *changes]


@pytest.mark.parametrize("command", ["eval", "certify"])
def test_a_command_without_a_mistake_is_launched(command: str, demo_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(command, demo_target_dir, "--stage-layers", "4,2,2", "--num-processes=4")
    (launched,) = launch_of(arguments, monkeypatch)
    assert launched[launched.index("--num-processes=4") + 1 :][:3] == ["-m", "outrider.cli", command]
    assert "--launch" not in launched
    assert launched[-2:] == ["--stage-layers", "4,2,2"]


@pytest.mark.parametrize("command", ["eval", "certify"])
@pytest.mark.parametrize(
    ("changes", "drafter", "message"),
    [
        ([], "suffix", "3 processes are launched, and target.stage_layers is not set"),
        (["--stage-layers", "4,5"], "suffix", "target.stage_layers is [4, 5], which is 9 layers"),
        (["--stage-layers", "4,4", "--num-processes", "2"], "suffix", "2 were launched"),
        (["--stage-layers", "4,4", "--num-processes", "x"], "suffix", "--num_processes is x"),
        (["--stage-layers", "4,4", "--memory-budget-gib", "1"], "suffix", "work together with memory_budget_gib"),
        (["--stage-layers", "4,4", "--target", "/nowhere"], "suffix", "/nowhere"),
        (["--stage-layers", "4,4"], "/nowhere", "/nowhere"),
    ],
)
def test_a_mistake_is_printed_before_a_launch(command, changes, drafter, message, demo_target_dir, monkeypatch, capsys):
    assert launch_of(arguments_of(command, demo_target_dir, *changes, drafter=drafter), monkeypatch) == []
    assert message in " ".join(capsys.readouterr().err.split())


def test_processes_of_another_launcher_need_stages_too(demo_target_dir, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = arguments_of("eval", demo_target_dir)
    assert launch_of(arguments[: arguments.index("--launch")], monkeypatch) == []
    assert "2 processes are launched, and target.stage_layers is not set" in capsys.readouterr().err


def test_a_run_is_checked_before_its_launch(demo_target_dir, monkeypatch, capsys, tmp_path):
    options = [
        f"output_dir={tmp_path}",
        f"target.name_or_path={demo_target_dir}",
        "stages=[eval]",
        "eval.suites=[{name: stdlib, limit: 1}]",
    ]
    run = ["run", "demo", *options, "--launch", "pipeline_cpu"]
    assert launch_of([*run, "target.stage_layers=[4,4]"], monkeypatch) == []
    assert "holds no drafter" in capsys.readouterr().err
    monkeypatch.setattr("outrider.cli.run.require_inputs", lambda config, plan: None)
    assert launch_of([*run, "target.stage_layers=[4,5]"], monkeypatch) == []
    assert "target.stage_layers is [4, 5], which is 9 layers" in capsys.readouterr().err
    (launched,) = launch_of([*run, "target.stage_layers=[4,4]"], monkeypatch)
    assert "outrider.train" in launched


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--batch-size", "2"], "batch_sizes is [2]: stages decode one prompt at a time; set batch_sizes=[1]"),
        (
            ["--decode", "pipelined", "--acceptance", "typical", "--temperature", "1"],
            "acceptance is typical, where answers depend on drafts; set acceptance=exact, or decode=synchronous",
        ),
    ],
)
def test_a_mistake_of_an_evaluation_is_printed_before_a_launch(changes, message, demo_target_dir, monkeypatch, capsys):
    arguments = arguments_of("eval", demo_target_dir, "--stage-layers", "4,4", *changes)
    assert launch_of(arguments, monkeypatch) == []
    assert message in " ".join(capsys.readouterr().err.split())
