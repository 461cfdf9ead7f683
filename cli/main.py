"""The command `outrider`."""

import sys
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from .errors import user_errors


class Command(NamedTuple):
    """A command as `outrider --help` lists it."""

    panel: str
    summary: str
    function: str
    """Module and function. The function's parameter `options` is the command's configuration."""


START, TRAIN, EVALUATE, EXPORT = "Start", "Distil and train (a recipe runs all four stages)", "Evaluate", "Export"
COMMANDS = {
    "init": Command(START, "Write a commented recipe for your target and data.", "init:init_command"),
    "recipes": Command(START, "List the recipes that ship with outrider.", "reference:recipes_command"),
    "options": Command(START, "List the options of recipes.", "reference:options_command"),
    "run": Command(TRAIN, "Run a recipe (outrider run demo train.steps=20) or your own file.", "compose:run_command"),
    "data verify": Command(TRAIN, "Read a folder of distilled data, and print each problem.", "data:verify_command"),
    "eval": Command(EVALUATE, "Measure the speedup of drafters against plain decoding.", "eval:eval_command"),
    "certify": Command(EVALUATE, "Certify that decoding is lossless.", "certify:certify_command"),
    "tune": Command(EVALUATE, "Find a drafter's fastest settings on this machine.", "tune:tune_command"),
    "report": Command(EVALUATE, "Write tables and figures of evaluations.", "report:report_command"),
    "export": Command(EXPORT, "Write a drafter in a serving engine's format.", "export:export_command"),
    "import": Command(EXPORT, "Convert a published drafter.", "export:import_command"),
    "package": Command(EXPORT, "Write a drafter's folder for the Hub.", "hub:package_command"),
    "push": Command(EXPORT, "Upload a drafter to the Hub.", "hub:push_command"),
    "pull": Command(EXPORT, "Download a drafter from the Hub.", "hub:pull_command"),
}
INTRODUCTION = """\
Usage: outrider COMMAND [ARGUMENTS]

Train drafters for speculative decoding, and measure them. To start:
  outrider run demo
  outrider init my.yaml --target DIR_OR_ID --data FILE
"""


def main() -> None:
    """Run a command. A user's mistake is printed as one message."""
    with user_errors():
        run_command(sys.argv[1:])


def run_command(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name, or print help. Raises ValueError for an unknown command."""
    # 1. Options before the command.
    if not arguments or arguments[0] in ("--help", "-h"):
        print(overview(), end="")
        return
    if arguments[0] == "--version":
        print(f"outrider {version('outrider')}")
        return

    # 2. Its name has one or two words.
    name = next((name for words in (2, 1) if (name := " ".join(arguments[:words])) in COMMANDS), None)
    if name is None:
        raise ValueError(unknown_command(" ".join(arguments[:2]) if arguments[0] == "data" else arguments[0]))
    rest = arguments[len(name.split()) :]
    if {"--help", "-h"} & set(rest):
        from .help import command_help

        print(command_help(name, show_all="--all" in rest), end="")
        return

    # 3. Read its options, and run it.
    command = function_of(name)
    if name == "run":  # a recipe adds to its options
        command(rest)
        return
    from .build import build_options

    hints = typing.get_type_hints(command)
    options, line = build_options(hints["options"], rest)
    command(options, **({"line": line} if "line" in hints else {}))


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a command. Its module is imported only now."""
    module, _, function = COMMANDS[name].function.partition(":")
    return typing.cast(Callable[..., Any], getattr(import_module(f".{module}", __package__), function))


def overview() -> str:
    """Return the help of `outrider`."""
    lines = [INTRODUCTION]
    for panel in dict.fromkeys(command.panel for command in COMMANDS.values()):
        lines.append(f"{panel}:")
        lines += [f"  {name:12} {command.summary}" for name, command in COMMANDS.items() if command.panel == panel]
        lines.append("")
    lines += ["outrider COMMAND --help prints a command's options; --version prints the version."]
    return "\n".join(lines) + "\n"


def unknown_command(name: str) -> str:
    """Return the message for an unknown command."""
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, 1)
    return f"there is no command {name}; {f'did you mean {close[0]}? ' if close else ''}The commands are: {', '.join(COMMANDS)}"
