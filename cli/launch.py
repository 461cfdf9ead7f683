"""`--launch NAME`: the same command in several processes, started by accelerate.

As a program this module is accelerate's launcher without tracebacks of its own, since the launched
processes print their errors: python -m outrider.cli.launch OPTIONS -m MODULE ARGUMENTS
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any

import yaml

from ..data.paths import expand_home
from .describe import choices
from .errors import COMMAND_VARIABLE, INTERRUPTED, command_line, silence_bars

if TYPE_CHECKING:
    from ..models.llm.config import TargetConfig
    from .command_line import CommandLine

KILLED = 128
"""Exit status after a signal, as in shells: this plus the signal's number."""


def launch_stages(command: str, line: "CommandLine", target: "TargetConfig") -> None:
    """Start this command again in a process for each stage of the target, if there is a launch file.

    To be called after everything else that needs no weights is checked. Raises ValueError for
    several processes without stages, and for a target that they couldn't load.
    """
    file, options = line.launch, line.launch_options
    count = int(os.environ.get("WORLD_SIZE", "1")) if file is None else num_processes(file, options)
    if target.stage_layers is None and count > 1:
        # Each process would do all the work, in the same folder.
        raise ValueError(
            f"{count} processes are launched, and target.stage_layers is not set, which divides the target among them; give "
            "the layers of each stage (target.stage_layers=[4,4]), or leave --launch out"
        )
    if file is not None:
        require_stages(file, options, target)
        launch(file, options, ["outrider.cli", command, *line.own])


def require_stages(file: str, options: Sequence[str], target: "TargetConfig") -> None:
    """Raise ValueError if the processes of a launch couldn't load this target in its stages."""
    if target.stage_layers is not None:
        from ..models.llm.loading import require_divisible

        silence_bars()
        require_divisible(target, num_processes(file, options))


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
    return [sys.executable, "-m", "outrider.cli.launch", "--config_file", str(_path(file)), *options, "-m", *program]


def _path(file: str) -> Path:
    """Return the path of a launch file. Raises ValueError if there is none."""
    packaged = choices("launch")
    path = packaged[file].path if file in packaged else Path(expand_home(file))
    if not path.is_file():
        close = get_close_matches(file, list(packaged), 1)
        raise ValueError(
            f"--launch is {file}, and there is no such file; {f'did you mean {close[0]}? ' if close else ''}"
            f"Name a file of accelerate's options, or one that ships with outrider: {', '.join(packaged)}"
        )
    return path


def _settings(file: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a launch file, as options of accelerate change them."""
    try:
        content: Any = yaml.safe_load(_path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--launch is {file}, which is not YAML ({str(error).splitlines()[0]}); correct the file") from error
    settings = dict(content) if isinstance(content, dict) else {}
    for option, following in zip(options, [*options, ""][1:], strict=True):
        name, separator, value = option.removeprefix("--").partition("=")
        settings[name.replace("-", "_")] = value if separator else following
    return settings


def num_processes(file: str, options: Sequence[str]) -> int:
    """Return the number of processes of a launch, on all machines together."""
    number = _settings(file, options).get("num_processes", 1)
    try:
        return int(number)
    except (ValueError, TypeError):  # an empty value is null
        raise ValueError(f"--num_processes is {number}; it must be a whole number") from None


def require_gpus(file: str, options: Sequence[str]) -> None:
    """Raise ValueError if this machine has fewer GPUs than processes.

    Without a GPU and without mixed precision, the processes run on the CPU.
    """
    # 1. Read the number of processes on this machine.
    settings = _settings(file, options)
    try:
        needed = int(settings.get("num_processes", 1)) // int(settings.get("num_machines", 1))
    except (ValueError, TypeError):  # accelerate reports it
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


def main() -> None:
    """Launch processes, and end with the exit status of the first one that failed.

    A process that was ended by a signal can't print why, so this prints it. With OUTRIDER_DEBUG=1
    the launcher's own errors and logs are shown.
    """
    from accelerate.commands.launch import launch_command as accelerate_launch
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-launch-") as folder:
        arguments.log_dir = arguments.log_dir or folder  # torch's launcher leaves its own folder behind
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            accelerate_launch(arguments)
            return
        logging.disable(logging.ERROR)  # torch's launcher logs each signal that it sends
        _launch_quietly(accelerate_launch, arguments)


def _launch_quietly(accelerate_launch: Callable[[Any], None], arguments: Any) -> None:
    """Launch, and turn the launcher's errors into an exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        accelerate_launch(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise SystemExit(_status(failure.exitcode, f"process {rank} of the launch")) from None
    except CalledProcessError as error:
        raise SystemExit(_status(error.returncode, "the launched process")) from None
    except SignalException as error:
        raise SystemExit(KILLED + error.sigval) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _status(exitcode: int, process: str) -> int:
    """Return the exit status to end with. A negative exit code is that of a signal."""
    if exitcode >= 0:
        return exitcode
    name = signal.Signals(-exitcode).name
    reason = "; the system does this where memory runs out" if name == "SIGKILL" else ""
    sys.stderr.write(f"outrider: error: {process} was ended by {name}{reason}\n")
    return KILLED - exitcode


if __name__ == "__main__":
    main()
