"""The drafter with the most tokens per step so far, and when to stop early."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..data.files import finish_replacing, partial_directory, read_dataclass, replacing_directory, write_json
from ..data.manifest import TargetIdentity
from ..models.drafters import save_drafter
from ..models.drafters.base import TrainableDrafter

BEST_DIR = "best"
RECORD_FILE = "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRecord:
    """Content of `best.json`: a step, and the measurement of the drafter after it."""

    step: int
    tokens_per_step: float
    validation: dict[str, Any]


class Best:
    """The measurements of a run, and the folder of the best drafter.

    The best drafter has the highest tokens per step of all measurements.
    """

    def __init__(self, output_dir: Path, target: TargetIdentity) -> None:
        self.directory = output_dir / BEST_DIR
        self._target = target
        self._measured: list[tuple[int, float | None]] = []
        self.validation: dict[str, Any] | None = None
        """The record of the last measurement."""

    def add(self, step: int, validation: Mapping[str, Any]) -> None:
        """Add the measurement after a step."""
        self._measured.append((step, validation["validation_tokens_per_step"]))
        self.validation = dict(validation)

    def keep(self, drafter: TrainableDrafter) -> bool:
        """Save the drafter to the folder, unless the one there is better.

        Returns whether it was saved. To be called by the main process only. Of two equal drafters
        the later one is kept, since it has learned more. A drafter without tokens per step is not
        saved.
        """
        step, tokens_per_step = self._measured[-1]
        kept = self.record()
        if tokens_per_step is None or (kept is not None and kept.tokens_per_step > tokens_per_step):
            return False
        assert self.validation is not None
        record = BestRecord(step=step, tokens_per_step=tokens_per_step, validation=self.validation)
        with replacing_directory(self.directory) as folder:
            save_drafter(drafter, folder, self._target)
            write_json(folder / RECORD_FILE, asdict(record))
        return True

    def record(self) -> BestRecord | None:
        """The record of the drafter in the folder, or None without a drafter.

        Raises ValueError for a malformed record.
        """
        finish_replacing(self.directory)
        path = self.directory / RECORD_FILE
        return read_dataclass(BestRecord, path) if path.is_file() else None

    def clear(self) -> None:
        """Remove the folder, for a run that starts from step 0."""
        finish_replacing(self.directory)
        for path in (self.directory, partial_directory(self.directory)):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def latest(self) -> tuple[int, float] | None:
        """Step and tokens per step of the last measurement that has tokens per step."""
        return next(((step, value) for step, value in reversed(self._measured) if value is not None), None)

    def has_peaked(self, patience: int | None) -> bool:
        """Whether none of the last `patience` measurements exceeds the best one before them."""
        values = [0.0 if value is None else value for _, value in self._measured]
        return patience is not None and len(values) > patience and max(values[-patience:]) <= max(values[:-patience])

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values."""
        return {"measured": [list(pair) for pair in self._measured], "validation": self.validation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._measured = [(step, value) for step, value in state["measured"]]
        self.validation = state["validation"]
