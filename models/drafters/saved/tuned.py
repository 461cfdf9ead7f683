"""The best settings of a drafter on a machine by batch size, measured by `outrider tune`."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt

from ....data.files import read_dataclass, write_json
from ....data.paths import SEPARATOR
from ...decoding.protocols import Drafter
from ...llm.hf_target import HFTarget
from ...llm.memory_plan import GIB
from ...machine import device_name
from ..null import NullDrafter
from .loading import load_drafter
from .parts import DrafterParts, parse_drafter_name

logger = logging.getLogger(__name__)

TUNED_FILE = "tuned.json"
FORMAT_VERSION = 1


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
class Choice:
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
    choices: Annotated[dict[PositiveInt, Choice], Field(min_length=1)]


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


def save_tuned(directory: Path, setup: DecodingSetup, choices: Mapping[int, Choice]) -> None:
    """Write the choices for a setup next to the drafter.

    They replace earlier choices of the same setup and batch sizes.
    """
    entries = read_tuned(directory)
    others = [entry for entry in entries if entry.place != setup]
    before = {size: choice for entry in entries if entry.place == setup for size, choice in entry.choices.items()}
    entry = Tuned(place=setup, choices=dict(sorted({**before, **choices}.items())))
    write_json(directory / TUNED_FILE, asdict(TunedFile(format_version=FORMAT_VERSION, entries=[*others, entry])))


def tuned_choice(
    drafter: Path | str | DrafterParts, target: HFTarget, *, batch_size: int = 1, temperature: float = 0.0
) -> Choice:
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
    if file.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {file.format_version}, and this version of outrider reads {FORMAT_VERSION}; delete it, and "
            "run `outrider tune` again"
        )
    return file.entries
