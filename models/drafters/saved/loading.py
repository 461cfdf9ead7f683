"""Saving and loading of trained drafters, in the folders that `folder` describes."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch

from ....data.files import atomic_write_bytes, write_json
from ....data.manifest import TargetIdentity
from ...llm.hf_target import HFTarget
from ...llm.linears import choose_linears
from ..base import TrainableDrafter
from ..calibration import read_prior
from ..merged import MergedDrafter
from ..registry import kind_of, make_training_free
from ..training_free import TrainingFreeDrafter
from .build import drafter_of_weights, saved_spec
from .folder import CONFIG_FILE, FORMAT_VERSION, WEIGHTS_FILE, DrafterFile, read_drafter_config
from .model_folder import load_model
from .parts import MERGE, DrafterParts, Part, parse_drafter_name

logger = logging.getLogger(__name__)

LoadedDrafter = TrainableDrafter | TrainingFreeDrafter | MergedDrafter
"""A drafter that decodes beside a target."""


def save_drafter(drafter: TrainableDrafter, directory: Path, target: TargetIdentity) -> None:
    """Write weights, then the config: a config therefore means that the weights are complete.

    Each file is written atomically.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    data = safetensors.torch.save(tensors)
    atomic_write_bytes(directory / WEIGHTS_FILE, data)
    config = DrafterFile(
        format_version=FORMAT_VERSION,
        kind=kind_of(drafter),
        drafter=asdict(drafter.config),
        target=target,
        weights_sha256=hashlib.sha256(data).hexdigest(),
    )
    write_json(directory / CONFIG_FILE, asdict(config))


def change_options(directory: Path, options: Mapping[str, Any]) -> bool:
    """Change how a saved drafter drafts by default. Returns False if nothing changes."""
    saved = read_drafter_config(directory)
    drafter = {**saved.drafter, **options}
    if drafter == saved.drafter:
        return False
    write_json(directory / CONFIG_FILE, asdict(replace(saved, drafter=drafter)))
    logger.info("%s now drafts with %s", directory, ", ".join(f"{name} {value}" for name, value in sorted(options.items())))
    return True


def load_drafter(
    name: str | Path | DrafterParts, target: HFTarget, *, revision: str | None = None, **runtime_options: Any
) -> LoadedDrafter:
    """Load a drafter for `target`, in its device and dtype, ready to draft.

    `name` is a folder, a repository on the Hub (`user/name`, `user/name@revision`), a training-free
    drafter (`suffix`), a model of transformers that drafts as it is (`draft_model:DIR`), or several
    of these, joined by `+`, whose trees are merged.
    `runtime_options` change how it drafts, such as a ReDrafter's `beam_width` (for the parts of a
    merge see `DrafterParts.split_options`). A `pace` makes a merge of a single drafter that has no
    option of that name. Raises ValueError for an unknown name, for a target of another shape or
    tokenizer, for options that would change the weights, for missing, unknown or wrongly shaped
    tensors, and for weights with another digest than the recorded one.
    """
    # 1. Check all options, which is fast.
    parts = parse_drafter_name(name, revision)
    configs = parts.configs(runtime_options)
    options = parts.split_options(runtime_options)
    # 2. Load the parts.
    sources = {part.name: load_part(part, target, options[part.name]) for part in parts.parts}
    if MERGE not in configs:
        return sources[parts.parts[0].name]
    # 3. Merge them, with the calibration that was saved beside the first trained part.
    prior = read_prior(parts.folders[0], target.identity) if parts.folders else None
    return MergedDrafter(sources, configs[MERGE], prior, few_sizes=target.has_fixed_shapes)


def load_part(part: Part, target: HFTarget, runtime_options: Mapping[str, Any]) -> TrainableDrafter | TrainingFreeDrafter:
    """Load a part of a drafter. Raises ValueError as `load_drafter` does.

    Linear layers of weights are computed as the target's are: see `choose_linears`.
    """
    if part.folder is None:
        return make_training_free(part.name, runtime_options, target)
    if part.is_model:
        return _beside(load_model(part.folder, part.spec(runtime_options).config, target), target)
    return load_trained(part.folder, target, **runtime_options)


def load_trained(directory: Path, target: HFTarget, **runtime_options: Any) -> TrainableDrafter:
    """Load the trained drafter of a folder. Raises ValueError as `load_drafter` does."""
    saved = read_drafter_config(directory)
    require_fitting_target(directory, saved.target, target.identity)
    drafter = _beside(drafter_of_weights(saved_spec(saved, runtime_options), directory, target), target)
    # A growing tree is calibrated as merged trees are.
    if getattr(drafter.config, "pace", "fixed") != "fixed" and (prior := read_prior(directory, target.identity)):
        drafter.use_prior(prior)
    return drafter


def _beside(drafter: TrainableDrafter, target: HFTarget) -> TrainableDrafter:
    """Return a drafter in its target's type and device, frozen."""
    # Cast parameters, not buffers: rotary frequencies in 16 bits would give wrong positions in long
    # texts.
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(target.dtype)
    drafter.to(device=target.device).eval().requires_grad_(False)
    if target.fast_linears:
        choose_linears(drafter)
    return drafter


def trained_parts(drafter: LoadedDrafter) -> list[TrainableDrafter]:
    """Return the trained drafters of a loaded drafter."""
    sources = drafter.sources.values() if isinstance(drafter, MergedDrafter) else [drafter]
    return [source for source in sources if isinstance(source, TrainableDrafter)]


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
            f"{'; '.join(problems)}. Evaluate it with its own target, or train one for this target"
        )
