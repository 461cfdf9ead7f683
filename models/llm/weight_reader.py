"""Reading of weights from files into tensors, in the background and past the page cache.

    files --(thread 1: reads)--> staging buffers --(thread 2: copies, casts)--> tensors

The first thread reads the next window while the second one copies the last. One thread for both took 1.25 times as long
(1.5 GB in bfloat16 on two cores), and 1.54 times where the copy casts to float32. Both handle one unit
after the other, in the order of `load`. So a tensor may be the destination of a second unit as soon
as the first one's loading was cancelled or has ended.
"""

import errno
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch

from ...data.files import drop_from_cache
from .weight_files import PAGE, WINDOW_BYTES, FileWindow, Piece, StoredTensor, windows

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
"""Staging buffers: one is read into, one is copied from."""
DIRECT: int = getattr(os, "O_DIRECT", 0)
"""Flag for reads past the page cache; 0 on systems without it."""
Fingerprint = tuple[int, ...]


class WeightFiles:
    """Open files of weights, read past the page cache where the file system allows it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._descriptors: dict[Path, int] = {}
        self._direct: set[Path] = set()
        self._close = weakref.finalize(self, _close_all, self._descriptors)
        self._fingerprints = {path: _fingerprint(path) for path in paths}
        for path in self._fingerprints:
            self._open(path)
        if plain := [path for path in self._fingerprints if path not in self._direct]:
            logger.info(
                "%s is on a file system that can't read past the page cache: what was read is dropped from the cache", plain[0]
            )

    def _open(self, path: Path) -> None:
        """Open a file for direct reads; plainly if its file system refuses them."""
        buffer = aligned_buffer(PAGE)
        for flag in (DIRECT, 0):
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | flag)
                os.preadv(self._descriptors[path], [buffer.numpy().data], 0)
            except OSError as error:
                if not flag or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                if (descriptor := self._descriptors.pop(path, None)) is not None:
                    os.close(descriptor)
            else:
                self._direct.update([path] if flag else [])
                return

    def read(self, window: FileWindow, buffer: torch.Tensor, unit: str = "") -> None:
        """Read a window into a buffer that begins at a page. `unit` is named in errors.

        Raises OSError for a failed read, and ValueError for a file that has become shorter.
        """
        path, descriptor = window.path, self._descriptors[window.path]
        is_direct = path in self._direct
        end = -(-window.num_bytes // PAGE) * PAGE if is_direct else window.num_bytes
        memory, num_read = buffer.numpy().data, 0
        while num_read < window.num_bytes:
            try:
                count = os.preadv(descriptor, [memory[num_read:end]], window.start + num_read)
            except OSError as error:
                where = f"{unit}: bytes {window.start} to {window.start + window.num_bytes} of {path}"
                raise OSError(error.errno, f"{where} can't be read ({error.strerror}); check the disk") from error
            num_read += count
            # A direct read ends within a page only at the end of the file.
            if count == 0 or (is_direct and count % PAGE and num_read < window.num_bytes):
                raise changed(path, f"it ends at byte {window.start + num_read}")
        if not is_direct:
            drop_from_cache(path, window.start, end)

    def require_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise ValueError if a file was replaced, written or cut since it was opened."""
        for path in paths:
            try:
                now = _fingerprint(path)
            except OSError as error:
                raise changed(path, f"it is gone ({error.strerror})") from error
            if now != self._fingerprints[path]:
                raise changed(path, "it was written or replaced")

    def close(self) -> None:
        """Close all files."""
        self._close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of one unit: where they lie in files, or `kept` in memory as stored."""

    name: str
    """Name of the unit's module, for messages."""
    stored: tuple[StoredTensor, ...]
    windows: tuple[FileWindow, ...]
    kept: tuple[torch.Tensor, ...] = ()

    @classmethod
    def in_files(cls, name: str, stored: Sequence[StoredTensor], window_bytes: int = WINDOW_BYTES) -> "Weights":
        """Return weights that are read from their files each time."""
        return cls(name=name, stored=tuple(stored), windows=tuple(windows(stored, window_bytes)))

    def keeping(self, kept: Sequence[torch.Tensor]) -> "Weights":
        """Return these weights with their copies in memory instead of the files."""
        return replace(self, windows=(), kept=tuple(kept))

    @property
    def num_bytes(self) -> int:
        """Bytes to read each time."""
        return sum(window.num_bytes for window in self.windows)


class Loading:
    """Weights of one unit on their way into `tensors`; `future` ends when the last one is there.

    `after` is the end of the tensors' last use on a GPU.
    """

    def __init__(self, weights: Weights, tensors: Sequence[torch.Tensor], after: torch.cuda.Event | None = None) -> None:
        self.weights = weights
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.after = after
        self.future: Future[None] = Future()
        self.bytes_left = weights.num_bytes
        """Bytes that are still to be read."""
        self.is_cancelled = False
        """Set by a pass that doesn't need the weights any more; the future may then never end."""

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End the loading with the error of the block: the pass's thread raises it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            if not self.future.done():
                self.future.set_exception(error)


class WeightReader:
    """Two threads that load units in turn: one reads files, the other one fills tensors.

    `window_bytes` is the size of the largest window.
    """

    def __init__(self, files: WeightFiles, device: torch.device, window_bytes: int = WINDOW_BYTES) -> None:
        self.files = files
        self.bytes_read, self.read_seconds = 0, 0.0
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._free.put(aligned_buffer(window_bytes, pinned=is_cuda))
        # Executors end their threads at the interpreter's exit, and when the reader is collected.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="outrider-weights-disk")
        self._memory = ThreadPoolExecutor(1, thread_name_prefix="outrider-weights-memory", initializer=_compute_on_one_thread)
        # Start it now, and set again the number of threads that later threads begin with.
        self._memory.submit(int).result()
        torch.set_num_threads(torch.get_num_threads())

    @property
    def bytes_per_second(self) -> float:
        """Rate at which files were read so far; infinite before the first read."""
        return self.bytes_read / self.read_seconds if self.read_seconds else float("inf")

    def load(self, loading: Loading) -> Loading:
        """Begin to fill a loading's tensors, whose types may differ from the stored ones.

        The loading's future raises what went wrong.
        """
        self._disk.submit(self._read, loading)
        return loading

    def close(self) -> None:
        """End both threads and close the files. Later calls of `load` raise RuntimeError."""
        self._disk.shutdown(cancel_futures=True)
        self._memory.shutdown()
        self.files.close()

    def _read(self, loading: Loading) -> None:
        """Read the windows of one unit; the other thread copies each of them."""
        with loading.failing():
            for window in loading.weights.windows:
                if loading.is_cancelled:
                    return
                began, buffer = time.perf_counter(), self._free.get()
                try:
                    self.files.read(window, buffer, loading.weights.name)
                    self._memory.submit(self._copy, loading, window, buffer)
                except BaseException:  # at the interpreter's exit `submit` raises RuntimeError
                    self._free.put(buffer)
                    raise
                loading.bytes_left -= window.num_bytes
                self.bytes_read += window.num_bytes
                self.read_seconds += time.perf_counter() - began
            # After the reads, so that no pass computes with bytes that were written during the run.
            self.files.require_unchanged({window.path for window in loading.weights.windows})
            self._memory.submit(self._finish, loading)

    def _copy(self, loading: Loading, window: FileWindow, buffer: torch.Tensor) -> None:
        """Copy a window's pieces into the tensors, then give the buffer back."""
        with loading.failing():
            if not loading.is_cancelled:
                stored = loading.weights.stored
                sources = [_elements(buffer, piece, stored[piece.tensor].dtype) for piece in window.pieces]
                parts = [loading.tensors[piece.tensor][piece.first : piece.first + piece.count] for piece in window.pieces]
                self._fill(parts, sources, loading.after)
        self._free.put(buffer)

    def _finish(self, loading: Loading) -> None:
        """Copy kept weights, and end the loading."""
        with loading.failing():
            if loading.weights.kept and not loading.is_cancelled:
                self._fill(loading.tensors, [tensor.view(-1) for tensor in loading.weights.kept], loading.after)
            if not loading.future.done():
                loading.future.set_result(None)

    def _fill(self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: torch.cuda.Event | None) -> None:
        """Copy and cast; on a GPU beside the pass, until the copies are done."""
        if self._stream is None:
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _compute_on_one_thread() -> None:
    """Let operations of the present thread use no others: they would fight with the pass's."""
    torch.get_num_threads()  # a thread's first operation sets its number
    torch.set_num_threads(1)


def staging_bytes(window_bytes: int) -> int:
    """Return the memory of all staging buffers, each of which begins at a page."""
    return NUM_BUFFERS * (window_bytes + PAGE)


def aligned_buffer(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate bytes in host memory that begin at a page."""
    buffer = torch.empty(num_bytes + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -buffer.data_ptr() % PAGE
    return buffer[start : start + num_bytes]


def _elements(buffer: torch.Tensor, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """Return a piece of a window as elements of its type."""
    data = buffer[piece.position : piece.position + piece.count * dtype.itemsize]
    # Elements that lie at odd addresses need a copy before torch can read them.
    return (data.clone() if piece.position % dtype.itemsize else data).view(dtype)


def changed(path: Path, how: str) -> ValueError:
    """Return the error for a weight file that differs from the one that was opened."""
    return ValueError(
        f"the weights changed while they were being read: {path}: {how}. Restore the file, and load the target again"
    )


def _fingerprint(path: Path) -> Fingerprint:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
