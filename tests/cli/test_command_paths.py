"""Local paths of every command: `~` is expanded.

All missing paths are named at once, by option.
"""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.certify import certify_command
from outrider.cli.eval import eval_command
from outrider.cli.export import export_command, import_command
from outrider.cli.hub import package_command
from outrider.cli.options import take_paths
from outrider.cli.tune import tune_command

NOWHERE = ["--target", "./no/target", "--suite-path", "q.jsonl"]
COMMANDS = {
    "eval": [*NOWHERE[:2], "--drafter", "./d", "--suite", "mt_bench", "--suite-path", "mt_bench=q.jsonl", "--suite", "p.jsonl"],
    "tune": [*NOWHERE, "--drafter", "./d", "--chat-template", "t.jinja"],
    "certify": [*NOWHERE, "--drafter", "./d"],
    "export": ["./d", "--target", "./no/target", "--to", "vllm", "--output", "out"],
    "import": ["./d/e", "--target", "./no/target", "--output", "out"],
    "package": ["./d", "--output", "out", "--records", "r", "--run", "run", "--certificate", "c.json"],
}
FUNCTIONS = {
    "eval": eval_command,
    "tune": tune_command,
    "certify": certify_command,
    "export": export_command,
    "import": import_command,
    "package": package_command,
}
MISSING = {
    "eval": ["--target", "--drafter", "--suite is 'p.jsonl'", "--suite-path is 'q.jsonl'"],
    "tune": ["--target", "--drafter", "--suite-path", "--chat-template"],
    "certify": ["--target", "--drafter", "--suite-path"],
    "export": ["--target", "DRAFTER"],
    "import": ["--target", "FOLDER"],
    "package": ["DRAFTER", "--records", "--run", "--certificate"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_all_missing_paths_of_a_command_are_one_error(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(FUNCTIONS[command])
    result = CliRunner().invoke(app, COMMANDS[command])
    assert isinstance(result.exception, ValueError), result.output
    message = str(result.exception)
    assert f"{len(MISSING[command])} paths don't exist" in message
    assert all(option in message for option in MISSING[command]), message


def test_the_home_directory_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "q.jsonl").touch()
    suites = {"suite": ["~/q.jsonl"], "suite_path": ["mt=~/q.jsonl"]}
    assert take_paths({"target": "~", "drafter": [Path("~")], **suites, "output": Path("~/o")}) == {
        "target": str(tmp_path),
        "drafter": [tmp_path],
        "suite": [str(tmp_path / "q.jsonl")],
        "suite_path": [f"mt={tmp_path / 'q.jsonl'}"],
        "output": tmp_path / "o",
    }
