"""An MTP head in a copy of its target's checkpoint, as vLLM (`"method": "mtp"`) and SGLang (NEXTN) read it.

    config.json, tokenizer files    the target's
    model-mtp.safetensors           the trained head, under the names and in the types of the checkpoint's own
    model*.safetensors              the target's, as hard links; a file that had tensors of the head is written without them
    model.safetensors.index.json    names the file of each tensor

Engines read all files of a checkpoint, so the earlier head must not remain in one.
"""

import errno
import os
import re
import shutil
from functools import partial
from itertools import count
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...data.files import read_json, write_json
from ..drafters.mtp import Mtp
from ..drafters.mtp_weights import (
    Head,
    Stored,
    configured_blocks,
    find_head,
    own_weights,
    quantised,
    read_head,
    read_tensor,
    with_other_files,
)
from ..drafters.options import MtpConfig
from ..drafters.saved.folder import CONFIG_FILE
from ..llm.hf_target import HFTarget
from ..llm.weight_files import INDEX_FILE, SHARD_NAME, SINGLE_FILE, read_folder, read_header
from .folders import NOTE_FILE, Folder
from .formats import FolderContents, Format, Tensors

NO_PLACE = "Engines look for a head there, so this one can't be exported: leave mtp out of export.formats"
FILE = "model-mtp{}.safetensors"
"""Name of the file of the head; with a number where the target has a file of that name."""
WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
"""Endings of files with weights; those that the index doesn't name are left out."""


def write(drafter: Mtp, target: HFTarget) -> FolderContents:
    """Build the contents of the folder.

    Raises ValueError for a target whose checkpoint has no MTP head, since engines would not know where to look for one,
    and for numbers that the checkpoint's types can't hold.
    """
    stored = own_weights(target)
    folder = next(iter(stored.values())).path.parent
    head, blocks = find_head(stored, target, str(folder), NO_PLACE), configured_blocks(target)
    tensors: Tensors = {}
    for place in head.places(drafter.state_dict()):
        values, dtype = place.written(), stored[place.name].dtype
        if (scale := head.scale_of(place.name)) is not None:
            tensors[place.name], tensors[scale] = quantised(values, read_tensor(stored[scale]), dtype, blocks)
            continue
        tensors[place.name] = values.to(dtype)
        if values.isfinite().all() and not tensors[place.name].isfinite().all():
            raise ValueError(f"{place.name} of the drafter doesn't fit into {dtype}, the type that it has in {folder}")
    kept = {tensor.path.name for name, tensor in stored.items() if name not in tensors}
    file = next(name for number in count() if (name := FILE.format(f"-{number}" * bool(number))) not in kept)
    return FolderContents(
        config=read_json(folder / CONFIG_FILE),
        tensors=tensors,
        file=file,
        write_more=partial(_write_rest, folder, stored, frozenset(tensors), file),
        of_target=True,
    )


def _write_rest(source: Path, stored: Stored, replaced: frozenset[str], file: str, directory: Path) -> None:
    """Write the target's other files, and the index."""
    names = {tensor.path.name for tensor in stored.values()}
    # A single file would hide the index.
    files = {name: SHARD_NAME.format(1, 1) if name == SINGLE_FILE else name for name in names}
    for path in sorted(source.iterdir()):
        if path.name not in files:
            is_other = path.suffix not in WEIGHTS and path.name not in (CONFIG_FILE, INDEX_FILE, NOTE_FILE)
            if path.is_file() and is_other and not path.name.startswith("."):
                shutil.copyfile(path, directory / path.name)
        elif read_header(path).keys() & replaced:
            _write_without(path, directory / files[path.name], replaced)
        else:
            _link(path, directory / files[path.name])
    weight_map = {name: files[tensor.path.name] for name, tensor in stored.items()} | dict.fromkeys(replaced, file)
    sizes = sum(tensor.num_bytes for tensor in stored.values())
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))})


def _write_without(source: Path, path: Path, names: frozenset[str]) -> None:
    """Copy a file of weights without some tensors; a file that would be empty is left out."""
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name not in names}  # noqa: SIM118  # no mapping
        metadata = file.metadata()
    if not tensors:
        return
    try:
        save_file(tensors, path, metadata)
        shutil.copymode(source, path)  # the library writes files that only their owner can read
    except SafetensorError as error:
        # A full disk: the library hides its number in a text.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def _link(source: Path, path: Path) -> None:
    """Link a file that nothing changes, or copy it to another file system."""
    try:
        os.link(source.resolve(), path)
    except OSError:
        shutil.copyfile(source, path)


def read(folder: Folder, target: HFTarget) -> Mtp:
    """Read the head of a checkpoint, on the CPU, in the type of its norms. Raises ValueError as `read_head` does."""
    drafter = Mtp.for_target(MtpConfig(init="random"), target).cpu()
    stored = with_other_files(read_folder(folder.path), target)
    try:
        read_head(drafter.state_dict(), stored, target)
    except ValueError as error:
        raise ValueError(f"{error}. A draft model with a head of its own is imported with --format transformers") from None
    norm = next(find_head(stored, target, str(folder.path)).places({"enorm.weight": drafter.enorm.weight}))
    drafter.to(stored[norm.name].dtype)
    return drafter.eval().requires_grad_(False)


def is_of(folder: Folder) -> bool:
    """Check for a model's layers beside those of a head."""
    text_config = folder.config.get("text_config", folder.config)
    num_layers = text_config.get("num_hidden_layers") if isinstance(text_config, dict) else None
    return isinstance(num_layers, int) and Head.find(folder.shapes, num_layers) is not None


FORMAT = Format(name="mtp", kind="mtp", write=write, read=read, is_of=is_of)
