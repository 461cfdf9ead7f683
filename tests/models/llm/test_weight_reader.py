"""Reading of real files in the background: values, casts, faults, and threads that end."""

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.models.llm import weight_reader
from outrider.models.llm.weight_files import PAGE, WINDOW_BYTES, FileWindow, read_header
from outrider.models.llm.weight_reader import DIRECT, Loading, WeightFiles, WeightReader, Weights, aligned_buffer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    # The large one needs several windows; the short name makes the data begin at an odd page offset.
    return {
        "large": torch.randn(WINDOW_BYTES // 2 + 12345).bfloat16(),
        "small": torch.randn(3, 5),
        "half": torch.randn(17).half(),
        "number": torch.tensor(2.5),
    }


@pytest.fixture
def path(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.fixture
def reader(path: Path) -> Iterator[WeightReader]:
    reader = WeightReader(WeightFiles([path]), CPU)
    yield reader
    reader.close()


def empty_like(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [torch.full(tensor.shape, torch.nan, dtype=dtype or tensor.dtype) for tensor in tensors.values()]


def weights_of(path: Path, tensors: dict[str, torch.Tensor]) -> Weights:
    stored = read_header(path)
    return Weights.in_files("unit", [stored[name] for name in tensors])


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system refuse reads past the page cache."""
    system_open = os.open

    def plain_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", plain_open)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_direct", [True, False])
def test_weights_arrive_cast_as_whole_loads_cast_them(path, tensors, dtype, is_direct, monkeypatch):
    if not is_direct:
        refuse_direct(monkeypatch)
    reader = WeightReader(WeightFiles([path]), CPU)
    assert reader.files._direct == ({path} if is_direct else set())
    filled = empty_like(tensors, dtype)
    reader.load(Loading(weights_of(path, tensors), filled)).future.result(timeout=60)
    for (name, tensor), actual in zip(tensors.items(), filled, strict=True):
        assert torch.equal(actual, tensor.to(dtype or tensor.dtype)), name
    assert reader.bytes_read >= sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < reader.bytes_per_second < float("inf")
    reader.close()


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_tensors_at_odd_addresses_are_read(tmp_path: Path, shift: int) -> None:
    """Nothing in the format aligns tensors; torch reads elements at their type's addresses only."""
    save_file({"a": torch.arange(5000.0)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" " * (shift + (-len(content[8 : 8 + length].rstrip())) % 8)
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    stored = read_header(tmp_path / "x.safetensors")["a"]
    assert stored.offset % 4 == shift
    reader, filled = WeightReader(WeightFiles([stored.path]), CPU), torch.zeros(5000, dtype=torch.float64)
    reader.load(Loading(Weights.in_files("unit", [stored]), [filled])).future.result(timeout=60)
    assert torch.equal(filled, torch.arange(5000.0).double())
    reader.close()


def test_kept_weights_are_copied_without_the_files(reader: WeightReader, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights = weights_of(path, tensors).keeping([*tensors.values()])
    filled = empty_like(tensors, torch.float32)
    assert weights.num_bytes == 0
    reader.load(Loading(weights, filled)).future.result(timeout=60)
    assert all(torch.equal(actual, tensor.float()) for tensor, actual in zip(tensors.values(), filled, strict=True))
    assert reader.bytes_read == 0


def test_loads_end_in_their_order_and_a_cancelled_one_leaves_the_tensors_to_the_next(reader, path, tensors):
    """The slot of a unit that a pass doesn't need any more is filled with another one at once."""
    weights, filled = weights_of(path, tensors), empty_like(tensors)
    first = reader.load(Loading(weights, filled))
    first.is_cancelled = True
    ones = [torch.ones_like(tensor) for tensor in tensors.values()]
    reader.load(Loading(weights.keeping(ones), filled)).future.result(timeout=60)
    assert all((tensor == 1).all() for tensor in filled)


def test_a_file_that_becomes_shorter_is_named_at_the_read(reader, path, tensors):
    weights, filled = weights_of(path, tensors), empty_like(tensors)
    os.truncate(path, path.stat().st_size // 2 // PAGE * PAGE + 77)
    with pytest.raises(ValueError, match=r"(?s)weights changed while.*x.safetensors: it ends at byte"):
        reader.load(Loading(weights, filled)).future.result(timeout=60)


def test_a_file_that_is_replaced_or_written_or_gone_is_named(path, tensors, tmp_path):
    files = WeightFiles([path])
    files.require_unchanged([path])
    save_file(tensors, tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(ValueError, match=r"x.safetensors: it was written or replaced"):
        files.require_unchanged([path])
    files = WeightFiles([path])
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="it was written or replaced"):
        files.require_unchanged([path])
    path.unlink()
    with pytest.raises(ValueError, match=r"it is gone \(No such file"):
        files.require_unchanged([path])


def test_a_failed_read_is_named_and_the_next_load_succeeds(reader, path, tensors, monkeypatch):
    system_read, calls = os.preadv, []

    def failing_once(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return system_read(descriptor, buffers, offset)

    monkeypatch.setattr(weight_reader.os, "preadv", failing_once)
    weights, filled = weights_of(path, tensors), empty_like(tensors)
    with pytest.raises(OSError, match=r"unit: bytes \d+ to \d+ of .*x.safetensors can't be read.*check the disk") as error:
        reader.load(Loading(weights, filled)).future.result(timeout=60)
    assert error.value.errno == errno.EIO
    assert isinstance(error.value.__cause__, OSError)
    for _ in range(3):  # a staging buffer that was lost would block the third load
        reader.load(Loading(weights, filled)).future.result(timeout=60)
    assert torch.equal(filled[0], tensors["large"])


def test_a_read_that_returns_less_is_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, system_read = WeightFiles([path]), os.preadv
    monkeypatch.setattr(weight_reader.os, "preadv", lambda fd, buffers, at: system_read(fd, [buffers[0][:PAGE]], at))
    buffer = aligned_buffer(4 * PAGE)
    files.read(FileWindow(path, 2 * PAGE, 3 * PAGE + 5, ()), buffer)
    assert bytes(buffer[: 3 * PAGE + 5].tolist()) == path.read_bytes()[2 * PAGE : 5 * PAGE + 5]


def test_plain_reads_are_told_once_and_leave_nothing_in_the_page_cache(path, tensors, monkeypatch, caplog):
    refuse_direct(monkeypatch)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(weight_reader, "drop_from_cache", lambda path, start, size: dropped.append((start, size)))
    with caplog.at_level(logging.INFO):
        reader = WeightReader(WeightFiles([path]), CPU)
        for _ in range(2):
            reader.load(Loading(weights_of(path, tensors), empty_like(tensors))).future.result(timeout=60)
    assert caplog.text.count("can't read past the page cache") == 1
    assert sum(size for _, size in dropped) == 2 * weights_of(path, tensors).num_bytes
    reader.close()


def test_copies_in_the_background_use_one_thread_and_the_pass_keeps_its_own(path, tensors):
    """Two teams of threads on two processors were five times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reader = WeightReader(WeightFiles([path]), CPU)
        assert reader._memory.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
        reader.close()
    finally:
        torch.set_num_threads(before)


def test_no_thread_is_left_after_close(path: Path) -> None:
    reader = WeightReader(WeightFiles([path]), CPU)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider-weights")]
    assert names
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outrider-weights")]
    with pytest.raises(RuntimeError):
        reader.load(Loading(Weights.in_files("unit", []), []))


@pytest.mark.slow
def test_a_process_exits_while_units_are_being_read(path: Path) -> None:
    """A thread that isn't a daemon would keep the process, a daemon could crash it."""
    code = f"""
import torch
from outrider.models.llm.weight_files import read_header
from outrider.models.llm.weight_reader import *
from pathlib import Path
stored = [*read_header(Path({str(path)!r})).values()]
reader = WeightReader(WeightFiles([stored[0].path]), torch.device("cpu"))
loads = [reader.load(Loading(Weights.in_files("unit", stored), [torch.empty(s.shape) for s in stored])) for _ in range(500)]
loads[0].future.result()
print("read")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
