"""Records of a training: a JSON-lines file, the bar, and Weights & Biases or TensorBoard on request."""

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from uuid import uuid4

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from tqdm import tqdm

from ..data.files import atomic_write_text
from .config import TrainConfig

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_run_id"
TENSORBOARD_DIR = "tensorboard"
PACKAGES = {"wandb": "wandb", "tensorboard": "'outrider[tensorboard]'"}
"""Requirement for pip, by tracker. The package to import has the tracker's name."""


def require_tracker(config: TrainConfig) -> None:
    """Raise ValueError, with the remedy, where the package of a tracker isn't installed."""
    for name in _names(config):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"train.tracker is {config.tracker}, and the package {name} isn't installed; pip install {PACKAGES[name]}, or "
                f"set train.tracker=none: the records are in {METRICS_FILE} anyway"
            )


class Tracker:
    """Writes records, one JSON line each, and sends them to the run's trackers.

    A context manager; every process but the main one passes `active=False`. Training starts or
    resumes at `step`: records of later steps, which a killed run wrote after its last checkpoint,
    are dropped, since those steps run again. A tracker that fails is logged once and gets no more
    records.
    """

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], *, step: int, active: bool) -> None:
        self._path = output_dir / METRICS_FILE if active else None
        self._trackers: dict[str, GeneralTracker] = {}
        if self._path is None:
            return
        for name in _names(config):
            self._trackers[name] = START[name](output_dir, run_config, step)
        kept = [record for record in read_records(self._path) if record["step"] <= step]
        atomic_write_text(self._path, "".join(_line(record) for record in kept))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, tracker in list(self._trackers.items()):
            if kind is None or name != "wandb":  # wandb marks a run that isn't finished as failed, when the process exits
                self._attempt(name, tracker.finish)

    def log(self, record: dict[str, Any]) -> None:
        """Write a record, which has a `step`. Raises OSError if the disk is full."""
        if self._path is not None:
            try:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(_line(record))
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"the record of step {record['step']} could not be written to {self._path}: {error.strerror}. Complete "
                    "checkpoints are kept. Make room, or move the run to another disk, and give the same command again",
                ) from error
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, partial(tracker.log, _scalars(record), step=record["step"]))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - no error of a service may end the training
            del self._trackers[name]
            logger.warning(
                "%s failed (%s: %s) and gets no more records of this run; training continues, and all records are in %s",
                name,
                type(error).__name__,
                error,
                self._path,
            )


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file, or none without the file.

    An incomplete last line is ignored. Raises ValueError for a line that is no JSON object with a
    `step`, and names it.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line, parse_constant=_not_finite)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("it has no step")
        except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or nested too deeply
            raise ValueError(f"{path}, line {number} is not a record ({error}); delete the line") from error
        records.append(record)
    return records


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of a record")


def _names(config: TrainConfig) -> list[str]:
    return [] if config.tracker == "none" else config.tracker.split("+")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _scalars(record: dict[str, Any]) -> dict[str, int | float]:
    """Return numbers by name, for charts.

    The entries of a list by depth (and rank) become `name/depth0_top1` and so on.
    """
    scalars: dict[str, int | float | None] = {}
    for name, value in record.items():
        if name == "step":
            continue
        for depth, entry in enumerate(value if isinstance(value, list) else []):
            if isinstance(entry, list):
                scalars |= {f"{name}/depth{depth}_top{rank}": share for rank, share in enumerate(entry, 1)}
            else:
                scalars[f"{name}/depth{depth}"] = entry
        if not isinstance(value, list):
            scalars[name] = value
    return {name: value for name, value in scalars.items() if value is not None}


def _start_wandb(output_dir: Path, run_config: dict[str, Any], step: int) -> WandBTracker:
    """Start a run at Weights & Biases, the same one after a resume.

    Raises ValueError if it can't start.
    """
    import wandb  # here, because it is slow to import and rarely used

    id_path = output_dir / RUN_ID_FILE
    if not id_path.exists():
        atomic_write_text(id_path, uuid4().hex)
    mode = os.environ.get("WANDB_MODE", "online")  # wandb itself reads it only once in a process
    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT", "outrider"),
        mode=mode,
        id=id_path.read_text(encoding="utf-8"),
        resume="allow" if mode == "online" else None,
        dir=output_dir,
        config=run_config,
    )
    try:
        tracker.start()
    except wandb.errors.Error as error:
        raise ValueError(
            f"Weights & Biases can't start ({error}); log in, or set WANDB_MODE=offline (and `wandb sync` later) or "
            f"train.tracker=none: the records are in {METRICS_FILE} anyway"
        ) from error
    return tracker


class _EventFiles(TensorBoardTracker):
    """TensorBoard's event files. After an error, the thread that writes them ends, since it would retry for ever."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        try:
            super().log(values, step=step, **kwargs)
        except OSError:
            with suppress(OSError):
                self.writer.file_writer.close()
            raise


def _start_tensorboard(output_dir: Path, run_config: dict[str, Any], step: int) -> TensorBoardTracker:
    """Open event files in the run's folder. A resume adds a file, which hides the repeated steps."""
    tracker = _EventFiles(TENSORBOARD_DIR, output_dir, purge_step=step + 1)
    tracker.start()
    if not step:
        tracker.writer.add_text("run", f"```json\n{json.dumps(run_config, indent=1)}\n```")
    return tracker


START: dict[str, Callable[[Path, dict[str, Any], int], GeneralTracker]] = {
    "wandb": _start_wandb,
    "tensorboard": _start_tensorboard,
}


def progress_bar(num_steps: int, *, start: int, active: bool) -> tqdm:
    """Return the bar of a training, a context manager. Only the main process is `active`.

    The time left follows from the mean speed since the start of this process. So measurements
    count, and the time between a kill and the resume doesn't.
    """
    return tqdm(total=num_steps, unit="step", initial=start, desc="train", smoothing=0, disable=not active)


def show(bar: tqdm, record: Mapping[str, Any], measured: tuple[int, float] | None) -> None:
    """Show the loss of a record, and the last measurement (step, tokens per step), beside the bar."""
    text = f"loss {record['loss']:.3g}, tokens per step {record['tokens_per_step_estimate']:.2f} estimated"
    if measured is not None:
        text += f", {measured[1]:.2f} measured at step {measured[0]}"
    bar.set_postfix_str(text)
