"""Limits of memory and reads: they hold, leave nothing behind, and name what this machine can't set."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MIB = 1 << 20
ALLOCATE = "import sys; text = bytearray(int(sys.argv[1])); print(len(text))"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("limits")


@pytest.fixture
def memory(limits: Any) -> Any:
    """Return a cap of 48 MiB, or skip."""
    cap = limits.Limits(memory_bytes=48 * MIB)
    if reason := limits.unavailable(cap):
        pytest.skip(f"no cap on memory: {reason}")
    return cap


def group_folders(limits: Any, pid: int) -> list[Path]:
    """Return the groups that a process has made, wherever it could make them."""
    _, memory, reads = limits.parents()
    return [folder for parent in {*memory, *reads} for folder in parent.glob(f"outrider-{pid}-*")]


def test_a_process_above_its_cap_is_killed_and_one_below_it_is_measured(limits: Any, memory: Any) -> None:
    small = limits.run_limited([sys.executable, "-c", ALLOCATE, str(MIB)], memory, output=subprocess.DEVNULL)
    assert (small.returncode, small.out_of_memory) == (0, False)
    large = limits.run_limited([sys.executable, "-c", ALLOCATE, str(100 * MIB)], memory, output=subprocess.DEVNULL)
    assert large.returncode == -signal.SIGKILL
    assert large.out_of_memory
    assert small.peak_bytes is None or 0 < small.peak_bytes < large.peak_bytes < 50 * MIB
    assert large.means.startswith("cgroup")
    assert not group_folders(limits, os.getpid())


def test_the_anonymous_peak_is_what_a_process_holds(limits: Any) -> None:
    cap = limits.Limits(memory_bytes=1 << 30)
    if reason := limits.unavailable(cap):
        pytest.skip(f"no cap on memory: {reason}")
    code = "import time; text = b'1' * (64 << 20); time.sleep(0.3)"
    outcome = limits.run_limited([sys.executable, "-c", code], cap)
    assert 64 * MIB < outcome.anonymous_bytes < 96 * MIB


def test_reads_from_the_disk_are_slowed(limits: Any, tmp_path: Path) -> None:
    path, rate = tmp_path / "data", 16 * MIB
    with path.open("wb") as file:
        file.write(os.urandom(24 * MIB))
        os.fsync(file.fileno())
    slow = limits.Limits(reads_per_second=rate, disk_of=path)
    if reason := limits.unavailable(slow):
        pytest.skip(f"no limit of reads: {reason}")
    with skipping_other_disks(limits):
        assert 0.7 * rate < limits.measured_reads(path, slow) < 1.3 * rate


@contextlib.contextmanager
def skipping_other_disks(limits: Any) -> Any:
    """Skip a test whose file doesn't lie on a disk, such as in memory."""
    try:
        yield
    except limits.UnavailableError as error:
        pytest.skip(str(error))


def test_groups_of_a_killed_caller_are_removed_and_its_command_is_killed(limits: Any, memory: Any) -> None:
    command = [sys.executable, str(SCRIPTS / "limits.py"), "--memory", "48M", "--", "sh", "-c", "echo started; sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "started\n"
        (folder, *_) = group_folders(limits, caller.pid)
        members = (folder / "cgroup.procs").read_text().split()
        assert members
        caller.kill()
        wait_until(lambda: not folder.exists())
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists() and "Z" not in state(pid)]


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except OSError:
        return "Z"


def test_without_cgroups_memory_is_capped_by_an_rlimit_and_reads_are_refused(
    limits: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "parents", lambda: (limits.V2, [], []))
    cap = limits.Limits(memory_bytes=200 * MIB)
    command = [sys.executable, "-c", ALLOCATE]
    assert limits.run_limited([*command, str(MIB)], cap, output=subprocess.DEVNULL).returncode == 0
    large = limits.run_limited([*command, str(300 * MIB)], cap, output=subprocess.DEVNULL)
    assert (large.returncode, large.means, large.peak_bytes) == (1, "RLIMIT_DATA", None)
    slow = limits.Limits(memory_bytes=cap.memory_bytes, reads_per_second=MIB, disk_of=tmp_path)
    nothing = limits.run_limited(["true"], limits.Limits())
    assert (nothing.returncode, nothing.means) == (0, "no limit")
    with pytest.raises(limits.UnavailableError, match="cgroup|no disk"):
        limits.run_limited(command, slow)
    assert limits.unavailable(slow)


def test_versions_of_cgroups_are_told_apart_by_their_mounts(limits: Any, tmp_path: Path) -> None:
    mounts, own = tmp_path / "mounts", tmp_path / "cgroup"
    for folder in ("v1/memory/user/me", "v1/blkio", "v2/user/me"):
        (tmp_path / folder).mkdir(parents=True)
    v1 = [f"cgroup {tmp_path}/v1/{name} cgroup rw,{name} 0 0\n" for name in ("memory", "blkio")]
    v2 = f"cgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"
    own.write_text("7:blkio:/\n4:memory:/user/me\n0::/user/me\n")
    mounts.write_text("".join(v1) + v2)  # a hybrid system: the controllers are v1's
    memory = tmp_path / "v1/memory"
    assert limits.parents(mounts, own) == (limits.V1, [memory / "user/me", memory / "user", memory], [tmp_path / "v1/blkio"])
    mounts.write_text(v2)
    folders = [tmp_path / name for name in ("v2/user/me", "v2/user", "v2")]
    assert limits.parents(mounts, own) == (limits.V2, folders, folders)
    assert limits.V2.reads_line.format(device="8:0", rate=7) == "8:0 rbps=7"
    mounts.write_text("")
    assert limits.parents(mounts, own) == (limits.V2, [], [])


def test_the_command_prints_peaks_and_passes_the_exit_status(limits: Any, memory: Any) -> None:
    script = [sys.executable, str(SCRIPTS / "limits.py")]
    done = subprocess.run([*script, "--memory", "48M", "--", "sh", "-c", "exit 3"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("cgroup")
    assert "peak" in done.stderr
    wrong = subprocess.run([*script, "--memory", "much", "--", "true"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "'much'" in wrong.stderr


@pytest.mark.parametrize(("text", "number"), [("700M", 700_000_000), ("1.5g", 1_500_000_000), ("12", 12)])
def test_numbers_of_bytes_are_parsed(limits: Any, text: str, number: int) -> None:
    assert limits.parse_bytes(text) == number
