"""Checkpoints that survive a kill at any moment.

A checkpoint is a folder `step-00000120`. It is written under a temporary name and renamed when it
is complete, with a marker that lists its files. Checkpoints are not synced to the disk, which a
killed process doesn't need. After a power cut the sizes in the marker show whether a checkpoint is
whole; if it isn't, training resumes from the one before. Digests of the files and of the marker
itself show damage and edits, which are an error.
"""

import errno
import json
import logging
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ..data.behind import Behind
from ..data.fields import NonNegativeInt, PositiveInt, RecordedCount
from ..data.files import (
    partial_directory,
    read_dataclass,
    read_json,
    remove_leftovers,
    replacing_directory,
    sha256_file,
    sha256_json,
)
from .parallel import sharding

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
MARKER_FILE = "complete.json"
STATE_FILE = "state.pt"
"""Holds {"model": state, "optimizer": state, "generators": one random state per process}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Size and digest of one file of a checkpoint."""

    num_bytes: RecordedCount
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Content of `complete.json`, which is written when all files of a checkpoint are complete."""

    format_version: int
    step: NonNegativeInt
    sharded_by: str | None
    """The kind of `sharding`: each process saved and loads its part. None: the main process had the whole state."""
    num_processes: PositiveInt
    state: dict[str, Any]
    """What `Checkpoints.save` got, as JSON values."""
    files: dict[str, FileFacts]
    sha256: str
    """Digest of the other fields (`sha256_json`)."""


class HostCopy:
    """Copies nested values to the host. Each call overwrites the tensors of the call before.

    The memory is reused, because new memory costs page faults, and pinned memory (for tensors on
    CUDA), which is much faster to fill, takes long to allocate.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, value: Any, path: str = "") -> Any:
        """Copy dictionaries, lists, tuples and tensors; return other values as they are.

        Waits for the device.
        """
        if isinstance(value, torch.Tensor):
            return self._buffer(path, value).copy_(value.detach())
        if isinstance(value, Mapping):
            return {key: self(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self(item, f"{path}/{index}") for index, item in enumerate(value))
        return value

    def _buffer(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._memory.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[path] = buffer
        return buffer


class Checkpoints(Behind):
    """The checkpoints of a run in a folder, of which the `keep` newest are kept.

    Without sharding `save` only copies the state to the host, and a thread writes it while training
    continues. There is one write at a time: `save` and `finish` wait for
    the last write, and raise its error in all processes. A sharded write raises where it failed. All
    processes must call them together. As a context manager it waits for the last write at the end,
    also after an error.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int,
    ) -> None:
        super().__init__("checkpoint")
        self.directory = directory
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._copy = HostCopy()

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the checkpoint of a step: weights, optimizer, random numbers, and `state`.

        `state` holds JSON values. Raises OSError where this checkpoint, or the one before, can't be
        written. Complete checkpoints are kept.
        """
        self.finish()
        marker = {
            "step": step,
            "format_version": FORMAT_VERSION,
            "sharded_by": sharding(self._accelerator),
            "num_processes": self._accelerator.num_processes,
            "state": state,
        }
        if marker["sharded_by"] is not None:  # only a whole state can be copied, and written in the background
            self._save_sharded(step, marker)
            return
        generators = gather_object([random_state(self._accelerator.device)])
        if self._accelerator.is_main_process:
            model: nn.Module = self._accelerator.unwrap_model(self._model)
            content = {"model": model.state_dict(), "optimizer": self._optimizer.state_dict(), "generators": generators}
            self._last = self._pool.submit(self._write, step, self._copy(content), marker)

    def finish(self) -> None:
        """Wait for the last write. Raises OSError where it failed."""
        error = None if self._last is None else self._last.exception()
        self._last = None
        # Every process must raise it: a process that continued alone would wait for the others.
        for failure in gather_object([error]):
            if failure is not None:
                raise failure

    def _write(self, step: int, content: dict[str, Any], marker: dict[str, Any]) -> None:
        """Write a whole checkpoint, in the main process alone."""
        with replacing_directory(_folder(self.directory, step)) as partial, _named(self.directory, step):
            torch.save(content, partial / STATE_FILE)
            _write_marker(partial, marker)
        self._remove_old()

    def _save_sharded(self, step: int, marker: dict[str, Any]) -> None:
        accelerator, folder = self._accelerator, _folder(self.directory, step)
        writing = replacing_directory(folder) if accelerator.is_main_process else nullcontext(partial_directory(folder))
        with writing as partial, _named(self.directory, step):
            accelerator.wait_for_everyone()
            accelerator.save_state(str(partial))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                _write_marker(partial, marker)
        if accelerator.is_main_process:
            self._remove_old()
        accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        for old in complete_checkpoints(self.directory)[: -self._keep]:
            shutil.rmtree(old)

    def load(self, checkpoint: Path) -> Marker:
        """Restore weights, optimizer and random numbers; returns the marker.

        All processes must call it together. With another number of processes than before, random
        numbers are not restored. Raises ValueError for a checkpoint that is damaged, or that this
        launch can't read.
        """
        marker, num_processes = read_marker(checkpoint), self._accelerator.num_processes
        if marker.sharded_by is not None and marker.num_processes != num_processes:  # `is_trained` compares the kind
            raise ValueError(
                f"the checkpoint {checkpoint} is in {marker.num_processes} parts by {marker.sharded_by}, and there are "
                f"{num_processes} processes now. Launch as many processes as before; only a run that isn't sharded can "
                "resume with another number"
            )
        require_unchanged(checkpoint, marker, self._accelerator)
        try:
            if marker.sharded_by is not None:
                self._accelerator.load_state(str(checkpoint))
                return marker
            content = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
            model: nn.Module = self._accelerator.unwrap_model(self._model)
            model.load_state_dict(content["model"])
            self._optimizer.load_state_dict(content["optimizer"])
            if marker.num_processes == num_processes:
                mine = content["generators"][self._accelerator.process_index]
                set_random_state(mine, self._accelerator.device)
        except (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            # torch's message about a file of another kind is long, and advises to load it unsafely.
            raise _damaged(checkpoint, "unreadable" if isinstance(error, pickle.UnpicklingError) else error) from error
        return marker


def require_unchanged(checkpoint: Path, marker: Marker, accelerator: Accelerator) -> None:
    """Raise ValueError, in all processes, where bytes have changed since they were written.

    Each process reads a share of the files.
    """
    mine = list(marker.files.items())[accelerator.process_index :: accelerator.num_processes]
    for name in gather_object([name for name, facts in mine if sha256_file(checkpoint / name) != facts.sha256]):
        raise _damaged(checkpoint, f"{name} has another checksum")


def _damaged(checkpoint: Path, reason: object) -> ValueError:
    return ValueError(
        f"the checkpoint {checkpoint} is damaged ({reason}); delete it, and the same command resumes from the one before, or "
        "starts again"
    )


def read_marker(checkpoint: Path) -> Marker:
    """Return the marker of a complete checkpoint.

    Raises ValueError for a checkpoint of another format, and for a marker that was altered.
    """
    path = checkpoint / MARKER_FILE
    content = read_json(path)
    if not isinstance(content, dict):
        raise _damaged(checkpoint, f"{MARKER_FILE} is a {type(content).__name__}")
    if (version := content.get("format_version", 1)) != FORMAT_VERSION:
        raise ValueError(
            f"the checkpoint {checkpoint} has format {version}, and this version of outrider reads format {FORMAT_VERSION}. "
            "Resume with the version that wrote it, or delete the checkpoints to train again"
        )
    if content.pop("sha256", None) != sha256_json(content):
        raise _damaged(checkpoint, f"{MARKER_FILE} was altered: its SHA-256 digest is not the one that it records")
    return read_dataclass(Marker, path)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by its folder's name, without reading it."""
    return int(checkpoint.name.removeprefix("step-"))


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return [path for path in sorted(directory.glob("step-*")) if _is_complete(path)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    return next(reversed(complete_checkpoints(directory)), None)


def remove_incomplete(directory: Path) -> None:
    """Remove checkpoints that killed runs have written or removed in part."""
    remove_leftovers(directory)
    complete = set(complete_checkpoints(directory))
    for path in directory.glob("step-*"):
        if path not in complete:
            logger.warning("removing %s: it is not complete", path)
            shutil.rmtree(path)


@contextmanager
def _named(directory: Path, step: int) -> Iterator[None]:
    """Raise an error while a step's checkpoint is written as one OSError, with the remedy."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError for a full disk. Other RuntimeErrors have other causes.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        free_mebibytes = shutil.disk_usage(directory).free // 2**20
        kept = latest_checkpoint(directory)
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"the checkpoint of step {step} could not be written to {directory} ({free_mebibytes} MiB free): {error}. "
            f"The last complete checkpoint is {kept.name if kept else 'none'}. Make room, or move the run to another disk, and "
            "give the same command again: training resumes from that checkpoint",
        ) from error


def _folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _write_marker(partial: Path, marker: Mapping[str, Any]) -> None:
    """Write the marker of a complete checkpoint, with sizes and digests."""
    paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor() as pool:  # a sharded checkpoint has many files
        files = {
            path.relative_to(partial).as_posix(): {"num_bytes": path.stat().st_size, "sha256": sha256}
            for path, sha256 in zip(paths, pool.map(sha256_file, paths), strict=True)
        }
    # As it will be read: JSON turns tuples into lists, and all keys into texts.
    content = json.loads(json.dumps({**marker, "files": files}, allow_nan=False))
    (partial / MARKER_FILE).write_text(json.dumps({**content, "sha256": sha256_json(content)}, indent=1))


def _is_complete(checkpoint: Path) -> bool:
    """Return whether no file is missing or shorter than it was, as after a kill or a power cut.

    Other damage doesn't count here: `read_marker` and `Checkpoints.load` report it.
    """
    try:
        content = read_json(checkpoint / MARKER_FILE)
        if content.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            return True
        sizes = {name: facts["num_bytes"] for name, facts in content["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # missing, or torn by a power cut
        return False
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == size for name, size in sizes.items())


# --- random numbers


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random generators, as values that `torch.load` accepts."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, list(map(int, keys)), *rest), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a `random_state` of a device of the same type in every generator."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type])
