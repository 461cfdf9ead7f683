"""A drafter as a low-rank change of another one (LoRA: Hu et al., arXiv 2106.09685, section 4.1).

The change of a matrix W, which is out x in, is U V, of `rank` columns and rows. So a drafter for each domain is a small
file beside one whole drafter. It is merged once, W + U V, into a cached folder, which is then a drafter like any other.
"""

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
from huggingface_hub import cached_assets_path, constants
from huggingface_hub.utils import WeakFileLock
from jaxtyping import Float
from pydantic import Field
from safetensors import SafetensorError

from ....data.files import (
    atomic_write_bytes,
    read_dataclass,
    read_json,
    replacing_directory,
    sha256_file,
    sha256_json,
    write_json,
)
from ....data.hub import require_cache_folder
from .folder import (
    CONFIG_FILE,
    HUB_ID,
    TRAINING_FILE,
    WEIGHTS_FILE,
    DrafterFile,
    read_drafter_config,
    record_weights,
    require_recorded_weights,
)

LOW_RANK_DIR = "low_rank"
"""Folder of the change, beside the whole weights that training writes."""
FORMAT_VERSION = 1
UP, DOWN, WHOLE = "up", "down", "change"
"""Ends of the tensors' names: U (out x rank) and V (rank x in), or the change of a tensor that has no room for factors."""
NAMESPACE = "low_rank"
"""Folder of the merged drafters in the cache."""
IN_HUBS_CACHE = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankFile:
    """Content of `config.json` in the folder of a low-rank change."""

    low_rank_version: int
    base: str
    """The drafter that is changed: its folder, or `user/name@commit` on the Hub."""
    base_sha256: str
    """Digest of the base's `model.safetensors`."""
    rank: Annotated[int, Field(ge=1)]
    changed: DrafterFile
    """The whole drafter's `config.json`; its `weights_sha256` is that of the change, in `model.safetensors`."""


Weights = Mapping[str, torch.Tensor]


def has_factors(shape: torch.Size, rank: int) -> bool:
    """Whether the factors of a tensor's change are smaller than the change: those of vectors never are."""
    return len(shape) >= 2 and rank * (shape[-2] + shape[-1]) < shape[-2] * shape[-1]


def factors(
    change: Float[torch.Tensor, "*stack out in_"], rank: int
) -> tuple[Float[torch.Tensor, "*stack out rank"], Float[torch.Tensor, "*stack rank in_"]]:
    """Return U and V whose product is the nearest to a change, of all of this rank (Eckart and Young, 1936)."""
    is_tall = change.shape[-2] >= change.shape[-1]
    gram = change.mT @ change if is_tall else change @ change.mT
    main = torch.linalg.eigh(gram).eigenvectors[..., -rank:]
    return (change @ main, main.mT) if is_tall else (main, main.mT @ change)


def write_low_rank(folder: Path, base: Path, rank: int, parameters: Collection[str]) -> None:
    """Write the change from `base` to the drafter in `folder` beside it, and make the drafter exactly what is read back.

    `parameters` are the names of those that were trained. Other numbers, such as measured shares, are kept whole; token ids
    are the base's. Factors are stored in bfloat16: their rounding is far below the noise of a training.
    """
    require_recorded_weights(base, read_drafter_config(base))
    tensors = dict[str, torch.Tensor]()
    before, after = (safetensors.torch.load_file(path / WEIGHTS_FILE) for path in (base, folder))
    for name, tensor in after.items():
        if not tensor.is_floating_point() or torch.equal(tensor.float(), before[name].float()):
            continue
        change = tensor.double() - before[name].double()
        if name in parameters and has_factors(change.shape, rank):
            tensors[f"{name}.{UP}"], tensors[f"{name}.{DOWN}"] = (
                part.bfloat16().contiguous() for part in factors(change, rank)
            )
        else:
            tensors[f"{name}.{WHOLE}"] = change.float()
    atomic_write_bytes(folder / WEIGHTS_FILE, safetensors.torch.save(merged(before, tensors)))
    record_weights(folder)
    data = safetensors.torch.save(tensors)
    (folder / LOW_RANK_DIR).mkdir(exist_ok=True)
    atomic_write_bytes(folder / LOW_RANK_DIR / WEIGHTS_FILE, data)
    file = LowRankFile(
        low_rank_version=FORMAT_VERSION,
        base=_lasting_name(base),
        base_sha256=sha256_file(base / WEIGHTS_FILE),
        rank=rank,
        changed=replace(read_drafter_config(folder), weights_sha256=sha256_file(folder / LOW_RANK_DIR / WEIGHTS_FILE)),
    )
    write_json(folder / LOW_RANK_DIR / CONFIG_FILE, asdict(file))


def merged(base: Weights, change: Weights) -> dict[str, torch.Tensor]:
    """Return the weights of the whole drafter, in float32. Raises ValueError for tensors that don't change the base's."""
    whole = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in base.items()}
    for name, tensor in change.items():
        of, _, kind = name.rpartition(".")
        other = change.get(f"{of}.{DOWN if kind == UP else UP}")
        shape = tensor.shape
        if kind == UP and other is not None and (tensor.ndim, shape[:-2], shape[-1:]) == _stack_and_rank(other):
            shape = torch.Size([*shape[:-1], other.shape[-1]])
        elif kind != WHOLE and not (kind == DOWN and other is not None):
            raise ValueError(f"{name} is no change, or half of one")
        if kind != DOWN and (of not in whole or whole[of].shape != shape):  # before a product that may be large
            raise ValueError(f"{name} makes a change of {tuple(shape)}, and the base has no such tensor")
        if kind == UP:
            assert other is not None
            tensor = tensor.double() @ other.double()
        if kind != DOWN:
            whole[of] = (whole[of].double() + tensor.double()).float()
    return whole


def _stack_and_rank(down: torch.Tensor) -> tuple[int, torch.Size, torch.Size]:
    """Return what factors have in common: their dimensions, the sizes before the last two, and the rank."""
    return down.ndim, down.shape[:-2], down.shape[-2:-1]


def is_low_rank(folder: Path) -> bool:
    """Whether a folder holds a low-rank change."""
    path = folder / CONFIG_FILE
    return path.is_file() and isinstance(content := read_json(path), dict) and "low_rank_version" in content


def whole_drafter(folder: Path, resolve: Callable[[str], Path]) -> Path:
    """Return the cached folder of the whole drafter, which the first call writes, atomically.

    `resolve` finds the base by its name. Raises ValueError if the base is missing or another drafter, if the change is
    damaged, or if there is no cache to write to.
    """
    # 1. The change, and its base.
    path, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    file = read_dataclass(LowRankFile, path)
    if file.low_rank_version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {file.low_rank_version}, and this version of outrider reads {FORMAT_VERSION}")
    base = _base_of(file, path, resolve)
    if not weights.is_file() or sha256_file(weights) != file.changed.weights_sha256:
        raise ValueError(
            f"{weights} is missing, altered or damaged: its SHA-256 digest is not the one in {path}; copy it again"
        )

    # 2. The whole drafter. Other processes wait meanwhile.
    require_cache_folder(constants.HF_ASSETS_CACHE)
    digest = sha256_json(asdict(file))[:32]
    name = next((part for part in reversed(folder.resolve().parts) if part not in (LOW_RANK_DIR, "drafter")), "drafter")
    try:
        place = cached_assets_path("outrider", namespace=NAMESPACE, subfolder=digest, assets_dir=constants.HF_ASSETS_CACHE)
    except OSError as error:
        raise ValueError(f"{folder} is merged into a cache ({error}); set HF_HOME to a folder that can be written") from error
    whole = place / name  # tables show this name
    with WeakFileLock(place / ".lock"):
        if not _is_whole(whole):
            with replacing_directory(whole) as new:
                try:
                    tensors = merged(safetensors.torch.load_file(base / WEIGHTS_FILE), safetensors.torch.load_file(weights))
                except (ValueError, RuntimeError, SafetensorError) as error:
                    raise ValueError(f"{weights} doesn't fit its base, {file.base} ({error}); copy it again") from error
                atomic_write_bytes(new / WEIGHTS_FILE, safetensors.torch.save(tensors))
                write_json(new / CONFIG_FILE, asdict(file.changed))
                record_weights(new)
                if (folder / TRAINING_FILE).is_file():
                    shutil.copyfile(folder / TRAINING_FILE, new / TRAINING_FILE)
    return whole


def is_merged(folder: Path | None) -> bool:
    """Whether a folder is the cached drafter of a low-rank change."""
    cache = Path(constants.HF_ASSETS_CACHE, "outrider", NAMESPACE).resolve()
    return folder is not None and folder.resolve().parent.parent == cache


def require_shared_base(folder: Path) -> None:
    """Raise ValueError for a low-rank change that others couldn't use, because its base is a folder of this machine."""
    if is_low_rank(folder) and HUB_ID.fullmatch(base := read_dataclass(LowRankFile, folder / CONFIG_FILE).base) is None:
        raise ValueError(
            f'{folder} changes the drafter in {base}, which others don\'t have: push that first, and set "base" in '
            f"{folder / CONFIG_FILE} to its name (user/name@commit); or push the whole drafter"
        )


def _base_of(file: LowRankFile, path: Path, resolve: Callable[[str], Path]) -> Path:
    """Return the folder of the base. `outrider adopt` may have put another drafter in its place, and kept it beside that."""
    problem = "the weights there are others than those that it was trained on"
    try:
        base = resolve(file.base)
        for folder in (base, *sorted(base.parent.glob(f"{base.name}_earlier_*"))):
            saved = read_drafter_config(folder).weights_sha256
            if saved == file.base_sha256 == sha256_file(folder / WEIGHTS_FILE):
                return folder
    except (ValueError, OSError) as error:
        problem = f"it can't be read ({error})"
    raise ValueError(f'{path.parent} changes the drafter {file.base}: {problem}. If that has moved, set "base" in {path}')


def _is_whole(folder: Path) -> bool:
    """Whether a folder has a drafter with the weights that were saved."""
    with suppress(ValueError, OSError):
        return sha256_file(folder / WEIGHTS_FILE) == read_drafter_config(folder).weights_sha256
    return False


def _lasting_name(base: Path) -> str:
    """Return a repository's name and commit for a folder in the Hub's cache, else the folder's whole path."""
    found = IN_HUBS_CACHE.search(base.as_posix())
    return f"{found['owner']}/{found['name']}@{found['commit']}" if found else str(base.resolve())
