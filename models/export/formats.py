"""Definition of an export format.

A format describes how a drafter is written for another program, and how its folder is read. An
export also has `outrider.json`, which other programs ignore. It holds what the format doesn't
support and drafting elsewhere doesn't need, such as the options of the training. So an export can
be imported as exactly the same drafter. Without this file, as in published folders, these options
get their defaults.
"""

import io
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ...data.files import LEFTOVER, atomic_write_bytes, read_dataclass, replacing_directory, write_json
from ...data.manifest import TargetIdentity
from ..drafters.base import TrainableDrafter
from ..drafters.options import current_options
from ..drafters.registry import DRAFTERS, DrafterSpec, kind_of
from ..drafters.saved.build import shapes_of
from ..drafters.saved.folder import CONFIG_FILE, WEIGHTS_FILE, raise_weight_problems, require_fitting_target, shape_problems
from ..llm.hf_target import HFTarget
from .folders import NOTE_FILE, WEIGHT_FILES, Folder, open_folder

NOTE_VERSION = 1
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Contents of `outrider.json`."""

    format_version: int = NOTE_VERSION
    format: str
    kind: str
    drafter: dict[str, Any]
    target: TargetIdentity
    measured: dict[str, list[list[float]]] = field(default_factory=dict)
    """Numbers measured in training, by the name of the drafter's tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderContents:
    """Contents of a folder with a drafter in some format.

    `config` is written to `config.json`. `tensors` are written to `file`, under the names of the
    format.
    """

    config: dict[str, Any]
    tensors: Tensors
    file: str = WEIGHTS_FILE
    write_more: Callable[[Path], None] = field(default=lambda directory: None)
    """Function that writes the folder's other files."""
    of_target: bool = False
    """Whether the folder is a copy of the target's: types and configuration are the target's, whatever type is wanted, and no
    other weights may remain in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Description of how to read a folder: the drafter's options, and the sources of its
    tensors."""

    options: dict[str, Any]
    """Options of the drafter's config that the folder determines."""
    rename: Callable[[Any], dict[str, str]]
    """Function from the drafter's typed config to the folder's name of each of our tensors that is
    a plain copy."""
    required_extra: Tensors = field(default_factory=dict)
    """Further tensors that the folder must have, on the meta device."""
    optional: Tensors = field(default_factory=dict)
    """Tensors that the folder may have; only their shapes and types matter."""
    convert: Callable[[Tensors, Any], Tensors] = field(default=lambda tensors, config: {})
    """Function from all tensors and the drafter's typed config to our tensors that aren't plain
    copies. It raises ValueError if the folder's tensors don't belong to the target."""
    open_options: frozenset[str] = frozenset()
    """Options that a folder may leave open, so that the user can set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format.

    `write` raises ValueError, with the remedy, for a drafter that the format doesn't support.
    `read` raises ValueError for a folder that doesn't fit the target.
    """

    name: str
    kind: str
    """Kind of drafter that the format holds."""
    write: Callable[[Any, HFTarget], FolderContents]
    read: Callable[[Folder, HFTarget], Reading | TrainableDrafter]
    """Function that describes how to read a folder; or that reads it, where a drafter is a part of a larger model."""
    is_of: Callable[[Folder], bool]
    """Function that detects folders of this format."""
    weight_files: tuple[str, ...] = WEIGHT_FILES
    measured: frozenset[str] = frozenset()
    """Tensors of ours that the format doesn't support, and that only change defaults of
    drafting."""


def write_folder(
    format: Format, drafter: TrainableDrafter, directory: Path, target: HFTarget, dtype: torch.dtype | None = None
) -> None:
    """Write a drafter in this format, in its own type or in `dtype`.

    Raises ValueError for a drafter of another kind, for one that the format doesn't support, and
    for a folder that holds anything else already.
    """
    # 1. Convert the drafter, and check all before anything is written.
    if kind_of(drafter) != format.kind:
        raise ValueError(f"a drafter of the kind {kind_of(drafter)} can't be written as {format.name}; {format.kind} can")
    layout = format.write(drafter, target)
    dtype = None if layout.of_target else dtype
    tensors = {
        name: tensor.detach().cpu().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in layout.tensors.items()
    }
    if not_finite := [name for name, tensor in tensors.items() if not tensor.float().isfinite().all()]:
        remedy = (
            f"doesn't fit into {dtype}; write it in bfloat16, or without dtype" if dtype else "holds numbers that aren't finite"
        )
        raise ValueError(f"{', '.join(not_finite)} of the drafter {remedy}")
    note = Note(
        format=format.name,
        kind=format.kind,
        drafter=asdict(drafter.config),
        target=target.identity,
        measured={name: drafter.get_buffer(name).tolist() for name in sorted(format.measured)},
    )

    # 2. Replace an earlier export; files that it doesn't have, such as a user's README.md, are kept.
    with replacing_directory(directory) as folder:
        require_own_folder(directory, format.name)  # here no other process can write it
        write_json(folder / NOTE_FILE, asdict(note))
        atomic_write_bytes(folder / layout.file, _packed(tensors, layout.file))
        layout.write_more(folder)
        own_type = {} if layout.of_target else {"torch_dtype": _dtype_name(tensors)}
        write_json(folder / CONFIG_FILE, {**layout.config, **own_type})
        for other in directory.iterdir() if directory.is_dir() else ():
            is_stale = layout.of_target and other.suffix == ".safetensors"
            if not (folder / other.name).exists() and not LEFTOVER.fullmatch(other.name) and not is_stale:
                shutil.copytree(other, folder / other.name) if other.is_dir() else shutil.copy(other, folder)


def _packed(tensors: Tensors, file: str) -> bytes:
    if file.endswith(".safetensors"):
        return safetensors.torch.save(tensors, metadata={"format": "pt"})
    buffer = io.BytesIO()
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, buffer)
    return buffer.getvalue()


def _dtype_name(tensors: Tensors) -> str:
    return str(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())).removeprefix("torch.")


def require_own_folder(directory: Path, name: str) -> None:
    """Raise ValueError for a folder with anything but an earlier export in this format."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    note = read_note(directory)
    if note is None:
        raise ValueError(f"{directory} holds other files already; write into another folder")
    if note.format != name:
        raise ValueError(
            f"{directory} holds an export in the format {note.format}, and a folder has one format; write {name} into a folder "
            f"of its own, such as {directory.with_name(f'{directory.name}-{name}')}"
        )


def read_note(directory: Path) -> Note | None:
    """Read the note of one of our exports; None for another program's folder."""
    path = directory / NOTE_FILE
    if not path.is_file():
        return None
    note = read_dataclass(Note, path)
    if note.format_version != NOTE_VERSION:
        raise ValueError(f"{path} has version {note.format_version}; this outrider reads {NOTE_VERSION}: export it again")
    return note


def read_folder(
    format: Format, directory: Path, target: HFTarget, options: Mapping[str, Any] | None = None
) -> TrainableDrafter:
    """Read the drafter of a folder in this format, on the CPU, in the type of its numbers.

    Save it with `save_drafter`. `options` change how it drafts. They may also set what the folder
    leaves open (see `Reading.open_options`). A note of ours beside the configuration determines the
    drafter's options. Raises ValueError for a folder of a target with other sizes, with anything
    but plain tensors, or with a key or tensor that is missing, unknown or has a wrong shape.
    """
    # 1. The drafter's config: from the note if there is one, else from the folder and the open
    # options.
    folder = open_folder(Path(directory), format.weight_files)
    reading = format.read(folder, target)
    note = read_note(folder.path)
    noted = {} if note is None else current_options(format.kind, note.drafter)
    if isinstance(reading, TrainableDrafter):
        if note is not None:
            _check_note(note, format, folder.path, target)
        # Without a note, the folder leaves all options open that its tensors don't determine.
        given, chosen = (asdict(reading.config) | dict(options or {}), {}) if note is None else (noted, options or {})
        reading.config = DrafterSpec.of(format.kind, given).with_options(chosen).config
        return reading
    runtime_options, drafter_options = dict(options or {}), {**reading.options}
    if note is None:
        drafter_options |= {name: runtime_options.pop(name) for name in reading.open_options & runtime_options.keys()}
    else:
        _check_note(note, format, folder.path, target)
        drafter_options |= noted
    kind, described = format.kind, folder.path / (CONFIG_FILE if note is None else NOTE_FILE)
    try:
        spec = DrafterSpec.of(kind, drafter_options)
    except ValueError as error:
        raise ValueError(f"{described} describes no drafter of the kind {kind}: {error}") from error
    config = spec.with_options(runtime_options).config
    # 2. Check names and shapes of the tensors before any weight is read.
    shapes = shapes_of(kind, config, target, folder.path / CONFIG_FILE, len(folder.shapes))
    stored_names = {name: stored for name, stored in reading.rename(config).items() if name in shapes}
    expected = {stored: shapes[name] for name, stored in stored_names.items()} | reading.required_extra
    raise_weight_problems(folder.path, shape_problems(folder.shapes, expected, reading.optional))
    # 3. Load the weights under our names.
    tensors = folder.load()
    weights = {name: tensors[stored] for name, stored in stored_names.items()} | reading.convert(tensors, config)
    drafter = DRAFTERS[kind].for_target(config, target).cpu()
    weights |= {name: drafter.get_buffer(name) for name in format.measured}
    _adopt(drafter, weights, {} if note is None else note.measured, described)
    return drafter.eval().requires_grad_(False)


def _adopt(drafter: TrainableDrafter, weights: Tensors, measured: Mapping[str, list[list[float]]], describing: Path) -> None:
    """Load weights into the drafter, in their type if they share one, and what was `measured`.

    `describing` is the file that describes the weights.
    """
    take_dtype(drafter, weights)
    try:
        drafter.load_state_dict(weights | {name: torch.tensor(values) for name, values in measured.items()})
    except (RuntimeError, ValueError) as error:  # all else has been checked: only tensors without a place in the format
        raise ValueError(f"{describing} doesn't match the weights ({error}); export it again") from error
    drafter.check_weights()


def take_dtype(drafter: TrainableDrafter, tensors: Tensors) -> None:
    """Cast a drafter's parameters to the dtype of their entries in `tensors`.

    If the entries have different dtypes, the parameters keep theirs.
    """
    dtypes = {tensors[name].dtype for name, _ in drafter.named_parameters() if name in tensors}
    if len(dtypes) == 1:
        drafter.to(dtype=dtypes.pop())


def _check_note(note: Note, format: Format, directory: Path, target: HFTarget) -> None:
    """Raise ValueError for a note of another kind or target, or with unknown keys."""
    path = directory / NOTE_FILE
    if note.kind != format.kind:
        raise ValueError(f"{path} has the kind {note.kind}, but {format.name} is for {format.kind}; export it again")
    if unknown := sorted(note.measured.keys() - format.measured):
        raise ValueError(f"{path} has unknown measurements, {', '.join(unknown)}; export it again")
    require_fitting_target(directory, note.target, target.identity)
