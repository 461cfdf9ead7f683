"""accelerate's launcher without tracebacks of its own: the launched processes print their errors.

python -m outrider.cli.launcher OPTIONS -m MODULE ARGUMENTS
"""

import logging
import os
import signal
import sys
from subprocess import CalledProcessError

from .errors import INTERRUPTED

KILLED = 128
"""Exit status after a signal, as in shells: this plus the signal's number."""


def main() -> None:
    """Launch processes, and end with the exit status of the first one that failed.

    A process that was ended by a signal can't print why, so this prints it. With OUTRIDER_DEBUG=1
    the launcher's own errors and logs are shown.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if os.environ.get("OUTRIDER_DEBUG") == "1":
        launch_command(launch_command_parser().parse_args())
        return
    logging.disable(logging.ERROR)  # torch's launcher logs each signal that it sends
    try:
        launch_command(launch_command_parser().parse_args())
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
