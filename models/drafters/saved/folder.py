"""What a drafter's folder holds: `config.json`, which says what it is, `model.safetensors`, and maybe `training.json`. All are
read strictly."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ....data.files import parse_dataclass, read_json
from ....data.manifest import TargetIdentity

FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE = "config.json", "model.safetensors", "training.json"
MOST_PROBLEMS = 5
"""Named in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFile:
    """What `config.json` holds: which drafter, with which options, for which target."""

    format_version: int
    kind: str
    drafter: dict[str, Any]
    target: TargetIdentity


def read_drafter_config(directory: Path) -> DrafterFile:
    """What a drafter's directory says of itself, without touching the weights.

    Raises ValueError where the directory holds no drafter of this format, or a key is missing or unknown.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no drafter: it has no {CONFIG_FILE}; give the `drafter/` folder of a finished training"
        )
    config = parse_dataclass(DrafterFile, read_json(path), path)
    if config.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {config.format_version}, and this version of outrider reads format {FORMAT_VERSION}; "
            "save the drafter again with this version, or read it with the one that wrote it"
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """What `training.json` holds: what a drafter's training took. It travels with the drafter, for tables; drafting needs none
    of it.
    """

    steps: int
    seconds: float
    """Over all resumes."""
    positions_seen: int
    tokens_seen: int
    parameters: int
    """The drafter's own; those of the target are not counted."""
    tokens_per_step_estimate: float
    """Of the last record of the training."""
    labels: str
    """What it learned, `distilled` or `text` (see TrainConfig)."""
    hardware: str
    """Where it ended: how many processes on which devices."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("labels", "hardware") and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a finite number and not negative")


def read_training_facts(directory: Path) -> TrainingFacts | None:
    """What is known of a drafter's training; None where its directory doesn't say. Raises ValueError for a malformed file."""
    path = directory / TRAINING_FILE
    return parse_dataclass(TrainingFacts, read_json(path), path) if path.is_file() else None


def count_tensors(path: Path) -> int:
    """How many a file holds, by its header. Raises ValueError as `read_weights` does."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; the drafter's export is incomplete: copy or export it again")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return len(file.keys())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy or export the drafter again") from error


def read_weights(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file, which must have the names, shapes and kinds of number of `expected`."""
    count_tensors(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy or export the drafter again") from error
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unknown {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        found, wanted = tensors[name], expected[name]
        if found.shape != wanted.shape:
            problems.append(f"{name} is {tuple(found.shape)}, not {tuple(wanted.shape)}")
        elif found.is_floating_point() != wanted.is_floating_point():
            problems.append(f"{name} is of {found.dtype}, not {wanted.dtype}")
        elif not found.isfinite().all():
            problems.append(f"{name} holds numbers that aren't finite")
    if problems:
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise ValueError(
            f"{path} doesn't hold the drafter that its config describes: {'; '.join(problems[:MOST_PROBLEMS])}{more}"
        )
    return tensors
