"""Saving and loading of trained drafters, and of the settings that `outrider tune` chose."""

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from pydantic import Field, PositiveInt

from ....data.files import atomic_write_bytes, read_dataclass, write_json
from ....data.manifest import TargetIdentity
from ....data.paths import SEPARATOR
from ...decoding.loop import NullDrafter
from ...decoding.protocols import Drafter
from ...llm.hf_target import HFTarget
from ...llm.memory_plan import GIB
from ...machine import device_name
from ..base import TrainableDrafter
from ..merged import MergedDrafter
from ..registry import TRAINING_FREE, DrafterSpec, kind_of
from ..training_free import TrainingFreeDrafter
from .build import drafter_of_weights, shape_digest
from .folder import (
    CONFIG_FILE,
    FORMAT_VERSION,
    WEIGHTS_FILE,
    DrafterFile,
    read_drafter_config,
    require_fitting_target,
)
from .model_folder import load_model
from .parts import MERGE, DrafterPart, DrafterParts, parse_drafter_name

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
    kind, options = kind_of(drafter), asdict(drafter.config)
    config = DrafterFile(
        format_version=FORMAT_VERSION,
        kind=kind,
        drafter=options,
        target=target,
        weights_sha256=hashlib.sha256(data).hexdigest(),
        shape_sha256=shape_digest(kind, options, target),
    )
    write_json(directory / CONFIG_FILE, asdict(config))


def change_options(directory: Path, config: Any) -> bool:
    """Change how a saved drafter drafts by default to how `config` drafts. Returns False if nothing changes."""
    saved = read_drafter_config(directory)
    options = {name: getattr(config, name) for name in config.RUNTIME_FIELDS}
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
    merge see `DrafterParts.split_options`). A `pace` makes a merge of a single drafter.

    Raises ValueError for an unknown name, for a target of another shape or tokenizer, for options
    that would change the weights, for missing, unknown or wrongly shaped tensors, and for weights
    with another digest than the recorded one.
    """
    # 1. Check all options, which is fast.
    parts = parse_drafter_name(name, revision)
    configs = parts.configs(runtime_options)
    # 2. Load the parts.
    sources = {part.name: load_part(part, target, configs[part.name]) for part in parts.parts}
    if MERGE not in configs:
        return sources[parts.parts[0].name]
    return MergedDrafter(sources, configs[MERGE], few_sizes=target.has_fixed_shapes)


def load_part(part: DrafterPart, target: HFTarget, config: Any) -> TrainableDrafter | TrainingFreeDrafter:
    """Load a part of a drafter. Raises ValueError as `load_drafter` does, but for options."""
    if part.folder is None:
        return TRAINING_FREE[part.name].for_target(config, target)
    if part.is_model:
        return _beside(load_model(part.folder, config, target), target)
    saved = read_drafter_config(part.folder)
    require_fitting_target(part.folder, saved.target, target.identity)
    return _beside(drafter_of_weights(DrafterSpec(kind=saved.kind, config=config), part.folder, saved, target), target)


def _beside(drafter: TrainableDrafter, target: HFTarget) -> TrainableDrafter:
    """Return a drafter in its target's type and device, frozen."""
    return drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def trained_parts(drafter: LoadedDrafter) -> list[TrainableDrafter]:
    """Return the trained drafters of a loaded drafter."""
    sources = drafter.sources.values() if isinstance(drafter, MergedDrafter) else [drafter]
    return [source for source in sources if isinstance(source, TrainableDrafter)]


def common_context_length(target: HFTarget, *drafters: LoadedDrafter) -> int:
    """Return how many tokens of prompt and answer the target and all drafters can read."""
    limits = [drafter.context_length for drafter in drafters if drafter.context_length is not None]
    return min([target.context_length, *limits])


# --- the best settings of a drafter on a machine by batch size, measured by `outrider tune`


TUNED_FILE = "tuned.json"
TUNED_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSetup:
    """Everything that a speed depends on. A choice is valid only for an equal setup."""

    device: str
    num_threads: int
    """torch's number of threads on a CPU; 0 elsewhere."""
    target: str
    """Digests of the target's weights and quantisation."""
    drafter: str
    """Digest of the drafter's weights; for a merge also the names of its training-free parts."""
    dtype: str
    form: str
    """See `HFTarget.form`; with a memory budget also its GiB."""
    temperature: float
    """0 is greedy decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedChoice:
    """The fastest way to decode batches of one size.

    Speeds are in tokens per second, of the whole batch."""

    setting: dict[str, Any] | None
    """Runtime options of the drafter; None if plain decoding is faster than all."""
    tokens_per_step: float
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """All choices for one setup, by batch size."""

    place: DecodingSetup
    choices: Annotated[dict[PositiveInt, TunedChoice], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedFile:
    """Content of the file: one entry per setup."""

    format_version: int
    entries: list[Tuned]


def describe_setup(target: HFTarget, drafter: Path | str | DrafterParts, temperature: float = 0.0) -> DecodingSetup:
    """Describe how this process decodes with this target and drafter."""
    on_cpu = target.device.type == "cpu"
    return DecodingSetup(
        device=device_name(target.device),
        num_threads=torch.get_num_threads() if on_cpu else 0,
        target=" ".join([target.identity.weights_sha256[:16], target.identity.quantization]).strip(),
        drafter=SEPARATOR.join(part.weights[:16] or part.name for part in parse_drafter_name(drafter).parts),
        dtype=str(target.dtype).removeprefix("torch."),
        form=target.form if target.stream is None else f"{target.form} {target.stream.plan.budget_bytes / GIB:g} GiB",
        temperature=temperature,
    )


def tuned_folder(drafter: Path | str | DrafterParts) -> Path:
    """Return the folder of a drafter's tuned settings: that of its first trained part.

    Raises ValueError for a drafter without a folder.
    """
    parts = parse_drafter_name(drafter)
    if not parts.folders:
        raise ValueError(
            f"the drafter {parts.name} has no folder that outrider writes to, and tuned settings are kept in one; `outrider "
            "tune --no-write` prints them, and eval.settings uses them"
        )
    return parts.folders[0]


def save_tuned(directory: Path, setup: DecodingSetup, choices: Mapping[int, TunedChoice]) -> None:
    """Write the choices for a setup next to the drafter.

    They replace earlier choices of the same setup and batch sizes.
    """
    entries = read_tuned(directory)
    others = [entry for entry in entries if entry.place != setup]
    before = {size: choice for entry in entries if entry.place == setup for size, choice in entry.choices.items()}
    entry = Tuned(place=setup, choices=dict(sorted({**before, **choices}.items())))
    write_json(directory / TUNED_FILE, asdict(TunedFile(format_version=TUNED_VERSION, entries=[*others, entry])))


def tuned_choice(
    drafter: Path | str | DrafterParts, target: HFTarget, *, batch_size: int = 1, temperature: float = 0.0
) -> TunedChoice:
    """Return the choice for this setup and batch size, or for the nearest measured batch size.

    The nearest size has the smallest ratio to `batch_size`. Raises ValueError, with the command to
    run, if nothing was tuned for this setup.
    """
    # 1. The choice for the nearest batch size of this setup.
    parts = parse_drafter_name(drafter)
    setup = describe_setup(target, parts, temperature)
    entries = read_tuned(tuned_folder(parts))
    for entry in entries:
        if entry.place == setup:
            size = min(entry.choices, key=lambda size: abs(math.log(size / batch_size)))
            if size != batch_size:
                sizes = ", ".join(map(str, entry.choices))
                logger.info(
                    "%s is tuned for batches of %s; batches of %d use the choice for %d", parts.name, sizes, batch_size, size
                )
            return entry.choices[size]
    # 2. Without one: the setups that were tuned, and how they differ.
    options = asdict(setup)
    others = [
        ", ".join(f"{key} {value}" for key, value in asdict(entry.place).items() if value != options[key]) for entry in entries
    ]
    known = f"only for another setup: {'; or '.join(others)}" if others else "for no setup yet"
    raise ValueError(
        f"{parts.name} isn't tuned for {', '.join(f'{key} {value}' for key, value in options.items())} (it is tuned {known}). "
        f"Run `outrider tune --drafter {parts.name} --target ... --temperature {temperature:g} --dtype {setup.dtype}"
        f"{f' --num-threads {setup.num_threads}' if setup.num_threads else ''}` here first"
    )


def load_tuned(
    drafter: Path | str | DrafterParts, target: HFTarget, *, batch_size: int = 1, temperature: float = 0.0
) -> Drafter[Any, Any]:
    """Load a drafter with the setting that was chosen for this setup.

    Returns a `NullDrafter` if plain decoding is faster. Raises ValueError like `load_drafter` and
    `tuned_choice`.
    """
    parts = parse_drafter_name(drafter)
    choice = tuned_choice(parts, target, batch_size=batch_size, temperature=temperature)
    if choice.setting is None:
        return NullDrafter()
    return load_drafter(parts, target, **choice.setting)


def read_tuned(directory: Path) -> list[Tuned]:
    """Read all tuned setups. Raises ValueError for a damaged file or another format version."""
    path = directory / TUNED_FILE
    if not path.is_file():
        return []
    file = read_dataclass(TunedFile, path)
    if file.format_version != TUNED_VERSION:
        raise ValueError(
            f"{path} has format {file.format_version}, and this version of outrider reads {TUNED_VERSION}; delete it, and "
            "run `outrider tune` again"
        )
    return file.entries
