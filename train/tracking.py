"""Where the records of a training go: always to a JSON-lines file, on request to Weights & Biases too."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from ..data.files import atomic_write_text
from .config import TrainConfig

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_run_id"


class Tracker:
    """Writes records, one JSON line each. A context manager; every process but the main one passes `active=False`.

    `step` is the step that training goes on from. Records of later steps, which a killed run wrote after its last checkpoint,
    are dropped, since those steps are made again.
    """

    def __init__(self, output_dir: Path, config: TrainConfig, run_config: dict[str, Any], *, step: int, active: bool) -> None:
        self._path = output_dir / METRICS_FILE if active else None
        self._wandb_run = _start_wandb(output_dir, config, run_config) if active and config.tracker == "wandb" else None
        if self._path is not None:
            kept = [record for record in read_records(self._path) if record["step"] <= step]
            atomic_write_text(self._path, "".join(_line(record) for record in kept))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=0 if kind is None else 1)

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
        if self._wandb_run is not None:
            self._wandb_run.log(_scalars(record), step=record["step"])


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; none where there is no file. A last line cut by a kill is left out."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


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


def _start_wandb(output_dir: Path, config: TrainConfig, run_config: dict[str, Any]) -> Any:
    import wandb  # only here: it is slow to import, and most runs don't want it

    # One run at W&B for one training, however often that is resumed.
    id_path = output_dir / RUN_ID_FILE
    if not id_path.exists():
        atomic_write_text(id_path, uuid4().hex)
    return wandb.init(
        project=config.project,
        mode=config.wandb_mode,  # type: ignore[arg-type]
        id=id_path.read_text(encoding="utf-8"),
        resume="allow" if config.wandb_mode == "online" else None,
        dir=output_dir,
        config=run_config,
    )
