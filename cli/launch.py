"""`outrider run --launch NAME`: the same command in several processes, started by accelerate."""

import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .arguments import LAUNCHER_OPTIONS
from .describe import choices
from .errors import COMMAND_VARIABLE, command_line
from .keys import closest

LAUNCHED_COMMANDS = ("eval", "certify")
"""Commands that take --launch, for a target in stages. `outrider run` reads its own command line."""


def launch_if_asked(arguments: Sequence[str]) -> None:
    """Replace this process by `accelerate launch` if a command has --launch NAME.

    Options of accelerate may follow anywhere. Returns if there is no --launch.
    """
    if not arguments or arguments[0] not in LAUNCHED_COMMANDS:
        return
    file: str | None = None
    options: list[str] = []
    kept: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        name, separator, value = argument.partition("=")
        has_value = not separator and rest and not rest[0].startswith("-")
        if name == "--launch":
            if not (file := rest.popleft() if has_value else value):
                raise ValueError(f"--launch needs a launch file: one of {', '.join(choices('launch'))}, or a path")
        elif name in LAUNCHER_OPTIONS:
            options += [argument, rest.popleft()] if has_value else [argument]
        else:
            kept.append(argument)
    if file is not None:
        launch(file, options, ["outrider.cli", *kept])


def launch(file: str, options: Sequence[str], program: Sequence[str]) -> None:
    """Replace this process by `accelerate launch` with a launch file.

    `file` is the name of a packaged file, or a path. `program` is a module and its arguments.
    Raises ValueError if there is no such file.
    """
    command = launch_command(file, options, program)
    require_gpus(file, options)
    sys.stdout.flush()
    os.environ.setdefault(COMMAND_VARIABLE, command_line())
    os.execv(command[0], command)


def launch_command(file: str, options: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the command of accelerate's launcher for a module and its arguments."""
    packaged, path = choices("launch"), _path(file)
    if not path.is_file():
        meant = closest(file, list(packaged))
        raise ValueError(
            f"--launch is {file}, and there is no such file; {f'did you mean {meant}? ' if meant else ''}"
            f"Name a file of accelerate's options, or one that ships with outrider: {', '.join(packaged)}"
        )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    return [*launcher, *options, "-m", *program]


def _path(file: str) -> Path:
    packaged = choices("launch")
    return packaged[file].path if file in packaged else Path(file).expanduser()


def require_gpus(file: str, options: Sequence[str]) -> None:
    """Raise ValueError if this machine has fewer GPUs than processes.

    Without a GPU and without mixed precision, the processes run on the CPU.
    """
    # 1. Read the number of processes on this machine.
    content: Any = yaml.safe_load(_path(file).read_text(encoding="utf-8"))
    settings = dict(content) if isinstance(content, dict) else {}
    for option, following in zip(options, [*options, ""][1:], strict=True):
        name, separator, value = option.removeprefix("--").partition("=")
        settings[name.replace("-", "_")] = value if separator else following
    try:
        needed = int(settings.get("num_processes", 1)) // int(settings.get("num_machines", 1))
    except ValueError:  # accelerate reports it
        return
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or settings.get("use_cpu") is True
    if needed <= 1 or on_cpu or "cpu" in settings:
        return

    # 2. Compare it with the number of GPUs.
    from torch import accelerator

    count = accelerator.device_count()
    if count >= needed or (count == 0 and settings.get("mixed_precision", "no") in ("no", False)):
        return
    remedy = f"--num_processes {count}" if count else "--launch cpu"
    raise ValueError(
        f"--launch {file} needs {needed} GPUs, one for each process on a machine, and there {'is' if count == 1 else 'are'} "
        f"{count}; use {remedy}" + (", or put ACCELERATE_USE_CPU=true before `outrider run --launch cpu`" if count else "")
    )
