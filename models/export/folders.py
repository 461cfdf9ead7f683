"""Folders of other programs.

A configuration beside weights, which are read without running anything and only when they fit.
"""

import json
import logging
import pickle
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ...data.files import read_json
from ..drafters.saved.folder import CONFIG_FILE, MOST_PROBLEMS, WEIGHTS_FILE, infinite_problems, raise_problems, require_counts

logger = logging.getLogger(__name__)

COUNTS = (
    *("medusa_num_heads", "medusa_num_layers", "num_draft_layers", "num_hidden_layers", "num_medusa_heads"),
    *("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
)
"""Keys that count what has a tensor each at least."""
INDEX_SUFFIX = ".index.json"
NOTE_FILE = "outrider.json"
"""What our exports say to ourselves: see `formats`."""
WEIGHT_FILES = (WEIGHTS_FILE, "pytorch_model.bin")
"""Where most programs keep weights, the preferred one first; each may be an index of several
files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What a folder says of itself.

    No weight has been read.
    """

    path: Path
    config: dict[str, Any]
    shapes: dict[str, torch.Tensor]
    """Every tensor's shape and type, on the meta device."""
    files: tuple[Path, ...]

    def load(self) -> dict[str, torch.Tensor]:
        """Return the weights, on the CPU.

        Raises ValueError where a file is damaged or any number isn't finite.
        """
        tensors = {name: tensor for file in self.files for name, tensor in _read(file, "cpu").items()}
        raise_problems(self.path, infinite_problems(tensors))
        return tensors


def open_folder(path: Path, weight_files: tuple[str, ...] = WEIGHT_FILES) -> Folder:
    """Return a folder's configuration and the names, shapes and types of its tensors.

    `weight_files` are the names that its weights may have: the first that is there is read, or the
    files of its index. Raises ValueError where a file is missing or damaged, holds anything but
    tensors, or lies outside of the folder.
    """
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(f"{path} holds no drafter: it has no {CONFIG_FILE}")
    config = read_json(path / CONFIG_FILE)
    if not isinstance(config, dict):
        raise ValueError(f"{path / CONFIG_FILE} is not a configuration but a {type(config).__name__}")
    files, indexed = _weight_files(path, weight_files)
    shapes: dict[str, torch.Tensor] = {}
    for file in files:
        loaded = _read(file, "meta")
        if twice := sorted(loaded.keys() & shapes.keys()):
            raise ValueError(f"{path} has {twice[0]} in two files; keep one")
        if indexed is not None and (wrong := {name for name, each in indexed.items() if each == file.name} ^ loaded.keys()):
            raise ValueError(f"{file} and the index of {path} don't agree on {', '.join(sorted(wrong)[:MOST_PROBLEMS])}")
        shapes |= loaded
    require_counts(config, COUNTS, len(shapes), path / CONFIG_FILE)
    return Folder(path=path, config=config, shapes=shapes, files=tuple(files))


def _weight_files(path: Path, names: tuple[str, ...]) -> tuple[list[Path], dict[str, str] | None]:
    """Return the files with weights, and the index's file of each tensor, if any."""
    for name in names:
        if (path / name).is_file():
            return [path / name], None
        if (path / (name + INDEX_SUFFIX)).is_file():
            return _indexed(path / (name + INDEX_SUFFIX))
    others = ", ".join(sorted(each.name for each in path.iterdir() if each.name != CONFIG_FILE)) or "nothing"
    raise ValueError(f"{path} has no {' or '.join(names)} beside its {CONFIG_FILE}, but {others}; complete the download")


def _indexed(path: Path) -> tuple[list[Path], dict[str, str]]:
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path} is no index of weights: its weight_map must name a file for each tensor")
    files = sorted(set(weight_map.values()))
    for name in files:
        # Also on other systems' terms: an index may have been written anywhere.
        if name in ("", ".", "..") or "/" in name or "\\" in name or ":" in name:
            raise ValueError(f"{path} names the file {name!r}; files of a folder lie in it: write plain names")
        if not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is missing; complete the download")
    return [path.parent / name for name in files], weight_map


def _read(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Return a file's tensors; on the meta device only their shapes."""
    return _read_safetensors(path, device) if path.suffix == ".safetensors" else _read_pickled(path, device)


def _read_pickled(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Read a file of torch's without running its code.

    Its storages are read even for shapes alone. So it must not hold more than its size says, as
    compressed files and those of torch before 1.6 may. Damage is found by the archive's checksums;
    what remains are pickles that the unpickler refuses.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is compressed, which torch's own files never are")
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        loaded = torch.load(path, map_location=device, weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a plain file of tensors as torch writes them since 1.6, and nothing else is read, since reading it "
            f"could run its code ({str(error).partition(chr(10))[0]}); convert it to safetensors where you trust it, or "
            "download it again"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(each, torch.Tensor) for each in loaded.values()):
        raise ValueError(f"{path} holds something else than named tensors; save the state_dict alone")
    if odd := [str(name) for name, each in loaded.items() if each.layout is not torch.strided or each.device.type != device]:
        raise ValueError(f"{path} has {odd[0]} without plain numbers (it is sparse, or has none); save dense tensors")
    return {str(name): each.detach() for name, each in loaded.items()}


def _read_safetensors(path: Path, device: str) -> dict[str, torch.Tensor]:
    try:
        tensors = safetensors.torch.load_file(path)  # mapped into memory: numbers are read where they are used
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); download or export it again") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def to_json(value: Any) -> Any:
    """Return a value as JSON has it: tuples are lists."""
    return json.loads(json.dumps(value, default=partial(str)))
