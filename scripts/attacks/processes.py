"""Runs attacks in forked processes, each with limits on time and memory, and judges how they end."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .cases import CRASH, ERROR, HANG, TRACEBACK, UNCLEAR, Case, Finding

POLL_SECONDS = 0.01
MEMORY_BYTES, FILE_BYTES = 4 << 30, 1 << 30
"""Most private memory of a process, and most bytes of a file that it writes."""
LOG_CHARS = 1 << 20
TRACE = "Traceback (most recent call last)"
MESSAGE = re.compile(r"^(?:outrider: error: |Usage: )", re.MULTILINE)
"""Start of a message to the user: ours, or that of a mistyped command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Verdict on a case, as its line in the results."""

    kind: str
    name: str
    verdict: str
    note: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A case that runs in a process of its own."""

    case: Case
    pid: int
    folder: Path
    started: float


def run_cases(cases: Sequence[Case], folder: Path, *, limit_seconds: float, num_processes: int) -> Iterator[Outcome]:
    """Run the cases, `num_processes` at a time, and yield their outcomes as they end.

    On a busy machine the limit grows with the load. The folder of a case is removed afterwards.
    """
    waiting, running = list(reversed(cases)), list[Child]()
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                running.append(_start(waiting.pop(), folder))
            time.sleep(POLL_SECONDS)
            patience = limit_seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            for child in list(running):
                outcome = _judge(child, patience)
                if outcome is not None:
                    running.remove(child)
                    shutil.rmtree(child.folder, ignore_errors=True)
                    yield outcome
    finally:
        for child in running:
            _kill(child)


def _start(case: Case, folder: Path) -> Child:
    """Fork a process that runs the case in a fresh folder, with its output in a file."""
    place = folder / re.sub(r"[^\w.=-]", "_", f"{case.kind}-{case.name}")[:100]
    shutil.rmtree(place, ignore_errors=True)
    (place / "files").mkdir(parents=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _attack(case, place)
    return Child(case=case, pid=pid, folder=place, started=time.monotonic())


def _attack(case: Case, place: Path) -> None:
    """Run the case, write its finding, and end this process."""
    from outrider.cli.errors import user_errors

    status = 1
    try:
        # 1. A group that can be killed whole, limits, and all output into a file.
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.chdir(place / "files")
        # 2. The attack. `user_errors` prints what a command would print.
        with user_errors():
            finding = case.attack(place / "files")
        (place / "finding.json").write_text(json.dumps(asdict(finding)))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is, a user would see its traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _judge(child: Child, patience: float) -> Outcome | None:
    """Return the verdict on a process that ended or ran too long; None while it runs."""
    seconds = time.monotonic() - child.started
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid == 0 and seconds <= patience:
        return None
    if pid == 0:
        _kill(child)
        finding = Finding(HANG, f"killed after {seconds:.0f} s: {_last_line(_log(child))}")
    else:
        _kill_group(child)  # what the command left behind
        finding = _verdict(os.waitstatus_to_exitcode(status), _log(child), child.folder / "finding.json")
    return Outcome(
        kind=child.case.kind, name=child.case.name, verdict=finding.verdict, note=finding.note, seconds=round(seconds, 2)
    )


def _verdict(status: int, log: str, finding: Path) -> Finding:
    """Judge an ended process by its status, what it printed, and the finding that it wrote."""
    if TRACE in log:
        return Finding(TRACEBACK, _last_line(log))
    if status < 0:
        return Finding(CRASH, f"{signal.Signals(-status).name}: {_last_line(log)}")
    if status == 0:
        return Finding(**json.loads(finding.read_text()))
    messages = MESSAGE.findall(log)
    if len(messages) != 1:
        return Finding(UNCLEAR, f"status {status}, {len(messages)} messages: {_last_line(log)}")
    return Finding(ERROR, log[MESSAGE.search(log).end() :].split("\n")[0][:300])  # type: ignore[union-attr]


def _log(child: Child) -> str:
    path = child.folder / "log"
    return path.read_text(errors="replace")[-LOG_CHARS:] if path.exists() else ""


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was printed"


def _kill(child: Child) -> None:
    _kill_group(child)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def _kill_group(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
