"""Checkpoints that survive a kill at any moment.

A checkpoint is a folder `step-00000120`. It is written under a temporary name and renamed when all of it is there, with a
marker that lists its files: what bears the name is whole. Checkpoints are not synced to the disk (a killed process loses
nothing by that); should a power cut tear one, the sizes in its marker give it away and the one before it is used.
"""

import errno
import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from ..data.files import read_json

logger = logging.getLogger(__name__)

MARKER_FILE = "complete.json"


def save_checkpoint(accelerator: Accelerator, directory: Path, step: int, state: dict[str, Any], *, keep: int) -> None:
    """Write the checkpoint of a step, from all processes, and remove all but the `keep` newest.

    `state` are JSON values beside the accelerator's own state (weights, optimizer, random numbers). Raises OSError where it
    can't be written; the checkpoints before it are kept.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            paths = sorted(path for path in partial.rglob("*") if path.is_file())  # DeepSpeed's lie in a folder of their own
            files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in paths}
            marker = {"step": step, "files": files, **state}
            (partial / MARKER_FILE).write_text(json.dumps(marker, indent=1, allow_nan=False))
            os.replace(partial, final)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own errors for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        kept = latest_checkpoint(directory)
        free_mebibytes = shutil.disk_usage(directory).free // 2**20
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"the checkpoint of step {step} could not be written to {directory} ({free_mebibytes} MiB free): {error}. "
            f"The last complete checkpoint is {kept.name if kept else 'none'}. Make room, or move the run to another disk, and "
            "give the same command again: training goes on from that checkpoint",
        ) from error
    if accelerator.is_main_process:
        for old in complete_checkpoints(directory)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> dict[str, Any]:
    """Restore the accelerator's state, in every process; returns the marker, with what `save_checkpoint` got as `state`."""
    try:
        accelerator.load_state(str(checkpoint))
    except (RuntimeError, ValueError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"the checkpoint {checkpoint} is damaged ({error}); delete it, and the same command goes on from the one before, "
            "or from the start"
        ) from error
    return read_marker(checkpoint)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The marker of a complete checkpoint."""
    marker: dict[str, Any] = read_json(checkpoint / MARKER_FILE)
    return marker


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return [path for path in sorted(directory.glob("step-*")) if _is_complete(path)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint in a folder, if there is one."""
    return next(reversed(complete_checkpoints(directory)), None)


def remove_incomplete(directory: Path) -> None:
    """Remove what killed runs left half-written (or half-removed)."""
    complete = set(complete_checkpoints(directory))
    for path in [*directory.glob("step-*"), *directory.glob(".step-*.partial")]:
        if path not in complete:
            logger.warning("removing %s: it is not complete", path)
            shutil.rmtree(path)


def _is_complete(checkpoint: Path) -> bool:
    if not (checkpoint / MARKER_FILE).is_file():
        return False
    try:
        files = read_marker(checkpoint)["files"]
    except ValueError:  # the marker itself was torn by a power cut
        return False
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == size for name, size in files.items())
