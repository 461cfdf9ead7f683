"""Checks the commands of the documentation: each is composed or parsed, and none runs."""

import argparse
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from accelerate.commands.launch import launch_command_parser

from outrider.cli import build, compose, launch
from outrider.cli import run as stages
from outrider.cli.command_line import CommandLine
from outrider.cli.commands import COMMANDS, function_of
from outrider.cli.config import ForecastOptions, RunConfig

from .doc_blocks import REPOSITORY, commands

ALLOWED = {
    *(".", "cd", "docker", "export", "git", "mkdir", "pip", "pre-commit", "sbatch", "scontrol", "srun"),
    *(
        "trtllm-build",
        "trtllm-serve",
        "vllm",
        "wandb",
        "tensorboard",
        "curl",
        "module",
        "source",
        "hf",
        "cat",
        "jq",
        "head",
        "ln",
    ),
    *("sha256sum", "llama-server", "optimum-cli", "sed"),
}
"""Programs of others, whose arguments aren't checked."""
KEYWORDS = {"do", "else", "exec", "then"}
BUILTINS = {"case", "done", "echo", "esac", "fi", "for", "if", "set", "trap", "wait", "while"}
"""Of the shell."""
ALLOWED_MODULES = {"venv", "sglang.launch_server", "medusa.inference.cli", "vllm"} | {
    f"recurrent_drafting.{package}cmd.generate" for package in ("", "mlx.")
}
ALLOWED_SCRIPTS = {"examples/medusa/convert_checkpoint.py", "llama.cpp/convert_hf_to_gguf.py"}
"""TensorRT-LLM's, and llama.cpp's."""
RECIPES = ("train.py", "outrider.train", "train")


class ParsedError(Exception):
    """Raised once a script has parsed its arguments."""


def check(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose or parse a command. Raises where it wouldn't start. A variable's value is 1."""
    words = [re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", word) for word in command]
    program, *arguments = words[1:] if words[0] in KEYWORDS else words
    if "bash" in command and "-c" in command:
        for inner in commands(command[-1]):
            check(inner, monkeypatch)
    program = program.removeprefix(".venv/bin/").removeprefix("plain/bin/")
    if program == "outrider":
        check_outrider(arguments, monkeypatch)
    elif program == "accelerate":
        check_launch(arguments, monkeypatch)
    elif program in ("python", "torchrun"):
        check_python(arguments, monkeypatch)
    elif program == "make":
        check_make(arguments)
    elif program == "pytest":
        assert [name for name in arguments if name.startswith("tests/") and not (REPOSITORY / name).exists()] == []
    elif (REPOSITORY / program).is_file():
        assert (REPOSITORY / program).stat().st_mode & 0o100, f"{program} can't be executed"
    else:
        assert program in ALLOWED | BUILTINS, (
            f"{program} is neither a command of this repository nor in the list of allowed programs"
        )


def check_outrider(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the arguments of a command as it would; those of `outrider run` are composed."""
    if not arguments or {"--help", "--version"} & set(arguments):
        return
    name = next((name for words in (2, 1) if (name := " ".join(arguments[:words])) in COMMANDS), None)
    assert name is not None, f"there is no command {arguments[0]}"
    rest = arguments[len(name.split()) :]
    if name == "run":
        run_config(rest, monkeypatch)
        return
    if name == "forecast":
        line = compose.read_run_line(rest, ForecastOptions)
        prepare_files(line.own)
        compose.compose(line).require_options()
        return
    _, line = build.build_options(get_type_hints(function_of(name))["options"], rest)
    check_launch_options(line)


def check_launch_options(line: CommandLine) -> None:
    """Parse the options of `--launch NAME`, whose file must be packaged or a path."""
    if line.launch is not None:
        launch_command_parser().parse_args([*line.launch_options, "program"])
        assert launch.launch_command(line.launch, line.launch_options, [])


def check_launch(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the options of `accelerate launch`, and compose what it launches."""
    assert arguments[0] == "launch"
    options = launch_command_parser().parse_args(arguments[1:])
    assert options.config_file is None or Path(options.config_file).is_file(), options.config_file
    assert options.training_script in RECIPES, options.training_script
    run_config(options.training_script_args, monkeypatch)


def check_python(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose train.py's arguments, and parse those of a script."""
    while arguments[0].startswith("-") and arguments[0] != "-m":
        arguments = arguments[1:]
    script, *rest = arguments[1:] if arguments[0] == "-m" else arguments
    if script in RECIPES:
        run_config(rest, monkeypatch)
    elif arguments[0] == "-m":
        assert script in ALLOWED_MODULES, script
    elif script not in ALLOWED_SCRIPTS:
        check_script(script, rest, monkeypatch)


def check_script(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script of ours parse its arguments, and stop it there."""
    path = REPOSITORY / script
    assert path.is_file(), script
    parse = argparse.ArgumentParser.parse_args

    def parse_typer_and_stop(main: Callable[..., Any]) -> None:
        app = typer.Typer(add_completion=False)
        app.command()(main)
        typer.main.get_command(app).make_context(script, list(arguments))
        raise ParsedError

    def parse_and_stop(parser: argparse.ArgumentParser, *options: Any) -> None:
        parse(parser, *options)
        raise ParsedError

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patched.setattr(typer, "run", parse_typer_and_stop)
        patched.setattr(sys, "argv", [script, *arguments])
        patched.syspath_prepend(str(path.parent))
        with pytest.raises(ParsedError):
            runpy.run_path(str(path), run_name="__main__")


def check_make(arguments: list[str]) -> None:
    """Look targets and variables up in the Makefile."""
    makefile = (REPOSITORY / "Makefile").read_text()
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        pattern = rf"^{name} \?=" if is_variable else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {name}"


def run_config(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> RunConfig | None:
    """Return what `outrider run ARGUMENTS` would run; None where it only prints."""
    if {"--help", "-h"} & set(arguments):
        return None
    configs: list[RunConfig] = []
    line = compose.read_run_line(arguments)
    check_launch_options(line)
    prepare_files(line.own)
    with monkeypatch.context() as patched:
        patched.setattr(stages, "run", lambda config, plan: configs.append(config))
        compose.run_command(line.own)
    assert len(configs) == 1 or "--show" in arguments, arguments
    return configs[0] if configs else None


def prepare_files(arguments: Sequence[str]) -> None:
    """Write the recipes and drafters that a command names into the current folder.

    The files have only what composing reads.
    """
    from .doc_files import write_drafter_config, write_recipe, write_target_folder

    for argument in arguments:
        name, _, value = argument.partition("=")
        path = value if name == "conf" else name
        if path.endswith(".yaml") and not Path(path).exists():
            write_recipe(Path(path))
        if name == "eval.suites":
            for file in re.findall(r"path: ([\w.]+\.jsonl)", value):
                Path(file).write_text('{"prompt": "x"}\n')
        if name in ("distill.drafter", "drafter.start_from"):
            write_drafter_config(Path(value))
        if name == "target" and (REPOSITORY / "conf" / "target" / f"{value}.yaml").exists():
            write_target_folder(REPOSITORY / "conf" / "target" / f"{value}.yaml")
