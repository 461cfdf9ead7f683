"""Runs a command with a cap on its memory and slow reads, by cgroups (v1 or v2), else by RLIMIT_DATA.

    python scripts/limits.py --memory 700M --reads 200M --disk-of models -- python my_script.py
    python scripts/limits.py --reads 200M --check FILE

The first command runs another one, and prints its peak of memory. The second one reads a file of
some hundred MB without the page cache, and prints the rate. Writing cgroups needs root, or a
delegated subtree. Without it a cap is RLIMIT_DATA (see `Limits`), and reads can't be slowed.

The groups are children of the caller's group. A small process outside them removes them, and kills
what still runs in them, when the caller ends: also if the caller is killed.
"""

import argparse
import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP_V1, CGROUP_V2, RLIMIT, NOTHING = "cgroup v1", "cgroup v2", "RLIMIT_DATA", "no limit"
POLL_SECONDS = 0.05
"""Seconds between two looks at the anonymous memory of a group."""
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
NUMBERS = itertools.count()
GUARD = """
read -r _
for group in "$@"; do
    for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        [ -d "$group" ] || break
        for process in $(cat "$group/cgroup.procs" 2>/dev/null); do kill -9 "$process" 2>/dev/null; done
        rmdir "$group" 2>/dev/null && break
        sleep 0.1
    done
done
"""
"""Shell script that waits for the end of its input, and then removes the groups."""
JOIN = """
count=$1; shift
while [ "$count" -gt 0 ]; do echo $$ > "$1/cgroup.procs" || exit 125; shift; count=$((count - 1)); done
exec "$@"
"""
"""Shell script that joins groups, and becomes a command: their number, their folders, the command."""
READ = """
import os, sys, time
path, most = sys.argv[1], int(sys.argv[2])
def num_read(): return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])
file = os.open(path, os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
before, start, left = num_read(), time.perf_counter(), most
while left > 0 and (chunk := os.read(file, min(left, 1 << 20))):
    left -= len(chunk)
seconds = time.perf_counter() - start
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
print(num_read() - before, seconds)
"""
"""Script that reads a file's start from its disk, and prints bytes and seconds."""


class UnavailableError(ValueError):
    """Error of a limit that this machine or user can't set. The message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one process and its children. None: no limit.

    `memory_bytes` counts all memory with the page cache, which the kernel frees first. As
    RLIMIT_DATA it counts the private writable mappings of each process, used or not.
    """

    memory_bytes: int | None = None
    reads_per_second: int | None = None
    """Bytes per second from the disk of `disk_of`. What the page cache holds isn't slowed."""
    disk_of: Path = Path()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a command under limits."""

    returncode: int
    seconds: float
    means: str
    """What set the limits: CGROUP_V1, CGROUP_V2, RLIMIT or NOTHING."""
    peak_bytes: int | None
    """Peak of the group, with the page cache. None without a memory group."""
    anonymous_bytes: int | None
    """Peak of anonymous memory at the times when it was read. None without a memory group."""
    out_of_memory: bool
    """Whether the kernel killed a process of the group because of the cap."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Names of a version's files, and how their lines are written."""

    name: str
    memory: tuple[str, ...]
    """Files that get the cap. Those after the first exist only where swap is counted."""
    peak: str
    anonymous: str
    """Line of memory.stat."""
    events: str
    reads: str
    reads_line: str


V1 = Files(
    name=CGROUP_V1,
    memory=("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    peak="memory.max_usage_in_bytes",
    anonymous="rss",
    events="memory.oom_control",
    reads="blkio.throttle.read_bps_device",
    reads_line="{device} {rate}",
)
V2 = Files(
    name=CGROUP_V2,
    memory=("memory.max",),
    peak="memory.peak",
    anonymous="anon",
    events="memory.events",
    reads="io.max",
    reads_line="{device} rbps={rate}",
)


@dataclass(frozen=True, kw_only=True)
class Limiter:
    """Limits that are set, for the commands that `wrap` puts under them."""

    means: str
    """What sets the limits: CGROUP_V1, CGROUP_V2, RLIMIT, or NOTHING."""
    files: Files = V1
    memory: Path | None = None
    """Group with the cap on memory."""
    reads: Path | None = None
    """Group with the limit of reads."""
    rlimit_bytes: int | None = None

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs under the limits: a shell that sets them, and becomes the command."""
        if self.rlimit_bytes is not None:
            return ["sh", "-c", f'ulimit -d {self.rlimit_bytes >> 10} || exit 125; exec "$@"', "sh", *command]
        folders = list(dict.fromkeys(str(folder) for folder in (self.memory, self.reads) if folder is not None))
        return ["sh", "-c", JOIN, "sh", str(len(folders)), *folders, *command] if folders else list(command)

    def anonymous_bytes(self) -> int | None:
        """Return the anonymous memory at this moment; None without a memory group."""
        return None if self.memory is None else number_in(self.memory / "memory.stat", self.files.anonymous)

    def peak_bytes(self) -> int | None:
        """Return the peak with the page cache; None without a memory group, or in v2 before kernel 5.19."""
        path = None if self.memory is None else self.memory / self.files.peak
        return int(path.read_text()) if path is not None and path.exists() else None

    def out_of_memory(self) -> bool:
        """Check whether the kernel killed a process of the group because of the cap."""
        return self.memory is not None and number_in(self.memory / self.files.events, "oom_kill") > 0


def run_limited(command: Sequence[str], limits: Limits, *, output: int | None = None) -> Outcome:
    """Run a command under limits, and return its outcome. Raises UnavailableError if one can't be set.

    `output` is a file descriptor for its stdout and stderr.
    """
    with limited(limits) as limiter:
        start, anonymous = time.perf_counter(), limiter.anonymous_bytes()
        with subprocess.Popen(limiter.wrap(command), stdout=output, stderr=output) as process:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                if anonymous is not None:
                    anonymous = max(anonymous, limiter.anonymous_bytes() or 0)
        return Outcome(
            returncode=process.returncode,
            seconds=time.perf_counter() - start,
            means=limiter.means,
            peak_bytes=limiter.peak_bytes(),
            anonymous_bytes=anonymous,
            out_of_memory=limiter.out_of_memory(),
        )


@contextlib.contextmanager
def limited(limits: Limits) -> Iterator[Limiter]:
    """Set limits by groups, which are removed afterwards, with all processes in them.

    Where no group can be made, a cap on memory alone becomes RLIMIT_DATA. Raises UnavailableError
    if a limit can't be set.
    """
    if limits.memory_bytes is None and limits.reads_per_second is None:
        yield Limiter(means=NOTHING)
        return
    with contextlib.ExitStack() as stack:
        try:
            limiter = make_groups(limits, stack)
        except UnavailableError:
            if limits.memory_bytes is None or limits.reads_per_second is not None:
                raise
            limiter = Limiter(means=RLIMIT, rlimit_bytes=limits.memory_bytes)
        yield limiter


def make_groups(limits: Limits, stack: contextlib.ExitStack) -> Limiter:
    """Make groups with these limits, which the stack removes. Raises UnavailableError if that fails."""
    name = f"outrider-{os.getpid()}-{next(NUMBERS)}"
    files, memory_parents, reads_parents = parents()
    device = None if limits.reads_per_second is None else disk_number(limits.disk_of)
    memory = None if limits.memory_bytes is None else make_group(memory_parents, name, files.memory[0], stack)
    reads = None if device is None else make_group(reads_parents, name, files.reads, stack, memory)
    try:
        for path in [] if memory is None else [memory / file for file in files.memory if (memory / file).exists()]:
            path.write_text(str(limits.memory_bytes))
        if reads is not None:
            (reads / files.reads).write_text(files.reads_line.format(device=device, rate=limits.reads_per_second))
    except OSError as error:
        raise UnavailableError(f"a limit can't be set ({error}); choose another value, or run as root") from error
    return Limiter(means=files.name, files=files, memory=memory, reads=reads)


def make_group(
    candidates: Sequence[Path], name: str, file: str, stack: contextlib.ExitStack, existing: Path | None = None
) -> Path:
    """Make a group below the first candidate that allows it, or use an existing one with this file."""
    if existing is not None and (existing / file).exists():
        return existing
    reason = "no file system of cgroups is mounted"
    for parent in candidates:
        folder = parent / name
        try:
            for controller in ("memory", "io"):  # v2 only: v1 has no such file, and must not get one
                with contextlib.suppress(OSError):
                    if (parent / "cgroup.subtree_control").exists():
                        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
            folder.mkdir(exist_ok=True)
        except OSError as error:
            reason = str(error)
            continue
        stack.enter_context(guarded(folder))
        if os.access(folder / file, os.W_OK):
            return folder
        reason = f"{folder} gets no {file}"
    raise UnavailableError(f"no cgroup can be made here ({reason}); run as root, or in a delegated subtree")


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Remove a group at the end, also if this process is killed: a guard waits for the end of a pipe."""
    guard = subprocess.Popen(["sh", "-c", GUARD, "sh", str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def parents(mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")) -> tuple[Files, list[Path], list[Path]]:
    """Return the version, and the folders in which groups for memory and for reads may be made."""
    # 1. Where each controller is mounted, and the group of this process in it.
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    groups = dict(line.split(":", 2)[1:] for line in own.read_text().splitlines()) if own.exists() else {}
    v1 = {name: Path(folder) for _, folder, kind, options, *_ in lines if kind == "cgroup" for name in options.split(",")}
    # 2. A controller of v1 isn't one of v2, so the memory's decides.
    if "memory" in v1:
        by_name = {name: group for names, group in groups.items() for name in names.split(",")}
        folders = [ancestors(v1[name], by_name.get(name, "/")) if name in v1 else [] for name in ("memory", "blkio")]
        return V1, *folders
    for _, folder, kind, *_ in lines:
        if kind == "cgroup2":
            # A group with processes can't have children with limits, so its ancestors are tried too.
            both = ancestors(Path(folder), groups.get("", "/"))
            return V2, both, both
    return V2, [], []


def ancestors(root: Path, group: str) -> list[Path]:
    """Return the folder of a group, then those above it up to the root, if they exist."""
    folder = root / group.lstrip("/")
    return [path for path in (folder, *folder.parents) if path.is_relative_to(root) and path.is_dir()]


def disk_number(path: Path) -> str:
    """Return MAJOR:MINOR of the disk of a file. Raises UnavailableError if the file lies on no disk."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise UnavailableError(f"{path} lies on no disk that can be slowed (device {os.major(number)}:{os.minor(number)})")
    if (device / "partition").exists():
        return (device.resolve().parent / "dev").read_text().strip()
    return f"{os.major(number)}:{os.minor(number)}"


def number_in(path: Path, key: str) -> int:
    """Return the number of a line `key number` of a file; 0 if there is none."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def measured_reads(path: Path, limits: Limits, most_bytes: int = 256 << 20) -> float:
    """Measure the bytes per second at which a file's start is read from its disk, under limits.

    Raises UnavailableError if the bytes don't come from the disk of this machine.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", READ, str(path), str(most_bytes)]
    with open(read_end) as file:
        try:
            code = run_limited(command, limits, output=write_end).returncode
        finally:
            os.close(write_end)
        words = file.read()
    if code:
        raise UnavailableError(f"{path} can't be read under these limits: {words.strip() or f'exit status {code}'}")
    num_bytes, seconds = float(words.split()[0]), float(words.split()[1])
    expected = min(most_bytes, path.stat().st_size)
    if num_bytes < 0.9 * expected:
        raise UnavailableError(
            f"only {num_bytes:,.0f} of {expected:,} bytes of {path} came from its disk; give a file on a local disk, "
            "which no other program reads"
        )
    return num_bytes / seconds


def unavailable(limits: Limits) -> str | None:
    """Return why groups can't set such limits on this machine; None if they can."""
    try:
        with contextlib.ExitStack() as stack:
            make_groups(limits, stack)
    except UnavailableError as error:
        return str(error)
    return None


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as 700M. Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no number of bytes; give one above 0, such as 700M or 1.5G")
    return round(float(match[1]) * UNITS.get(match[2], 1))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", help="cap, such as 700M or 1.5G")
    parser.add_argument("--reads", help="bytes per second, such as 200M")
    parser.add_argument("--disk-of", type=Path, default=Path(), help="a file or folder on the disk to slow")
    parser.add_argument("--check", type=Path, metavar="FILE", help="read this file, and print the rate")
    parser.add_argument("command", nargs="*", help="command to run, after --")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    try:
        limits = Limits(
            memory_bytes=parse_bytes(args.memory) if args.memory else None,
            reads_per_second=parse_bytes(args.reads) if args.reads else None,
            disk_of=args.check or args.disk_of,
        )
        if args.check:
            print(f"{measured_reads(args.check, limits) / 1e6:.0f} MB/s")
            return
        if not args.command:
            raise ValueError("there is no command; give it after --")
        outcome = run_limited(args.command, limits)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    peaks = [("peak", outcome.peak_bytes), ("anonymous", outcome.anonymous_bytes)]
    words = [f"{name} {value / 1e6:.0f} MB" for name, value in peaks if value is not None]
    words += ["killed for memory"] * outcome.out_of_memory
    print(", ".join([f"{outcome.means}: {outcome.seconds:.1f} s", *words]), file=sys.stderr)
    raise SystemExit(outcome.returncode if outcome.returncode >= 0 else 128 - outcome.returncode)


if __name__ == "__main__":
    main()
