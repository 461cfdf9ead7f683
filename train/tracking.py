"""Records of a training: a JSON-lines file, and Weights & Biases or TensorBoard on request."""

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol
from uuid import uuid4

from ..data.files import atomic_write_text
from .config import TrainConfig

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_run_id"
TENSORBOARD_DIR = "tensorboard"
PACKAGES = {"wandb": "wandb", "tensorboard": "'outrider[tensorboard]'"}
"""Requirement for pip, by tracker. The package to import has the tracker's name."""


class Sink(Protocol):
    """A service that gets numbers by name. An error in it ends only the sink, not the training."""

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
    resumes at `step`: records of later steps, which a killed run wrote after its last checkpoint,
    are dropped, since those steps run again. A sink that fails is logged once and gets no more
    records.
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
        for name, sink in list(self._sinks.items()):
            self._attempt(name, partial(sink.log, record["step"], _scalars(record)))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - no error of a service may end the training
            del self._sinks[name]
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
        for depth, entry in enumerate(value if isinstance(value, list) else []):
            if isinstance(entry, list):
                scalars |= {f"{name}/depth{depth}_top{rank}": share for rank, share in enumerate(entry, 1)}
            else:
                scalars[f"{name}/depth{depth}"] = entry
        if not isinstance(value, list):
            scalars[name] = value
    return {name: value for name, value in scalars.items() if value is not None}


class WandbSink:
    """A run at Weights & Biases, the same one after a resume.

    Raises ValueError if it can't start.
    """

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], step: int) -> None:
        import wandb  # here, because it is slow to import and rarely used

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
    """Event files for TensorBoard in the run's folder.

    A resume adds a file, which hides the repeated steps.
    """

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, because it is an optional package

        self._writer = SummaryWriter(str(output_dir / TENSORBOARD_DIR), purge_step=step + 1)
        if not step:
            self._writer.add_text("run", f"```json\n{json.dumps(run_config, indent=1)}\n```")

    def log(self, step: int, scalars: Mapping[str, int | float]) -> None:
        try:
            for name, value in scalars.items():
                if name != "step":
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()  # a kill then loses nothing, and a full disk raises an error
        except OSError:
            with suppress(OSError):
                self._writer.file_writer.close()  # type: ignore[attr-defined] # end its thread, which would retry
            raise

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


SINKS: dict[str, Callable[[Path, TrainConfig, dict[str, Any], int], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorBoardSink,
}
