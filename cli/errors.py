"""What a command prints besides its results: a user's mistake as one message, and no noise of other libraries."""

import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER_ERROR = 2
"""Exit status after a user's mistake."""
COMMAND_VARIABLE = "OUTRIDER_COMMAND"
"""Environment variable with the command that the user ran, such as `make demo`."""
SAME_ERROR_SECONDS = 5.0
"""Time in which a launch's first process prints an error that all its processes have."""
MAX_MESSAGE_CHARS = 20_000
"""Longest message that is printed in full."""
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
def user_errors() -> Iterator[None]:
    """Print a ValueError or OSError as one message and exit with USER_ERROR.

    With OUTRIDER_DEBUG=1 the error is raised with its traceback. Ctrl-C exits with INTERRUPTED, and
    the message names the finished work and the command that resumes. Other libraries' warnings are
    silenced. Of the processes of a launch the first one prints: see SAME_ERROR_SECONDS.
    """
    silence_libraries()
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # The other processes would print the same message.
        if os.environ.get("RANK", "0") == "0":
            kept = f"{interrupt.args[0]} " if interrupt.args else "Finished files are kept. "
            purpose = "start again" if isinstance(interrupt, StartsAgain) else "resume"
            sys.stderr.write(f"\noutrider: stopped by Ctrl-C. {kept}To {purpose}, run the same command: {command_line()}\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # such as `outrider options | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # With the same error the first process ends earlier, and the launcher then ends this one.
            time.sleep(SAME_ERROR_SECONDS)
        sys.stderr.write(f"outrider: error: {printable(error_message(error))}\n(OUTRIDER_DEBUG=1 shows where it was raised)\n")
        raise SystemExit(USER_ERROR) from None


def printable(text: str) -> str:
    """Return a message that is safe to print: of bounded length, and without control characters.

    Parts of messages come from strangers' files and servers. Escape sequences would change the
    terminal, and half a surrogate pair can't be printed.
    """
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}... ({len(text) - MAX_MESSAGE_CHARS} more characters)"
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


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


NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "huggingface_hub.utils._http", "DeepSpeed", "torch.distributed.run")
"""Loggers with warnings on the libraries' internals. Their errors are still printed."""


def silence_libraries() -> None:
    """Silence the messages of torchao, pytree, DeepSpeed, transformers and datasets at import.

    Call it before they are imported. Does nothing with OUTRIDER_DEBUG=1. Keeps the user's own
    settings.
    """
    if os.environ.get("OUTRIDER_DEBUG") == "1":
        return
    for variable, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "DS_LOG_LEVEL": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(variable, value)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torchao|deepspeed)\b")


def silence_bars() -> None:
    """Turn off transformers' bar for loading weights. Other bars stay."""
    if os.environ.get("OUTRIDER_DEBUG") == "1":
        return
    from transformers.utils import logging as transformers_logging  # slow, and imported by now

    transformers_logging._tqdm_active = False  # disable_progress_bar() also turns off the Hub's bars
