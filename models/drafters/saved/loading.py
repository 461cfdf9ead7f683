"""Saving and loading of trained drafters, in the folders that `folder` describes."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch

from ....data.files import atomic_write_bytes, write_json
from ....data.manifest import TargetIdentity
from ...target.hf_target import HFTarget
from ...target.linears import choose_linears
from ..base import TrainableDrafter
from ..registry import kind_of
from .build import drafter_of_weights, saved_spec
from .download import resolve_drafter
from .folder import CONFIG_FILE, FORMAT_VERSION, WEIGHTS_FILE, DrafterFile, read_drafter_config

logger = logging.getLogger(__name__)


def save_drafter(drafter: TrainableDrafter, directory: Path, target: TargetIdentity) -> None:
    """Write weights, then the config: a config therefore means that the weights are complete.

    Each file is written atomically.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    atomic_write_bytes(directory / WEIGHTS_FILE, safetensors.torch.save(tensors))
    config = DrafterFile(format_version=FORMAT_VERSION, kind=kind_of(drafter), drafter=asdict(drafter.config), target=target)
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
    directory: Path | str, target: HFTarget, *, revision: str | None = None, **runtime_options: Any
) -> TrainableDrafter:
    """Load a drafter for `target`, in its device and dtype, ready to draft.

    Its linear layers are computed as the target's are: see `choose_linears`.

    `directory` is a folder, or a repository on the Hub (`user/name`, `user/name@revision`).
    `runtime_options` change how it drafts, such as a ReDrafter's `beam_width`. Raises ValueError
    for a target of another shape or tokenizer, for options that would change the weights, and for
    missing, unknown or wrongly shaped tensors.
    """
    directory = resolve_drafter(directory, revision)
    saved = read_drafter_config(directory)
    require_fitting_target(directory, saved.target, target.identity)
    drafter = drafter_of_weights(saved_spec(saved, runtime_options), directory, target)
    # Cast parameters, not buffers: rotary frequencies in 16 bits would give wrong positions in long
    # texts.
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(target.dtype)
    drafter.to(device=target.device).eval().requires_grad_(False)
    if target.fast_linears:
        choose_linears(drafter)
    return drafter


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
