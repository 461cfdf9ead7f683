"""What a drafter's folder holds: `config.json`, which says what it is, `model.safetensors`, and maybe `training.json`. All are
read strictly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
import torch
from pydantic import Field, NonNegativeInt

from ....data.files import finish_replacing, read_dataclass
from ....data.manifest import TargetIdentity

FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE = "config.json", "model.safetensors", "training.json"
FiniteNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]
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
    finish_replacing(directory)
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no drafter: it has no {CONFIG_FILE}; give the `drafter/` folder of a finished training"
        )
    config = read_dataclass(DrafterFile, path)
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

    steps: NonNegativeInt
    seconds: FiniteNumber
    """Over all resumes."""
    positions_seen: NonNegativeInt
    tokens_seen: NonNegativeInt
    parameters: NonNegativeInt
    """The drafter's own; those of the target are not counted."""
    tokens_per_step_estimate: FiniteNumber
    """Of the last record of the training."""
    labels: str
    """What it learned, `distilled` or `text` (see TrainConfig)."""
    hardware: str
    """Where it ended: how many processes on which devices."""


def read_training_facts(directory: Path) -> TrainingFacts | None:
    """What is known of a drafter's training; None where its directory doesn't say. Raises ValueError for a malformed file."""
    path = directory / TRAINING_FILE
    return read_dataclass(TrainingFacts, path) if path.is_file() else None


def count_tensors(path: Path, called: str = "") -> int:
    """Return how many tensors a file holds, by its header. Raises ValueError, naming it as it is `called`, where it is cut."""
    called = called or str(path)
    if not path.is_file():
        raise ValueError(f"{called} is missing; the drafter's export is incomplete: copy or export it again")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return len(file.keys())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{called} is damaged ({error}); copy or export the drafter again") from error


def require_counts(config: Mapping[str, Any], names: Sequence[str], num_tensors: int, path: Path) -> None:
    """Raise ValueError where a configuration, read from `path`, counts more layers or heads than there are tensors.

    To make so many would take long, before any shape could be compared.
    """
    for name in names:
        if isinstance(count := config.get(name), int) and count > num_tensors:
            raise ValueError(
                f"{path} has {name} {count}, and there are {num_tensors} tensors in all; copy or export the drafter again"
            )


def read_weights(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, which must have the names, shapes and kinds of number of `expected`."""
    count_tensors(path)
    tensors = safetensors.torch.load_file(path)
    raise_problems(path, shape_problems(tensors, expected) or infinite_problems(tensors))
    return tensors


def shape_problems(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    optional: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """List what of `tensors` is missing, unknown, of another shape or of another kind of number."""
    known = {**expected, **(optional or {})}
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unknown {name}" for name in sorted(tensors.keys() - known.keys())]
    for name in sorted(known.keys() & tensors.keys()):
        theirs, ours = tensors[name], known[name]
        if theirs.shape != ours.shape:
            problems.append(f"{name} is {tuple(theirs.shape)}, not {tuple(ours.shape)}")
        elif _kind_of_number(theirs) != _kind_of_number(ours):
            problems.append(f"{name} is of {theirs.dtype}, not {ours.dtype}")
    return problems


def _kind_of_number(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.dtype is torch.bool


def infinite_problems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List the tensors that hold numbers that aren't finite."""
    return [
        f"{name} holds numbers that aren't finite"
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() and not tensor.float().isfinite().all()  # 8 bits have no isfinite
    ]


def raise_problems(path: Path, problems: list[str]) -> None:
    """Raise ValueError with the first of the problems of a folder or its weights."""
    if problems:
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise ValueError(
            f"{path} doesn't hold the drafter that its {CONFIG_FILE} describes: {'; '.join(problems[:MOST_PROBLEMS])}{more}"
        )
