"""Drafters by their configuration: fresh, or with the weights of a trained one (see `START_FROM`)."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from ....data.files import parse_dataclass, sha256_file
from ....data.manifest import TargetIdentity
from ...target.hf_target import HFTarget
from ..base import TrainableDrafter
from ..registry import DRAFTERS
from .download import resolve_drafter
from .folder import CONFIG_FILE, WEIGHTS_FILE, DrafterFile, count_tensors, read_drafter_config, read_weights

logger = logging.getLogger(__name__)

START_FROM = "start_from"
"""An option of every drafter: the folder of a trained one, or its name on the Hub. Its kind, form and weights are what training
starts from; of the other options only those of drafting may differ. Its target may have been another one of the same shape: the
same model before it was fine-tuned or quantised, say."""


def build_drafter(config: Mapping[str, Any], target: HFTarget) -> TrainableDrafter:
    """A drafter for `target` to be trained, in float32 on the target's device: fresh, or with the weights that it starts from.

    `config["kind"]` picks it, the rest is its own config. Raises ValueError for an unknown kind or key, and where the drafter
    to start from doesn't fit the target.
    """
    kind, drafter_config = parse_drafter_config(config)
    if (folder := _start_folder(config)) is None:
        return DRAFTERS[kind].for_target(drafter_config, target).to(target.device)
    _require_same_shape(folder, read_drafter_config(folder).target, target.identity)
    return drafter_of_weights(kind, drafter_config, folder, target).to(target.device)


def drafter_of_weights(kind: str, config: Any, folder: Path, target: HFTarget) -> TrainableDrafter:
    """The drafter of this typed config, in float32 on the CPU, with the weights in `folder`.

    Raises ValueError where they are damaged, or of other names or shapes.
    """
    _require_counts(config, folder)
    # Trained weights need no beginning with the target's, which a quantised one couldn't give.
    unbegun = replace(config, init="random") if getattr(config, "init", None) == "target" else config
    tensors = read_weights(folder / WEIGHTS_FILE, shapes_of(kind, unbegun, target, folder / CONFIG_FILE))
    drafter = DRAFTERS[kind].for_target(unbegun, target)
    if unbegun is not config:
        drafter.config = config
    drafter.load_state_dict(tensors)
    drafter.check_weights()
    return drafter


def shapes_of(kind: str, config: Any, target: HFTarget, path: Path) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors on the meta device: a config of absurd sizes, read from `path`, must not take memory."""
    try:
        with torch.device("meta"):
            return DRAFTERS[kind].for_target(config, target).state_dict()
    except RuntimeError as error:
        raise ValueError(f"a drafter of the sizes in {path} can't be made ({error})") from error


def _require_counts(config: Any, folder: Path) -> None:
    """Raise ValueError for more layers or heads than the file has tensors: making them would take long before their shapes
    could be compared."""
    counts = {**asdict(config), **(getattr(config, "architecture", None) or {})}
    num_tensors = count_tensors(folder / WEIGHTS_FILE)
    for name in ("num_blocks", "num_heads", "num_hidden_layers", "num_layers"):
        if isinstance(counts.get(name), int) and counts[name] > num_tensors:
            raise ValueError(
                f"{folder / CONFIG_FILE} has {name} {counts[name]}, and {WEIGHTS_FILE} has {num_tensors} tensors in all; copy "
                "or export the drafter again"
            )


def parse_drafter_config(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The kind and its typed config. Raises ValueError for an unknown kind or key, before anything is loaded."""
    options = {name: value for name, value in config.items() if name != START_FROM}
    if (folder := _start_folder(config)) is not None:
        options = _options_of(folder, read_drafter_config(folder), options)
    kind = options.pop("kind", None)
    if kind not in DRAFTERS:
        raise ValueError(f"drafter.kind is {kind!r}; there are: {', '.join(sorted(DRAFTERS))}")
    config_class = DRAFTERS[kind].Config
    known = {field.name for field in fields(config_class)}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"the drafter {kind} has no option {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    # Types are checked as in a file: `drafter.rnn=off` would arrive as a text, and a text is true.
    return kind, parse_dataclass(config_class, options, Path(f"drafter {kind}"))


def parse_runtime_config(config: Mapping[str, Any], runtime_options: Mapping[str, Any]) -> tuple[str, Any]:
    """The kind and typed config of a drafter whose weights are there, with options that change how it drafts.

    Raises ValueError as `parse_drafter_config` does, and for options that would change the weights.
    """
    kind, parsed = parse_drafter_config(config)
    if forbidden := sorted(set(runtime_options) - set(parsed.RUNTIME_FIELDS)):
        raise ValueError(
            f"{', '.join(forbidden)} can't be changed when a {kind} is loaded; {', '.join(sorted(parsed.RUNTIME_FIELDS))} can"
        )
    return parse_drafter_config({**config, **runtime_options})  # their types, too


def require_horizon(config: Mapping[str, Any], horizon: int) -> None:
    """Raise ValueError where labels of `horizon` tokens are too short to train this drafter."""
    kind, drafter_config = parse_drafter_config(config)
    DRAFTERS[kind].require_horizon(drafter_config, horizon)


def starting_weights(config: Mapping[str, Any]) -> str | None:
    """Digest of the weights that training starts from, where those are neither fresh nor the target's."""
    kind, drafter_config = parse_drafter_config(config)
    if (folder := _start_folder(config)) is not None:
        return sha256_file(folder / WEIGHTS_FILE)
    return DRAFTERS[kind].starting_weights(drafter_config)


def _start_folder(config: Mapping[str, Any]) -> Path | None:
    """The folder of the drafter to start from, if there is to be one; a download where it is one of the Hub's."""
    folder = config.get(START_FROM)
    if folder is not None and not isinstance(folder, str | Path):
        raise ValueError(
            f"drafter.{START_FROM} is {folder!r}; give the `drafter/` folder of a finished training, "
            "its name on the Hub, or null"
        )
    return None if folder is None else resolve_drafter(folder)


def _options_of(folder: Path, saved: DrafterFile, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a trained drafter is, with `options` that change how it drafts. Raises ValueError for those that change its form."""
    form: dict[str, Any] = {"kind": saved.kind, **saved.drafter}
    may_change = DRAFTERS[saved.kind].Config.RUNTIME_FIELDS if saved.kind in DRAFTERS else frozenset()
    changed = [
        f"{name} is {value!r} and there {form[name]!r}"
        for name, value in options.items()
        if name in form and name not in may_change and value != form[name]
    ]
    if changed:
        raise ValueError(
            f"drafter.{START_FROM} is {folder}, and the options describe another drafter: {'; '.join(changed)}. Leave those "
            f"options out (drafter=trained has none), or drop drafter.{START_FROM} to train from fresh weights"
        )
    return {**form, **options}


def _require_same_shape(folder: Path, trained_for: TargetIdentity, target: TargetIdentity) -> None:
    """Raise ValueError where a drafter's weights can't serve this target; warn where its tokens may mean something else."""
    problems = [
        f"{name} {getattr(trained_for, name)} there, {getattr(target, name)} here"
        for name in ("hidden_size", "vocab_size")
        if getattr(trained_for, name) != getattr(target, name)
    ]
    if problems:
        raise ValueError(
            f"the drafter in {folder} was trained for {trained_for.name}, and {target.name} is of another shape: "
            f"{'; '.join(problems)}. Its weights can't be adapted to that; drop drafter.{START_FROM} to train from fresh ones, "
            "or start from a drafter of a target of this width and vocabulary"
        )
    if trained_for.tokenizer_sha256 != target.tokenizer_sha256:
        logger.warning(
            "the drafter in %s was trained with another tokenizer (that of %s): unless only a few special tokens differ, the "
            "same ids mean other texts, and fresh weights are the better start",
            folder,
            trained_for.name,
        )
