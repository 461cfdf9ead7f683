"""What decides a run, and what it leaves: the best drafter, its folder, the summary."""

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from ..data.fields import differences, name_digests
from ..data.files import (
    atomic_write_bytes,
    finish_replacing,
    read_dataclass,
    replacing_directory,
    sha256_file,
    write_json,
)
from ..data.manifest import Manifest, TargetIdentity
from ..models.drafters import save_drafter
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.registry import DrafterSpec
from ..models.drafters.saved.build import starting_weights
from ..models.drafters.saved.folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TrainingFacts,
    read_drafter_config,
    record_weights,
    require_recorded_weights,
    write_training_facts,
)
from ..models.drafters.saved.loading import change_options
from ..models.drafters.saved.low_rank import LOW_RANK_DIR, write_low_rank
from .checkpoint import latest_checkpoint, read_marker
from .config import DIVISION_KEYS, MAY_CHANGE_ON_RESUME, Division, TrainConfig

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

    def keep(self, drafter: TrainableDrafter) -> None:
        """Save the drafter to the folder, unless the one there is better.

        To be called by the main process only. Of two equal drafters the later one is kept, since it has
        learned more. A drafter without tokens per step is not saved.
        """
        step, tokens_per_step = self._measured[-1]
        kept = self.record()
        if tokens_per_step is None or (kept is not None and kept.tokens_per_step > tokens_per_step):
            return
        assert self.validation is not None
        record = BestRecord(step=step, tokens_per_step=tokens_per_step, validation=self.validation)
        with replacing_directory(self.directory) as folder:
            save_drafter(drafter, folder, self._target)
            write_json(folder / RECORD_FILE, asdict(record))

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
        shutil.rmtree(self.directory, ignore_errors=True)

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


logger = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
DRAFTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
CHECKPOINTS_DIR = "checkpoints"
DIGESTS = {
    "shards.data_sha256": "the shards were distilled from other data",
    "shards.sha256": "the shards of the distillation are others than those that it was trained on",
    "target.weights_sha256": "the target has other weights (target.name_or_path, target.revision)",
    "started_from": "drafter.start_from (or drafter.path) is set in one run alone",
    "started_from.weights_sha256": "drafter.start_from (or drafter.path) has other weights",
}
"""What a change of a digest means, in place of two long numbers."""


@dataclass(frozen=True, kw_only=True)
class Summary(TrainingFacts):
    """Content of `summary.json`, written when the drafter is complete."""

    metrics: dict[str, Any]
    """The last record of the loss."""
    drafter_step: int
    validation: dict[str, Any] | None
    end: dict[str, Any]
    drafter_sha256: dict[str, str]
    run: dict[str, Any]
    """What `describe_run` returns."""


def describe_run(config: TrainConfig, spec: DrafterSpec, manifest: Manifest, launch: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides what is learned, as JSON values; `launch` is that of `describe_launch`.

    Two runs with equal descriptions learn the same. A run may resume with another division of its
    steps (see `Division`), and then learns nearly the same.
    """
    shards = "\n".join(shard.sha256 for shard in manifest.shards)
    started_from = starting_weights(spec)
    options = {key: value for key, value in asdict(config).items() if key not in MAY_CHANGE_ON_RESUME}
    return {
        "train": json.loads(json.dumps(options)),  # names of losses as plain texts, as in a file
        "drafter": {
            "kind": spec.kind,
            **{key: value for key, value in asdict(spec.config).items() if key not in spec.config.RUNTIME_FIELDS},
        },
        "shards": {
            "horizon": manifest.horizon,
            "features": manifest.features,
            "data_sha256": manifest.data_sha256,
            "sha256": hashlib.sha256(shards.encode()).hexdigest(),
        },
        "target": {
            "weights_sha256": manifest.target.weights_sha256,
            **({"quantization": manifest.target.quantization} if manifest.target.quantization else {}),
        },
        **({} if started_from is None else {"started_from": {"weights_sha256": started_from}}),
        **launch,
    }


def is_trained(config: TrainConfig, run: Mapping[str, Any], output_dir: Path, drafter_dir: Path) -> bool:
    """Whether the folders hold this run, finished.

    With more steps than before, the run isn't finished: it resumes from its last checkpoint. Raises
    ValueError, with each changed key, where the folders hold another run.
    """
    remedy = f"Take back the changes, choose another output directory, or delete {output_dir} and {drafter_dir} to train anew"
    checkpoint = latest_checkpoint(output_dir / CHECKPOINTS_DIR)
    if checkpoint is not None:
        _require_same_run(read_marker(checkpoint).state["run"], run, checkpoint, remedy)
    summary_path = output_dir / SUMMARY_FILE
    if not summary_path.exists():
        return False
    summary = read_dataclass(Summary, summary_path)
    _require_same_run(summary.run, run, summary_path, remedy)
    if steps_of(run) != steps_of(summary.run):
        if checkpoint is None:
            raise ValueError(
                f"train.steps is {steps_of(run)}, {summary_path} is of a training of {steps_of(summary.run)} steps, and "
                f"{output_dir / CHECKPOINTS_DIR} holds no checkpoint to resume from. {remedy}"
            )
        return False
    if summary.end != end_of(config) and checkpoint is None:
        raise ValueError(
            f"train.patience or train.change_share is another than in {summary_path}, and {output_dir / CHECKPOINTS_DIR} holds "
            f"no checkpoint to write the drafter from. {remedy}"
        )
    if config.lora_rank is not None and not (drafter_dir / LOW_RANK_DIR / CONFIG_FILE).is_file():
        return False  # the last checkpoint gives it again
    # If these options changed, the last checkpoint and the best drafter give the new results.
    return summary.drafter_sha256 == _digests(drafter_dir) and summary.end == end_of(config)


def end_of(config: TrainConfig) -> dict[str, Any]:
    """The options that decide how early a run ends, and how much of its change is saved."""
    return {"patience": config.patience, **({} if config.change_share == 1 else {"change_share": config.change_share})}


def take_over_options(config: Any, output_dir: Path, drafter_dir: Path) -> None:
    """Change a finished drafter's options for decoding to the configuration's.

    They don't depend on training.
    """
    if change_options(drafter_dir, config):
        summary = read_dataclass(Summary, output_dir / SUMMARY_FILE)
        write_json(output_dir / SUMMARY_FILE, asdict(replace(summary, drafter_sha256=_digests(drafter_dir))))


def save_results(
    drafter: TrainableDrafter,
    drafter_dir: Path,
    output_dir: Path,
    *,
    target: TargetIdentity,
    run: Mapping[str, Any],
    hardware: str,
    config: TrainConfig,
    best: Best,
    base: Path | None,
    chat_template: str | None,
    metrics: Mapping[str, Any],
) -> None:
    """Save the best drafter, or the last one if none was measured, and then the summary.

    The summary shows that the drafter is complete. `drafter` is the drafter after the last step, `base`
    the folder that it started from, `chat_template` the template's digest, and `metrics` the last record
    of the loss. All facts are those of that record, so that a finished training that is resumed writes
    the same files. Raises ValueError for weights that aren't finite.
    """
    if bad := [name for name, weight in drafter.state_dict().items() if not weight.isfinite().all()]:
        raise ValueError(
            f"the trained drafter's {bad[0]} isn't finite, so it isn't saved; delete the newest checkpoint in {output_dir} and "
            "give the same command again, or train anew at a lower train.learning_rate"
        )
    facts = TrainingFacts(
        steps=metrics["step"],
        seconds=metrics["seconds"],
        positions_seen=metrics["positions_seen"],
        tokens_seen=metrics["tokens_seen"],
        parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        tokens_per_step_estimate=metrics["tokens_per_step_estimate"],
        labels=config.labels,
        hardware=hardware,
        chat_template=chat_template,
    )
    kept = best.record()
    with replacing_directory(drafter_dir) as folder:
        if drafter_dir.is_dir():  # a user's files beside the drafter's stay
            shutil.copytree(drafter_dir, folder, symlinks=True, dirs_exist_ok=True)
        if kept is None:
            save_drafter(drafter, folder, target)
        else:
            _copy_best(best.directory, folder, drafter.config)
            logger.info("the best drafter is that of step %d: %.2f tokens per step", kept.step, kept.tokens_per_step)
        if config.change_share < 1:
            assert base is not None, "the configuration has checked it"
            logger.info(
                "train.change_share=%g of the change is saved; what was measured is of the whole change", config.change_share
            )
            _keep_share(config.change_share, folder, base, dict(drafter.named_parameters()))
        if config.lora_rank is not None:
            assert base is not None, "the configuration has checked it"
            write_low_rank(folder, base, config.lora_rank, dict(drafter.named_parameters()))
            write_training_facts(folder / LOW_RANK_DIR, facts)
        write_training_facts(folder, facts)
    summary = Summary(
        **asdict(facts),
        metrics=dict(metrics),
        drafter_step=metrics["step"] if kept is None else kept.step,
        validation=best.validation if kept is None else kept.validation,
        end=end_of(config),
        drafter_sha256=_digests(drafter_dir),
        run=dict(run),
    )
    write_json(output_dir / SUMMARY_FILE, asdict(summary))


def _keep_share(share: float, folder: Path, base: Path, parameters: Collection[str]) -> None:
    """Move the parameters of the drafter in `folder` back on the line to those of `base` (WiSE-FT, arXiv 2109.01903)."""
    before, after = (load_file(path / WEIGHTS_FILE) for path in (base, folder))
    for name in parameters:
        after[name] = before[name].float().lerp(after[name].float(), share).to(after[name])
    atomic_write_bytes(folder / WEIGHTS_FILE, save(after))
    record_weights(folder)


def _copy_best(best: Path, folder: Path, config: Any) -> None:
    """Copy the best drafter, with the options for decoding of `config`.

    They may have changed since the measurement. Raises ValueError for a damaged drafter.
    """
    require_recorded_weights(best, read_drafter_config(best))
    for name in DRAFTER_FILES:
        shutil.copyfile(best / name, folder / name)
    change_options(folder, config)


def _digests(directory: Path) -> dict[str, str]:
    return {name: sha256_file(directory / name) for name in DRAFTER_FILES if (directory / name).is_file()}


def steps_of(run: Mapping[str, Any]) -> int:
    """Return `train.steps` of a described run, or 0 where the description lacks it."""
    train = run.get("train")
    return int(train.get("steps", 0)) if isinstance(train, Mapping) else 0


def _require_same_run(before: Mapping[str, Any], now: Mapping[str, Any], where: Path, remedy: str) -> None:
    changes = differences(before, now)
    if 0 < steps_of(before) < steps_of(now):
        del changes["train.steps"]
    elif "train.steps" in changes:
        changes["train.steps"] += ": a training can get more steps, but not fewer"
    with suppress(KeyError):  # the description of another version may lack a division
        if changes.keys() <= DIVISION_KEYS and Division.of(now).may_follow(Division.of(before)):
            return
    texts = name_digests(changes, DIGESTS)
    raise ValueError(f"{where} belongs to a run with another configuration: {'; '.join(texts)}. {remedy}")
