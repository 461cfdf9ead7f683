"""The records of a training: in a JSON-lines file, and in Weights & Biases and TensorBoard on request."""

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from uuid import uuid4

from ..data.files import atomic_write_text
from .config import TrainConfig

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_run_id"
TENSORBOARD_DIR = "tensorboard"
PACKAGES = {"wandb": "wandb", "tensorboard": "'outrider[tensorboard]'"}
"""The requirement that installs each tracker; its package has the tracker's name."""


class Sink(Protocol):
    """A service that gets numbers by name. Its errors end the sink, and not the training."""

    def log(self, step: int, scalars: Mapping[str, int | float]) -> None: ...

    def finish(self, *, failed: bool) -> None: ...


def require_tracker(config: TrainConfig) -> None:
    """Raise ValueError, with the remedy, where the package of a tracker isn't installed."""
    for name in _names(config):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"train.tracker is {config.tracker}, and the package {name} isn't installed; pip install {PACKAGES[name]}, or "
                f"set train.tracker=none: the records are in {METRICS_FILE} anyway"
            )


class Tracker:
    """Writes records, one JSON line each, and sends them to the run's sinks.

    A context manager; every process but the main one passes `active=False`. Training starts or
    resumes at `step`: records of later steps, which a killed run wrote after its last checkpoint, are
    dropped, since those steps run again. A sink that fails is logged once and gets no more records.
    """

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], *, step: int, active: bool) -> None:
        self._path = output_dir / METRICS_FILE if active else None
        self._sinks: dict[str, Sink] = {}
        if self._path is None:
            return
        for name in _names(config):
            self._sinks[name] = SINKS[name](output_dir, config, run_config, step)
        kept = [record for record in read_records(self._path) if record["step"] <= step]
        atomic_write_text(self._path, "".join(_line(record) for record in kept))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, sink in list(self._sinks.items()):
            self._attempt(name, partial(sink.finish, failed=kind is not None))

    def log(self, record: dict[str, Any]) -> None:
        """Write a record; it must have a `step`. Raises OSError, saying what is kept, where the disk is full."""
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
        for name, sink in list(self._sinks.items()):
            self._attempt(name, partial(sink.log, record["step"], _scalars(record)))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever another's service raises, the training is worth more
            del self._sinks[name]
            logger.warning(
                "%s fails (%s: %s) and gets no more of this run's records; training goes on, and all of them are in %s",
                name,
                type(error).__name__,
                error,
                self._path,
            )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; none where there is no file. A last line cut by a kill is left out."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no record ({error}); delete the line") from error
    return records


def _names(config: TrainConfig) -> list[str]:
    return [] if config.tracker == "none" else config.tracker.split("+")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _scalars(record: dict[str, Any]) -> dict[str, int | float]:
    """Numbers by name, as charts want them: lists by depth (and rank, of accuracies) become `name/depth0_top1`."""
    scalars: dict[str, int | float | None] = {}
    for name, value in record.items():
        for depth, entry in enumerate(value if isinstance(value, list) else []):
            if isinstance(entry, list):
                scalars |= {f"{name}/depth{depth}_top{rank}": share for rank, share in enumerate(entry, 1)}
            else:
                scalars[f"{name}/depth{depth}"] = entry
        if not isinstance(value, list):
            scalars[name] = value
    return {name: value for name, value in scalars.items() if value is not None}


class WandbSink:
    """A run at Weights & Biases: one for a training, however often that is resumed. Raises ValueError where it can't start."""

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], step: int) -> None:
        import wandb  # only here: it is slow to import, and most runs don't want it

        id_path = output_dir / RUN_ID_FILE
        if not id_path.exists():
            atomic_write_text(id_path, uuid4().hex)
        try:
            self._run = wandb.init(
                project=config.project,
                mode=config.wandb_mode,  # type: ignore[arg-type]
                id=id_path.read_text(encoding="utf-8"),
                resume="allow" if config.wandb_mode == "online" else None,
                dir=output_dir,
                config=run_config,
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"Weights & Biases can't start ({error}); log in, or set train.wandb_mode=offline (and `wandb sync` later) or "
                f"train.tracker=none: the records are in {METRICS_FILE} anyway"
            ) from error

    def log(self, step: int, scalars: Mapping[str, int | float]) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class TensorBoardSink:
    """Event files for TensorBoard in the run's folder; one more for each resume, which hides what it makes again."""

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only here: an optional package

        self._writer = SummaryWriter(str(output_dir / TENSORBOARD_DIR), purge_step=step + 1)
        if not step:
            self._writer.add_text("run", f"```json\n{json.dumps(run_config, indent=1)}\n```")

    def log(self, step: int, scalars: Mapping[str, int | float]) -> None:
        try:
            for name, value in scalars.items():
                if name != "step":
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()  # so that a kill loses nothing, and a full disk shows
        except OSError:
            with suppress(OSError):
                self._writer.file_writer.close()  # type: ignore[attr-defined] # ends its thread, which would try again
            raise

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


SINKS: dict[str, Callable[[Path, TrainConfig, dict[str, Any], int], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorBoardSink,
}
