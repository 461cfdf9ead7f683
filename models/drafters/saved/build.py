"""Building of drafters from a specification, with fresh or trained weights."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ....data.files import sha256_file, sha256_json
from ....data.manifest import TargetIdentity
from ...bounded_build import MAX_PARTS, bounded_build, each_part, require_possible_numbers
from ...llm.hf_target import HFTarget
from ...machine import free_memory
from ..base import TrainableDrafter
from ..options import FORMER_RUNTIME_FIELDS, DraftModelConfig, current_options
from ..registry import DRAFTERS, DrafterSpec
from ..shared_options import START_FROM
from ..small_models import smaller_architecture, weights_digest_at
from .download import resolve_drafter
from .folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    DrafterFile,
    read_drafter_config,
    read_weights,
    require_fitting_target,
    require_recorded_weights,
    tensor_names,
)

logger = logging.getLogger(__name__)

TRAINING_BYTES = 8
"""Least bytes for each parameter of a training: weights and gradients in float32. The optimizer's
state may be divided among processes."""


def parse_drafter(options: Mapping[str, Any]) -> DrafterSpec:
    """Return the drafter that options describe: `kind`, `start_from`, and the kind's options.

    Downloads the drafter to start from if it is on the Hub. Raises ValueError for an unknown kind,
    option or value, and if there is no drafter to start from.
    """
    folder = _start_folder(options)
    form = {name: value for name, value in options.items() if name != START_FROM}
    if folder is not None:
        form = _options_of(folder, read_drafter_config(folder), form)
    return DrafterSpec.of(form.pop("kind", None), form, folder)


def saved_spec(saved: DrafterFile, options: Mapping[str, Any] | None = None) -> DrafterSpec:
    """Return a folder's drafter, with drafting options changed as in `with_options`."""
    return DrafterSpec.of(saved.kind, current_options(saved.kind, saved.drafter)).with_options(options or {})


def build_drafter(spec: DrafterSpec, target: HFTarget) -> TrainableDrafter:
    """Build a drafter for training, in float32 on the target's device.

    Its weights are fresh, or those that it starts from. Raises ValueError if the drafter to start
    from doesn't fit the target, and warns if only the tokenizer differs.
    """
    folder = spec.start_from
    if folder is None:
        return DRAFTERS[spec.kind].for_target(spec.config, target).to(target.device)
    saved = read_drafter_config(folder)
    require_fitting_target(folder, replace(saved.target, tokenizer_sha256=""), target.identity)
    if saved.target.tokenizer_sha256 != target.identity.tokenizer_sha256:
        logger.warning(
            "the drafter in %s was trained with another tokenizer (that of %s): unless only a few special tokens differ, the "
            "same ids stand for other texts, and fresh weights are the better start",
            folder,
            saved.target.name,
        )
    return drafter_of_weights(spec, folder, saved, target).to(target.device)


def require_memory(spec: DrafterSpec, target: HFTarget) -> None:
    """Raise ValueError if the free memory can't hold the training of a drafter with fresh weights.

    The drafter is built on the meta device, so absurd sizes take no memory, and absurd numbers of
    layers little time.
    """
    options = asdict(spec.config)
    if spec.start_from is not None or options.get("path") is not None:
        return  # its files are there
    config = replace(spec.config, **{name: "random" for name in ("init", "head_init") if name in options})
    if isinstance(config, DraftModelConfig) and config.architecture is None:
        config = replace(config, architecture=smaller_architecture(config, target))
    num_parts = num_parameters = 0
    free = free_memory(target.device)

    def count_part(module: Any, name: str, part: Any) -> None:
        nonlocal num_parts, num_parameters
        num_parts += 1
        num_parameters += part.numel() if isinstance(part, torch.nn.Parameter) else 0
        needed = TRAINING_BYTES * num_parameters
        if num_parts > MAX_PARTS or (free is not None and needed > free):
            counts = {name: value for name, value in options.items() if type(value) is int}
            largest = max(counts, key=lambda name: counts[name], default="kind")
            raise ValueError(
                f"the drafter has more than {num_parameters:,} parameters in {num_parts:,} parts, whose training takes more "
                f"than {needed / 1e9:,.1f} GB ({TRAINING_BYTES} bytes each), and {target.device} has "
                f"{'an unknown amount of' if free is None else f'{free / 1e9:,.1f} GB of'} free memory; its largest option is "
                f"drafter.{largest}={options.get(largest, spec.kind)}: lower it, or another one"
            )

    with each_part(count_part), torch.device("meta"):
        DRAFTERS[spec.kind].for_target(config, target)


def drafter_of_weights(spec: DrafterSpec, folder: Path, saved: DrafterFile, target: HFTarget) -> TrainableDrafter:
    """Build a drafter of this configuration with a folder's weights, in float32 on the CPU.

    `saved` is the content of its `config.json`. Raises ValueError if the weights are damaged, or have
    other names, shapes or values than were saved.
    """
    kind, config = spec.kind, spec.config
    # Don't copy the target's weights first: the trained weights replace them, and a quantised
    # target couldn't provide them.
    without_init = replace(config, init="random") if getattr(config, "init", None) == "target" else config
    num_tensors = len(tensor_names(folder / WEIGHTS_FILE))
    shapes = shapes_of(kind, without_init, target, folder / CONFIG_FILE, num_tensors)
    tensors = read_weights(folder / WEIGHTS_FILE, shapes)
    drafter = DRAFTERS[kind].for_target(without_init, target)
    if without_init is not config:
        drafter.config = config
    drafter.load_state_dict(tensors)
    drafter.check_weights()
    require_unaltered(folder, saved)  # last: the other checks describe damage better
    return drafter


def shape_digest(kind: str, options: Mapping[str, Any], target: TargetIdentity) -> str:
    """Return a digest of a drafter's kind, its target, and all options but those of drafting."""
    runtime = DRAFTERS[kind].Config.RUNTIME_FIELDS | FORMER_RUNTIME_FIELDS
    shape = {name: value for name, value in options.items() if name not in runtime}
    return sha256_json(json.loads(json.dumps([kind, shape, target.facts()])))  # keys as texts, as in a file


def require_unaltered(folder: Path, saved: DrafterFile) -> None:
    """Raise ValueError if a drafter's weights and its `config.json`, read as `saved`, weren't saved together.

    Needs no target. Options of drafting may have changed, to values that the kind allows.
    """
    saved_spec(saved)
    if shape_digest(saved.kind, saved.drafter, saved.target) != saved.shape_sha256:
        raise ValueError(
            f"{folder / CONFIG_FILE} was altered: its kind, its target, or an option that decides the shape of the weights is "
            "not the one that was saved. Copy or download it again, or run the training's command again, which writes it from "
            "the last checkpoint"
        )
    require_recorded_weights(folder, saved)


def shapes_of(kind: str, config: Any, target: HFTarget, path: Path, num_tensors: int) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors on the meta device.

    So a configuration of absurd sizes takes no memory, and one of absurd counts no time: see
    `bounded_build`. The config was read from `path`, which errors name. The drafter's weights have
    `num_tensors` tensors.
    """
    require_possible_numbers(asdict(config), path)
    with bounded_build(path, num_tensors), torch.device("meta"):
        return DRAFTERS[kind].for_target(config, target).state_dict()


def require_horizon(spec: DrafterSpec, horizon: int) -> None:
    """Raise ValueError if labels of `horizon` tokens are too short to train this drafter."""
    DRAFTERS[spec.kind].require_horizon(spec.config, horizon)


def describe_untrained_depths(spec: DrafterSpec, horizon: int) -> str | None:
    """Describe a search that is deeper than `horizon` labelled tokens train; else None."""
    option, trained = DRAFTERS[spec.kind].DEPTH_OPTION, horizon - 1
    if option is None or (depth := getattr(spec.config, option) or 0) <= trained:
        return None
    return (
        f"drafter.{option} is {depth}, and labels of distill.horizon {horizon} tokens train only {trained} depths, because the "
        f"first token is the target's own choice; set drafter.{option}={trained}, or distill.horizon={depth + 1}"
    )


def starting_weights(spec: DrafterSpec) -> str | None:
    """Return the digest of the initial weights, unless they are fresh or the target's."""
    if spec.start_from is not None:
        return sha256_file(spec.start_from / WEIGHTS_FILE)
    config = spec.config
    if isinstance(config, DraftModelConfig) and config.path is not None and config.architecture is None:
        return weights_digest_at(config.path)
    return None


def _start_folder(config: Mapping[str, Any]) -> Path | None:
    """Return the folder of the drafter to start from, or None; downloads it from the Hub."""
    folder = config.get(START_FROM)
    if folder is not None and not isinstance(folder, str | Path):
        raise ValueError(
            f"drafter.{START_FROM} is {folder!r}; give the `drafter/` folder of a finished training, "
            "its name on the Hub, or null"
        )
    return None if folder is None else resolve_drafter(folder)


def _options_of(folder: Path, saved: DrafterFile, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trained drafter's options, updated by `options` that change how it drafts.

    Raises ValueError for options that would change its shape.
    """
    form: dict[str, Any] = {"kind": saved.kind, **current_options(saved.kind, saved.drafter)}
    may_change = DRAFTERS[saved.kind].Config.RUNTIME_FIELDS if saved.kind in DRAFTERS else frozenset()
    changed = [
        f"{name} is {value!r}, and {form[name]!r} in that drafter"
        for name, value in options.items()
        if name in form and name not in may_change and value != form[name]
    ]
    if changed:
        raise ValueError(
            f"drafter.{START_FROM} is {folder}, and the options describe another drafter: {'; '.join(changed)}. Leave those "
            f"options out (drafter=trained has none), or leave drafter.{START_FROM} out to train from fresh weights"
        )
    return {**form, **options}
