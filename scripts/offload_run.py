"""Workers of `bench_offload`: processes under limits that take turns, prompt by prompt."""

import contextlib
import ctypes
import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limits import POLL_SECONDS, RLIMIT, Limiter, Limits, limited
from tqdm import tqdm

from outrider.data.files import read_json, write_json

WORKER = Path(__file__).parent / "offload_worker.py"
LINES_OF_ERROR = 12
"""Last lines of a worker's output that an error shows."""


class WorkerError(ValueError):
    """Error of a worker that has ended, with the end of what it printed."""


@dataclass(kw_only=True)
class Worker:
    """A process that decodes with one method."""

    process: "subprocess.Popen[bytes]"
    limiter: Limiter
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)
    anonymous_bytes: int | None = None
    """Peak of its anonymous memory, from looks at short intervals."""

    def ready(self) -> "Worker":
        """Wait until everything is loaded. Raises WorkerError if the process has ended."""
        self.facts = self.next_line()
        return self

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for the answer. Raises WorkerError if the process has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return self.next_line()

    def next_line(self) -> dict[str, Any]:
        """Wait for the next line, and look at the memory meanwhile."""
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], POLL_SECONDS)[0]:
            self.look()
        self.look()
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self.why_ended())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def look(self) -> None:
        """Look at the memory of its group."""
        if (now := self.limiter.anonymous_bytes()) is not None:
            self.anonymous_bytes = max(self.anonymous_bytes or 0, now)

    def why_ended(self) -> str:
        """Describe the end of the process."""
        code = self.process.wait()
        reason = "was killed for memory" if self.limiter.out_of_memory() else f"ended with status {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-LINES_OF_ERROR:]
        return "\n".join([f"a worker {reason}; the end of {self.log}:", *lines])

    def memory(self, cap_bytes: int | None) -> dict[str, Any]:
        """Return its facts, the peaks of its memory, and what limits it."""
        return {
            **self.facts,
            "cap_bytes": cap_bytes,
            "means": self.limiter.means,
            "peak_bytes": self.limiter.peak_bytes(),
            "anonymous_bytes": self.anonymous_bytes,
            "out_of_memory": self.limiter.out_of_memory(),
        }


@contextlib.contextmanager
def started(spec: dict[str, Any], limits: Limits, log: Path) -> Iterator[Worker]:
    """Start a worker under limits, which ends with the block. `ready` waits until it has loaded."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with limited(limits) as limiter, log.open("wb") as file:
        command = limiter.wrap([sys.executable, str(WORKER), json.dumps(spec)])
        variables = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=variables, bufsize=0
        ) as process:
            worker = Worker(process=process, limiter=limiter, log=log)
            try:
                yield worker
            finally:
                assert process.stdin is not None
                process.stdin.close()
                process.kill()


def cap_for(facts: dict[str, Any], budget_bytes: int, allowance_bytes: int, *, by_rlimit: bool) -> int:
    """Return a worker's cap: what it holds before it loads weights, its drafter, the budget, an allowance."""
    baseline = facts["baseline_data_bytes" if by_rlimit else "baseline_bytes"]
    return int(baseline + facts["drafter_bytes"] + budget_bytes + allowance_bytes)


def means_rlimit() -> bool:
    """Return whether a cap on memory alone would be RLIMIT_DATA on this machine."""
    with limited(Limits(memory_bytes=1 << 30)) as limiter:
        return limiter.means == RLIMIT


class Facts:
    """What is known of a cell's workers, in a file that is written after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}

    def add(self, key: str, facts: dict[str, Any]) -> None:
        """Add facts; the peaks of workers of earlier runs count too."""
        earlier, peaks = self.values.get(key, {}), {}
        for name in ("peak_bytes", "anonymous_bytes"):
            peaks[name] = max((value for value in (earlier.get(name), facts[name]) if value is not None), default=None)
        self.values[key] = {**facts, **peaks}
        write_json(self.path, self.values)

    def keep(self, key: str, worker: Worker, limits: Limits) -> bool:
        """Wait until a worker has loaded, and add its facts; where it has ended, add why."""
        try:
            self.add(key, worker.ready().memory(limits.memory_bytes))
        except WorkerError as error:
            self.fail(key, error)
            return False
        return True

    def fail(self, key: str, error: WorkerError) -> None:
        """Add why a worker has ended to its facts, and print it."""
        tqdm.write(f"{key}: {error}")
        self.values.setdefault(key, {})["fault"] = str(error).splitlines()[0].split(";")[0]
        write_json(self.path, self.values)


def drop_cache(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, so that the next method reads them from their disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # pages that aren't on the disk yet can't be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def cached_share(paths: Sequence[Path]) -> float:
    """Return the share of files' pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    num_cached = num_pages = 0
    for path in paths:
        if not (size := path.stat().st_size):
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapping:
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            view = (ctypes.c_char * size).from_buffer(mapping)
            failed = libc.mincore(ctypes.addressof(view), size, pages)
            del view  # a mapping with views can't be closed
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
            num_cached += sum(page & 1 for page in pages)
            num_pages += len(pages)
    return num_cached / num_pages if num_pages else 0.0


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append a record to a file. A last line that a kill has cut is removed first."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file; a last line that a kill has cut is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
