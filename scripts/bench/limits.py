"""Limits of a process: a cap on its memory, and on the bytes that it reads from a disk per second.

Cgroups (v1 or v2) set both, for root or in a delegated subtree. Elsewhere RLIMIT_DATA caps the
private writable mappings of the process, used or not, and reads can't be slowed.
"""

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NUMBERS = itertools.count()
MEMORY = {"memory.limit_in_bytes": "memory.memsw.limit_in_bytes", "memory.max": "memory.swap.max"}
"""File of the cap by version, and the one that keeps the group from swapping."""
READS = {"blkio.throttle.read_bps_device": "{disk} {rate}", "io.max": "{disk} rbps={rate}"}
"""File of the limit of reads by version, and its line."""


@dataclass(kw_only=True)
class Limits:
    """Limits that are prepared for one process, which `join` puts under them."""

    groups: list[Path] = field(default_factory=list)
    memory: Path | None = None
    """File of the cap; None where it is RLIMIT_DATA."""
    process: int = 0

    @property
    def means(self) -> str:
        return "RLIMIT_DATA" if self.memory is None else f"cgroup ({self.memory.name})"

    def join(self, process: int) -> None:
        """Put a process that has just started under the limits. Its memory from now on counts."""
        self.process = process
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(process))

    def cap(self, num_bytes: int) -> None:
        """Cap the memory of the process."""
        if self.memory is None:
            resource.prlimit(self.process, resource.RLIMIT_DATA, (num_bytes, num_bytes))
            return
        self.memory.write_text(str(num_bytes))
        swap = self.memory.with_name(MEMORY[self.memory.name])
        if swap.exists():  # v1 counts memory and swap together
            swap.write_text("0" if swap.name == "memory.swap.max" else str(num_bytes))


@contextlib.contextmanager
def prepared(reads_per_second: int | None = None, disk_of: Path = Path()) -> Iterator[Limits]:
    """Yield limits for one process. Its groups are removed afterwards, when the process has ended.

    Raises ValueError if the disk of the file `disk_of` can't be slowed.
    """
    limits = Limits()
    try:
        limits.memory = make_group("memory", MEMORY, limits.groups)
        if reads_per_second is not None:
            file = make_group("blkio", READS, limits.groups) or make_group("io", READS, limits.groups)
            if file is None:
                raise ValueError("reads can't be slowed on this machine: no cgroup can be made; leave the rate out")
            file.write_text(READS[file.name].format(disk=disk_number(disk_of), rate=reads_per_second))
        yield limits
    finally:
        for group in limits.groups:
            group.rmdir()


def make_group(controller: str, files: dict[str, str], groups: list[Path]) -> Path | None:
    """Make a group below the nearest one that allows it, and return its file among `files`; None if none does."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    own = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, root, kind, options, *_ in mounts:
        is_v2 = kind == "cgroup2"
        if not is_v2 and (kind != "cgroup" or controller not in options.split(",")):
            continue
        paths = [path for names, path in own if (not names if is_v2 else controller in names.split(","))]
        folder = Path(root) / next(iter(paths), "/").lstrip("/")
        # In v2 a group with processes can't have children with limits, so its ancestors are tried too.
        for parent in [path for path in (folder, *folder.parents) if path.is_relative_to(root)]:
            with contextlib.suppress(OSError):
                if is_v2:
                    (parent / "cgroup.subtree_control").write_text(f"+{controller}")
                group = parent / f"outrider-{os.getpid()}-{next(NUMBERS)}"
                group.mkdir()
                groups.append(group)
                if found := [group / name for name in files if os.access(group / name, os.W_OK)]:
                    return found[0]
    return None


def disk_number(path: Path) -> str:
    """Return MAJOR:MINOR of the disk of a file. Raises ValueError if the file lies on no disk."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise ValueError(f"{path} lies on no disk that can be slowed; leave the rate out")
    if (device / "partition").exists():
        return (device.resolve().parent / "dev").read_text().strip()
    return device.name
