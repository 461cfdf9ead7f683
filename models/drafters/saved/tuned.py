"""How a drafter is best run on a machine, for each batch size: what `outrider tune` has found, in a file beside its weights."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt

from ....data.files import read_dataclass, sha256_file, write_json
from ...decoding.protocols import Drafter
from ...machine import device_name
from ...target.hf_target import HFTarget
from ..null import NullDrafter
from .folder import WEIGHTS_FILE
from .loading import load_drafter

logger = logging.getLogger(__name__)

TUNED_FILE = "tuned.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a speed depends on: a choice is good where all of it is the same."""

    device: str
    num_threads: int
    """torch's on a CPU; 0 elsewhere."""
    target: str
    """Digests of the target's weights and quantisation."""
    drafter: str
    """Digest of the drafter's weights."""
    dtype: str
    form: str
    """See `HFTarget.form`."""
    temperature: float
    """0 is greedy decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best way to decode batches of one size. Speeds are decoded tokens per second, of the whole batch."""

    setting: dict[str, Any] | None
    """Run-time options of the drafter; None where plain decoding is faster than any."""
    tokens_per_step: float
    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """All choices for a place, by batch size."""

    place: Place
    choices: Annotated[dict[PositiveInt, Choice], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedFile:
    """What the file holds: a machine each, say."""

    format_version: int
    entries: list[Tuned]


def describe_place(target: HFTarget, directory: Path, temperature: float = 0.0) -> Place:
    """Where this process decodes with this target and the drafter of this directory."""
    on_cpu = target.device.type == "cpu"
    return Place(
        device=device_name(target.device),
        num_threads=torch.get_num_threads() if on_cpu else 0,
        target=" ".join([target.identity.weights_sha256[:16], target.identity.quantization]).strip(),
        drafter=sha256_file(directory / WEIGHTS_FILE)[:16],
        dtype=str(target.dtype).removeprefix("torch."),
        form=target.form,
        temperature=temperature,
    )


def save_tuned(directory: Path, place: Place, choices: Mapping[int, Choice]) -> None:
    """Write the choices for a place beside the drafter, in the place of earlier ones for it and these batch sizes."""
    entries = read_tuned(directory)
    kept = [entry for entry in entries if entry.place != place]
    before = {size: choice for entry in entries if entry.place == place for size, choice in entry.choices.items()}
    entry = Tuned(place=place, choices=dict(sorted({**before, **choices}.items())))
    write_json(directory / TUNED_FILE, asdict(TunedFile(format_version=FORMAT_VERSION, entries=[*kept, entry])))


def tuned_choice(directory: Path, target: HFTarget, *, batch_size: int = 1, temperature: float = 0.0) -> Choice:
    """What was chosen here for batches of this size, or for the measured size that is nearest by their quotient.

    Raises ValueError, with the command to run, where nothing was tuned for this place.
    """
    place = describe_place(target, directory, temperature)
    entries = read_tuned(directory)
    for entry in entries:
        if entry.place == place:
            size = min(entry.choices, key=lambda size: abs(math.log(size / batch_size)))
            if size != batch_size:
                sizes = ", ".join(map(str, entry.choices))
                logger.info("%s is tuned for batches of %s, and for %d as for %d", directory, sizes, batch_size, size)
            return entry.choices[size]
    here = asdict(place)
    others = [
        ", ".join(f"{key} {value}" for key, value in asdict(entry.place).items() if value != here[key]) for entry in entries
    ]
    known = f"only for another place: {'; or '.join(others)}" if others else "for no place yet"
    raise ValueError(
        f"{directory} isn't tuned for {', '.join(f'{key} {value}' for key, value in here.items())} (it is {known}). Run "
        f"`outrider tune --drafter {directory} --target ... --temperature {temperature:g} --dtype {place.dtype}"
        f"{f' --threads {place.num_threads}' if place.num_threads else ''}` here first"
    )


def load_tuned(directory: Path, target: HFTarget, *, batch_size: int = 1, temperature: float = 0.0) -> Drafter[Any, Any]:
    """The drafter of a directory in the setting that was chosen here; one that drafts nothing where that is faster.

    Raises ValueError as `load_drafter` and `tuned_choice` do.
    """
    choice = tuned_choice(directory, target, batch_size=batch_size, temperature=temperature)
    if choice.setting is None:
        return NullDrafter()
    return load_drafter(directory, target, **choice.setting)


def read_tuned(directory: Path) -> list[Tuned]:
    """All that was tuned, wherever. Raises ValueError for a damaged file, or one of another version."""
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
