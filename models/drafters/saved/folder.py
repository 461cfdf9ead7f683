"""The files of a drafter's folder, and their checks.

These are `config.json`, `model.safetensors`, and an optional `training.json`. All are read
strictly, and a digest shows changed weights.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
import torch
from pydantic import Field, NonNegativeInt

from ....data.config import LABELS
from ....data.fields import first_of, one_of
from ....data.files import finish_replacing, read_dataclass, read_json, sha256_file, write_json
from ....data.manifest import TargetIdentity
from ....data.paths import MODEL_PREFIX

FORMAT_VERSION = 3
CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE = "config.json", "model.safetensors", "training.json"
MERGE_FILE = "merge.json"
"""File of a package, with the names of the training-free drafters that belong to it."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
"""Name of a repository on the Hub, maybe with a revision."""
FiniteNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFile:
    """Content of `config.json`: the drafter's kind and options, and its target."""

    format_version: int
    kind: str
    drafter: dict[str, Any]
    target: TargetIdentity
    weights_sha256: str
    """Digest of `model.safetensors`."""
    shape_sha256: str
    """Digest of all that decides which weights there are: see `shape_digest`."""


def read_drafter_config(directory: Path) -> DrafterFile:
    """Read a drafter's configuration, without its weights.

    Raises ValueError if the directory holds no drafter of this format, or if a key is missing or
    unknown.
    """
    finish_replacing(directory)
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no drafter: it has no {CONFIG_FILE}; give the `drafter/` folder of a finished training"
        )
    if "model_type" in (content := read_json(path)) and "kind" not in content:
        raise ValueError(
            f"{directory} holds a model of transformers ({content['model_type']}), not a drafter; to draft with it as it is, "
            f"name it {MODEL_PREFIX}DIR (or {MODEL_PREFIX}user/name on the Hub)"
        )
    config = read_dataclass(DrafterFile, path)
    if config.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {config.format_version}, and this version of outrider reads format {FORMAT_VERSION}; "
            "save the drafter again with this version, or read it with the one that wrote it"
        )
    return config


def require_fitting_target(directory: Path, trained_for: TargetIdentity, target: TargetIdentity) -> None:
    """Raise ValueError for a target of another shape or tokenizer.

    Tokenizers are compared only if both are known.
    """
    names = ["hidden_size", "vocab_size"]
    if trained_for.tokenizer_sha256 and target.tokenizer_sha256:
        names.append("tokenizer_sha256")
    problems = [
        f"{name}: {getattr(trained_for, name)} for the drafter, {getattr(target, name)} for this target"
        for name in names
        if getattr(trained_for, name) != getattr(target, name)
    ]
    if problems:
        raise ValueError(
            f"the drafter in {directory} was trained for {trained_for.name} and doesn't fit {target.name}: "
            f"{'; '.join(problems)}. Use it with its own target, or train one for this target from fresh weights"
        )


def record_weights(directory: Path) -> None:
    """Record the digest of the weights in `config.json`, after a change of them."""
    digest = sha256_file(directory / WEIGHTS_FILE)
    saved = replace(read_drafter_config(directory), format_version=FORMAT_VERSION, weights_sha256=digest)
    write_json(directory / CONFIG_FILE, asdict(saved))


def require_recorded_weights(directory: Path, saved: DrafterFile) -> None:
    """Raise ValueError if the weights aren't those whose digest `config.json`, read as `saved`, records."""
    if sha256_file(directory / WEIGHTS_FILE) != saved.weights_sha256:
        raise ValueError(
            f"{directory / WEIGHTS_FILE} was altered or damaged: its SHA-256 digest is not the one in {CONFIG_FILE}. Copy or "
            "download it again, or run the training's command again, which writes it from the last checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Content of `training.json`: the cost and result of a drafter's training.

    It is copied with the drafter, for tables; drafting doesn't need it.
    """

    steps: NonNegativeInt
    seconds: FiniteNumber
    """Over all resumes, up to the last record of the training."""
    positions_seen: NonNegativeInt
    tokens_seen: NonNegativeInt
    parameters: NonNegativeInt
    """Parameters of the drafter, without the target's."""
    tokens_per_step_estimate: FiniteNumber
    """From that record."""
    labels: Annotated[str, one_of(*LABELS)]
    """Kind of labels (see TrainConfig)."""
    hardware: str
    """Number of processes and their devices, at the end of the training."""
    chat_template: str | None = None
    """Digest of the target's chat template; null where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFile:
    """Content of `merge.json`: a package drafts with these, beside its trained drafter."""

    training_free: Annotated[list[str], Field(min_length=1)]


def read_training_facts(directory: Path) -> TrainingFacts | None:
    """Read the facts of a drafter's training; None if there is no file.

    Raises ValueError for a malformed file.
    """
    path = directory / TRAINING_FILE
    return read_dataclass(TrainingFacts, path) if path.is_file() else None


def write_training_facts(directory: Path, facts: TrainingFacts) -> None:
    """Write the facts of a drafter's training beside its weights."""
    write_json(directory / TRAINING_FILE, asdict(facts))


def tensor_names(path: Path, called: str = "") -> list[str]:
    """List the names of a file's tensors by its header.

    Raises ValueError if the file is missing or truncated. The message calls the file `called`, or
    by its path.
    """
    called = called or str(path)
    if not path.is_file():
        raise ValueError(f"{called} is missing; the drafter's export is incomplete: copy or export it again")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return list(file.keys())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{called} is damaged ({error}); copy or export the drafter again") from error


def read_weights(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the tensors of a file; check names, shapes and kinds of number by `expected`."""
    tensors = safetensors.torch.load_file(path)
    raise_weight_problems(path, shape_problems(tensors, expected) or infinite_problems(tensors))
    return tensors


def shape_problems(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    optional: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """List tensors that are missing, unknown, or of another shape or kind of number."""
    known = {**expected, **(optional or {})}
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unknown {name}" for name in sorted(tensors.keys() - known.keys())]
    for name in sorted(known.keys() & tensors.keys()):
        tensor, wanted = tensors[name], known[name]
        if tensor.shape != wanted.shape:
            problems.append(f"{name} is {tuple(tensor.shape)}, not {tuple(wanted.shape)}")
        elif _kind_of_number(tensor) != _kind_of_number(wanted):
            problems.append(f"{name} is of {tensor.dtype}, not {wanted.dtype}")
    return problems


def _kind_of_number(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.dtype is torch.bool


def infinite_problems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List the tensors that contain infinite numbers or NaN."""
    return [
        f"{name} holds numbers that aren't finite"
        for name, tensor in sorted(tensors.items())
        # 8-bit types have no isfinite.
        if tensor.is_floating_point() and not tensor.float().isfinite().all()
    ]


def raise_weight_problems(path: Path, problems: list[str]) -> None:
    """Raise ValueError with the first problems of a folder or its weights."""
    if problems:
        raise ValueError(f"{path} doesn't hold the drafter that its {CONFIG_FILE} describes: {first_of(problems, '; ')}")
