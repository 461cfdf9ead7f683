"""The command `outrider`."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import get_type_hints

from .commands import COMMANDS, function_of
from .errors import user_errors

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
    from .build import build_options
    from .config import RECIPE_COMMANDS

    command = function_of(name)
    if name in RECIPE_COMMANDS:  # a recipe adds to its options
        command(rest)
        return
    hints = get_type_hints(command)
    options, line = build_options(hints["options"], rest)
    command(options, **({"line": line} if "line" in hints else {}))


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

    near = get_close_matches(name, COMMANDS, 1)
    near = near or [command for command in COMMANDS if command.startswith(f"{name.split(' ')[0]} ")]
    hint = f"; did you mean {' or '.join(near)}? The" if near else "; the"
    return f"there is no command {name}{hint} commands are: {', '.join(COMMANDS)}"
