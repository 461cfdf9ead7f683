"""Folders of other programs: a configuration beside weights.

They are read without running any code. Weights are read only if their names and shapes fit.
"""

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ...data.files import read_json
from ..drafters.saved.folder import CONFIG_FILE, WEIGHTS_FILE, infinite_problems, raise_weight_problems
from ..llm.weight_files import read_index

INDEX_SUFFIX = ".index.json"
NOTE_FILE = "outrider.json"
"""File of our own notes in an export: see `formats`."""
WEIGHT_FILES = (WEIGHTS_FILE, "pytorch_model.bin")
"""Usual names of the weight file, the preferred one first. Each may be an index of several
files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Contents of a folder, without the values of its weights."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, torch.Tensor]
    """Shape and type of every tensor, on the meta device."""
    files: tuple[Path, ...]

    def load(self) -> dict[str, torch.Tensor]:
        """Load the weights, on the CPU.

        Raises ValueError if a file is damaged or a number isn't finite.
        """
        tensors = {name: tensor for file in self.files for name, tensor in _read(file, "cpu").items()}
        raise_weight_problems(self.path, infinite_problems(tensors))
        return tensors


def open_folder(path: Path, weight_files: tuple[str, ...] = WEIGHT_FILES) -> Folder:
    """Read a folder's configuration and the names, shapes and types of its tensors.

    `weight_files` are the possible names of the weight file. The first existing one is read, or the
    files of its index. Raises ValueError for a file that is missing or damaged, that contains
    anything besides tensors, or that lies outside of the folder.
    """
    # 1. Read the configuration.
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(f"{path} holds no drafter: it has no {CONFIG_FILE}; give a drafter's folder, or complete the download")
    config = read_json(path / CONFIG_FILE)
    if not isinstance(config, dict):
        raise ValueError(f"{path / CONFIG_FILE} is not a configuration but a {type(config).__name__}")
    # 2. Read the shapes of all tensors.
    files = _weight_files(path, weight_files)
    shapes: dict[str, torch.Tensor] = {}
    for file in files:
        loaded = _read(file, "meta")
        if repeated := sorted(loaded.keys() & shapes.keys()):
            raise ValueError(f"{path} has {repeated[0]} in two files; keep one")
        shapes |= loaded
    return Folder(path=path, config=config, shapes=shapes, files=tuple(files))


def _weight_files(path: Path, names: tuple[str, ...]) -> list[Path]:
    """Find the files with weights: one, or those of an index."""
    for name in names:
        if (path / name).is_file():
            return [path / name]
        if (index := path / (name + INDEX_SUFFIX)).is_file():
            return [path / file for file in sorted(set(read_index(index).values()))]
    others = ", ".join(sorted(file.name for file in path.iterdir() if file.name != CONFIG_FILE)) or "nothing"
    raise ValueError(f"{path} has no {' or '.join(names)} beside its {CONFIG_FILE}, but {others}; complete the download")


def _read(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Read a file's tensors; on the meta device only their shapes."""
    return _read_safetensors(path, device) if path.suffix == ".safetensors" else _read_pickled(path, device)


def _read_pickled(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Read a file of torch without running its code.

    torch reads the storages even if only shapes are wanted. So the file must not expand beyond its
    size on disk, as compressed files and those of torch before 1.6 may. The archive's checksums
    detect damage, and the restricted unpickler rejects all other pickles.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is compressed, unlike files that torch writes")
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        loaded = torch.load(path, map_location=device, weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a plain file of tensors as torch writes since 1.6 ({str(error).partition(chr(10))[0]}). Reading "
            "anything else could run its code; download it again, or convert it to safetensors on a machine where you trust it"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ValueError(f"{path} holds something else than named tensors; save the state_dict alone")
    not_dense = [name for name, value in loaded.items() if value.layout is not torch.strided or value.device.type != device]
    if not_dense:
        raise ValueError(f"{path} has {not_dense[0]} without plain numbers (it is sparse, or has none); save dense tensors")
    return {str(name): value.detach() for name, value in loaded.items()}


def _read_safetensors(path: Path, device: str) -> dict[str, torch.Tensor]:
    try:
        tensors = safetensors.torch.load_file(path)  # memory-mapped: values are read on first use
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); download or export it again") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}
