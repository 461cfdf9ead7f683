"""Formats that drafters are exported to.

A new format is a module, a row here, and a page in `docs/how-to/engines`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..drafters.base import TrainableDrafter
from ..drafters.fused_layers import default_feature_layers
from ..drafters.registry import kind_of
from ..drafters.saved.build import drafter_of_weights, saved_spec
from ..drafters.saved.folder import read_drafter_config, require_fitting_target
from ..llm.hf_target import HFTarget
from . import apple, dspark, eagle1, eagle3, medusa, mtp, transformers_model
from .folders import WEIGHT_FILES, open_folder
from .formats import Format, read_folder, read_note, take_dtype, write_folder

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        dspark.SPECULATORS,
        eagle3.SPECULATORS,
        eagle3.FORMAT,
        dspark.DEEPSPEC,
        apple.FORMAT,
        medusa.REFERENCE,
        medusa.TENSORRT,
        eagle1.VLLM,
        eagle1.SGLANG,
        mtp.FORMAT,
        transformers_model.FORMAT,
    )
}
"""All formats, in the order in which `format_of` checks a folder: formats with a key of their own
come first."""
ENGINES: dict[str, dict[str, str]] = {
    "vllm": {"eagle3": "eagle3", "block": "dspark", "eagle": "eagle1-vllm", "draft_model": "transformers", "mtp": "mtp"},
    "sglang": {"eagle3": "eagle3", "block": "dspark", "eagle": "eagle1-sglang", "draft_model": "transformers", "mtp": "mtp"},
}
"""Format that a serving engine reads, by engine and kind of drafter."""


def format_of(directory: Path) -> Format:
    """Detect the format of a folder by its files.

    If two formats look alike, the first one is returned. Raises ValueError for a folder in no known
    format.
    """
    note = read_note(directory)
    if note is not None and note.format in FORMATS:
        return FORMATS[note.format]
    names = dict.fromkeys(name for format in FORMATS.values() for name in format.weight_files)
    weight_files = tuple(sorted(names, key=lambda name: name in WEIGHT_FILES))  # file names of one format only come first
    folder = open_folder(directory, weight_files)
    for format in FORMATS.values():
        if format.is_of(folder):
            return format
    raise ValueError(
        f"{directory} holds tensors such as {', '.join(sorted(folder.shapes)[:3])}, which match no known format; give "
        f"its format, one of {', '.join(FORMATS)}"
    )


def find_format(name: str) -> Format:
    """Look up a format by its name.

    Raises ValueError for an unknown name.
    """
    if name not in FORMATS:
        formats = ", ".join(f"{format.name} ({format.kind})" for format in FORMATS.values())
        raise ValueError(f"the format is {name!r}; choose one of (each for a kind of drafter): {formats}")
    return FORMATS[name]


def refusals_after_training(fresh: TrainableDrafter, target: HFTarget) -> dict[str, str | None]:
    """Check which formats of the drafter's kind could hold such a drafter after training.

    The result has the reason for each format that can't, and None for each that can. `fresh` is an
    untrained drafter, which can't be used afterwards: the function chooses some vocabulary, and
    sets all weights to 1, since training leaves no weight at its initial zero.
    """
    if fresh.wants_token_counts:
        fresh.choose_draft_vocabulary(torch.arange(target.vocab_size))
    for parameter in fresh.parameters():
        parameter.data = torch.ones_like(parameter.data)  # a new tensor: the old one may belong to the target
    return _refusals(fresh, target)


def _refusals(drafter: TrainableDrafter, target: HFTarget) -> dict[str, str | None]:
    refusals: dict[str, str | None] = {}
    for name, format in FORMATS.items():
        if format.kind != kind_of(drafter):
            continue
        try:
            format.write(drafter, target)
            refusals[name] = None
        except ValueError as error:
            refusals[name] = str(error)
    return refusals


def programs_for(directory: Path, target: HFTarget) -> frozenset[str]:
    """Return the engines and formats for which the drafter in a directory can be exported."""
    saved = read_drafter_config(directory)
    formats = {name for name, reason in _refusals(stored_drafter(directory, target), target).items() if reason is None}
    layers = saved.drafter.get("feature_layers")
    return frozenset(formats | {name for name in ENGINES if format_for(name, saved.kind, layers) in formats})


def engine_format(engine: str, directory: Path) -> str:
    """Choose the format in which an engine of ENGINES reads the drafter in a directory.

    Raises ValueError for a kind that the engine doesn't serve, with the kinds that it serves and
    the formats for this kind.
    """
    saved = read_drafter_config(directory)
    name = format_for(engine, saved.kind, saved.drafter.get("feature_layers"))
    if name is None:
        others = ", ".join(name for name, format in FORMATS.items() if format.kind == saved.kind) or "no format"
        raise ValueError(
            f"to is {engine}, which doesn't serve drafters of the kind {saved.kind}, only {', '.join(ENGINES[engine])}. "
            f"{directory} can be written as {others}"
        )
    return name


def format_for(name: str, kind: str, feature_layers: object = None) -> str | None:
    """Return the format for drafters of a kind; None if `name`, of a format or of an engine, takes none of them.

    An engine's name stands for the format that it reads.
    """
    if name not in ENGINES:
        return name if FORMATS[name].kind == kind else None
    if name == "vllm" and kind == "eagle3" and not _are_usual(feature_layers):
        return "speculators"  # `eagle3` doesn't support other layers than the default
    return ENGINES[name].get(kind)


def formats_for(names: Iterable[str], kind: str, feature_layers: object) -> list[str]:
    """Return the distinct formats for a drafter of a kind (see `format_for`)."""
    return list(dict.fromkeys(filter(None, (format_for(name, kind, feature_layers) for name in names))))


def _are_usual(feature_layers: object) -> bool:
    """Return whether an EAGLE-3 reads the default layers of a target, whose last but two is the last of them."""
    if feature_layers is None:
        return True
    return isinstance(feature_layers, list) and feature_layers == default_feature_layers(max(feature_layers, default=0) + 3)


def stored_drafter(directory: Path, target: HFTarget) -> TrainableDrafter:
    """Load one of our drafters on the CPU, in the type of its stored numbers.

    The target's type has no influence. Raises ValueError as `load_drafter` does.
    """
    saved = read_drafter_config(directory)
    require_fitting_target(directory, saved.target, target.identity)
    drafter = drafter_of_weights(saved_spec(saved), directory, saved, target).cpu()
    take_dtype(drafter, open_folder(directory).shapes)
    return drafter.eval().requires_grad_(False)


def export_drafter(directory: Path, target: HFTarget, name: str, output: Path, dtype: torch.dtype | None = None) -> None:
    """Write the drafter in `directory` to the folder `output` in the format `name`.

    See `write_folder`.
    """
    write_folder(find_format(name), stored_drafter(Path(directory), target), Path(output), target, dtype)


def import_drafter(
    directory: Path, target: HFTarget, *, name: str | None = None, options: Mapping[str, Any] | None = None
) -> TrainableDrafter:
    """Import a drafter from another program's folder in the format `name`.

    Without a name the format is detected.
    """
    directory = Path(directory)
    return read_folder(find_format(name) if name else format_of(directory), directory, target, options)
