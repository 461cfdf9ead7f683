"""Cells of a study: evaluations in folders of one output, which the same command completes."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from grow_target import DTYPES, Size, Source, grow, require_room

from outrider.data.differences import differences
from outrider.data.files import read_json
from outrider.eval.measure.environment import describe_environment
from outrider.eval.measure.roofline import measure_bandwidth, weight_bytes
from outrider.eval.records.names import RUN_FILE, SUMMARY_FILE
from outrider.eval.records.run_files import read_info
from outrider.eval.results.finished import read_rows
from outrider.eval.results.marks import is_disturbed
from outrider.eval.run import cpu_threads
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.models.machine import available_memory

CPU = torch.device("cpu")
COPIES = 3
"""Free memory, in copies of the weights, above which transformers gets a copy of its own."""
SETTINGS_FILE = "settings.json"
"""File of the settings that all cells of a folder share."""
SAMPLE_BYTES = 1 << 27
SECONDS_PER_LAYER = 5e-4
"""Rough time of a layer beside its weights, in the estimate."""


def require_same_settings(folder: Path, settings: Mapping[str, Any], option: str = "--output") -> None:
    """Raise ValueError if the folder that `option` names holds cells that were measured with other settings."""
    path = folder / SETTINGS_FILE
    if path.is_file() and (changes := differences(read_json(path), dict(settings))):
        raise ValueError(
            f"{folder} was measured differently: {'; '.join(changes.values())}. Give another {option}, or delete that folder"
        )


def bandwidth(threads: int) -> float:
    """Measure how many bytes of memory the machine reads per second."""
    with cpu_threads(threads):
        return 1e9 * measure_bandwidth(SAMPLE_BYTES, CPU)


def seconds_per_step(size: Size, dtype: str, bytes_per_second: float) -> float:
    """Estimate the seconds of a plain decode step: it reads all weights, layer after layer."""
    return size.parameters * DTYPES[dtype].itemsize / bytes_per_second + size.layers * SECONDS_PER_LAYER


def is_done(folder: Path, threads: int) -> bool:
    """Check whether a cell is measured, and no answer of it must be measured again.

    Raises ValueError if it was measured in another environment.
    """
    if not (folder / SUMMARY_FILE).is_file():
        return False
    recorded = read_info(folder / RUN_FILE).environment
    with cpu_threads(threads):
        # The choice of linear layers needs the target, which a finished cell doesn't load.
        environment = replace(describe_environment(CPU), linears=recorded.linears)
    if changes := differences(asdict(recorded), asdict(environment)):
        raise ValueError(
            f"{folder} was measured in another environment: {'; '.join(changes.values())}. Give another --output, or delete "
            "that folder"
        )
    return not any(is_disturbed(row) for row in read_rows(folder))


def transformers_target(target: HFTarget, folder: Path, dtype: str) -> HFTarget:
    """Load the weights once more for transformers, in the memory order that its users have.

    Where memory is too small for that and for packed copies, transformers shares our weights.
    """
    available = available_memory()
    if available is not None and available < COPIES * weight_bytes(target.model):
        print("Memory has no room for other weights, so transformers decodes with ours, in our memory order")
        return target
    return load_target(TargetConfig(name_or_path=str(folder), dtype=dtype, device="cpu", fast_linears=False))


@contextlib.contextmanager
def grown(source: Source, size: Size, folder: Path) -> Iterator[Path]:
    """Yield a grown target in 16 bits, which loads in any type, and delete it afterwards."""
    require_room(folder, size.parameters * DTYPES["bfloat16"].itemsize)
    try:
        grow(source, folder, size, dtype="bfloat16", overwrite=True)
        yield folder
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def has_bf16_matrices() -> bool:
    """Return whether the processor has bf16 matrix instructions (AMX)."""
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False
