"""`outrider run --launch NAME`: the same run on several processes, started by accelerate."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .describe import choices
from .keys import closest


def launch(file: str, options: Sequence[str], overrides: Sequence[str]) -> None:
    """Replace this process by `accelerate launch` with a launch file.

    `file` is the name of a packaged file, or a path. Raises ValueError if there is no such file.
    """
    command = launch_command(file, options, overrides)
    sys.stdout.flush()
    os.execv(command[0], command)


def launch_command(file: str, options: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the command of accelerate's launcher for the module outrider.train."""
    packaged = choices("launch")
    path = packaged[file].path if file in packaged else Path(file).expanduser()
    if not path.is_file():
        meant = closest(file, list(packaged))
        raise ValueError(
            f"--launch is {file}, and there is no such file; {f'did you mean {meant}? ' if meant else ''}"
            f"Name a file of accelerate's options, or one that ships with outrider: {', '.join(packaged)}"
        )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    return [*launcher, *options, "-m", "outrider.train", *overrides]
