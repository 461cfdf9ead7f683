"""Print a user's mistake as one message, without a traceback."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .quiet import silence_libraries

USER_ERROR = 2
"""Exit status after a user's mistake."""
COMMAND_OPTIONS = {
    "data.chat_template": "--chat-template",
    "target.name_or_path": "--target",
    "target.revision": "--revision",
    "target.dtype": "--dtype",
    "target.cuda_graphs": "--cuda-graphs",
    "target.memory_budget_gib": "--memory-budget-gib",
    "target.budget_tokens": "--budget-tokens",
    "target.stage_layers": "--stage-layers",
}
"""Options of a configuration, and their names in the commands other than `outrider run`."""
COMMAND_VARIABLE = "OUTRIDER_COMMAND"
"""Environment variable with the command that the user ran, such as `make demo`."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""


class StartsAgain(KeyboardInterrupt):
    """Ctrl-C in a command that keeps nothing, so that the same command starts again."""


@contextmanager
def starts_again(what: str) -> Iterator[None]:
    """Report after Ctrl-C in the block that nothing of this work is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise StartsAgain(f"Nothing of the {what} is kept, so this command can't resume.") from None


@contextmanager
def user_errors(words: Callable[[str], str] = str) -> Iterator[None]:
    """Print a ValueError or OSError as one message and exit with USER_ERROR.

    With OUTRIDER_DEBUG=1 the error is raised with its traceback. Ctrl-C exits with INTERRUPTED, and
    the message names the finished work and the command that resumes. Other libraries' warnings are
    silenced.
    """
    silence_libraries()
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # Only the first process prints: the others would print the same message.
        if os.environ.get("RANK", "0") == "0":
            kept = f"{interrupt.args[0]} " if interrupt.args else "Finished files are kept. "
            purpose = "start again" if isinstance(interrupt, StartsAgain) else "resume"
            sys.stderr.write(f"\noutrider: stopped by Ctrl-C. {kept}To {purpose}, run the same command: {command_line()}\n")
        raise SystemExit(INTERRUPTED) from None
    except (ValueError, OSError) as error:
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        sys.stderr.write(f"outrider: error: {words(error_message(error))}\n(OUTRIDER_DEBUG=1 shows where it was raised)\n")
        raise SystemExit(USER_ERROR) from None


def in_command_words(text: str) -> str:
    """Replace a configuration's options in a message by command options (`--chat-template`)."""
    for option, name in COMMAND_OPTIONS.items():
        text = text.replace(f"{option}=", f"{name} ").replace(option, name)
    return re.sub(r"eval\.suites=\[.*\]", _suite_paths, text)


def _suite_paths(suites: re.Match[str]) -> str:
    """Return the command options for the suites that need a file, `{name: NAME, path: FILE}`.

    `outrider eval` takes several suites, and each file with its suite's name; other commands take
    one suite and its file.
    """
    options = [f"--suite-path {name}=FILE" for name in re.findall(r"name: ([^,}]+), path: FILE\b", suites[0])]
    return f"--suite-path FILE (`outrider eval`: {options[0]})" if len(options) == 1 else " ".join(options)


def command_line() -> str:
    """Return the command that the user ran, so that it can be run again.

    A command that starts this one passes its own name in COMMAND_VARIABLE. Under another
    `accelerate launch` only the launched script and its arguments are known.
    """
    if command := os.environ.get(COMMAND_VARIABLE):
        return command
    script = sys.argv[0] if sys.argv[0].endswith(".py") else Path(sys.argv[0]).name  # `outrider run` stays two words
    prefix = "python " if script.endswith(".py") else ""
    if "LOCAL_RANK" in os.environ:
        prefix = "accelerate launch ... "
    return f"{prefix}{script} {shlex.join(sys.argv[1:])}".strip()


def error_message(error: Exception) -> str:
    """Return the error's text. For a wrong configuration, return our own messages."""
    from pydantic import ValidationError

    from ..data.fields import problems_of

    return "; ".join(problems_of(error)) if isinstance(error, ValidationError) else str(error)
