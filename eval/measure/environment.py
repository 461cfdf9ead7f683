"""The environment of a measurement: the machine, its memory and its roofline.

Numbers from different environments must not be mixed. The roofline is an upper bound on the speed
of plain decoding: every step reads every weight once.
"""

import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import nn

from ...models.llm.hf_target import HFTarget
from ...models.llm.memory_plan import GIB
from ...models.llm.stages.staged_target import StagedTarget
from ...models.machine import cpu_model, find_out_of_memory, is_out_of_memory, peak_memory, release_memory, synchronize
from ..records.run_files import BudgetFacts, Environment, Roofline

PACKAGES = ("outrider", "torch", "transformers")


def describe_environment(device: torch.device, linears: Mapping[str, str] | None = None) -> Environment:
    """Describe this process's environment; `num_threads` is torch's current setting."""
    return Environment(
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu_model(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        git_hash=_git_hash(Path(__file__).parents[2]),
        linears=dict(linears or {}),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # a checkout on the import path has no version; `git_hash` identifies it


def _git_hash(directory: Path) -> str | None:
    if not (directory / ".git").exists():  # an installed copy may lie inside another project's clone
        return None
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or git hangs
        return None
    return result.stdout.strip() or None


def recorded_stages(target: HFTarget) -> dict[str, Any]:
    """Return the stages that speeds depend on; nothing for a target in one process."""
    return {"stage_layers": list(target.stage_layers)} if isinstance(target, StagedTarget) else {}


def recorded_budget(target: HFTarget) -> dict[str, Any]:
    """Return the memory budget that speeds depend on; nothing without one."""
    if target.stream is None:
        return {}
    plan = target.stream.plan
    return {"memory_budget": {"gib": plan.budget_bytes / GIB, "bytes_per_pass": plan.streamed_bytes}}


def budget_facts(target: HFTarget) -> BudgetFacts | None:
    """Collect the facts about the memory budget that tables show; None without one."""
    if target.stream is None:
        return None
    rate = target.stream.bytes_per_second
    return BudgetFacts(plan=target.stream.plan.describe(), read_gbs=rate / 1e9, peak_bytes=peak_memory(target.device))


logger = logging.getLogger(__name__)

T = TypeVar("T")


def within_memory(work: Callable[[], T], target: HFTarget) -> T | None:
    """Run `work` and return its result, or None when memory runs out.

    In that case the target's caches are released.
    """
    try:
        return work()
    except Exception as error:  # any type: an out-of-memory error may be its cause
        failed_allocation = str(find_out_of_memory(error) or "")
        if not failed_allocation:
            raise
        logger.warning("%s", failed_allocation.partition("\n")[0])
    # Release only after the `except` block: the error's traceback keeps the tensors of all its
    # frames alive.
    target.release_cache()
    release_memory(target.device)
    return None


MAX_BUFFER_BYTES, MAX_ACCELERATOR_BYTES = 1 << 30, 1 << 32
"""The accelerator's buffer is larger because an H100 reads a GiB in 0.3 ms. Starting and ending a
kernel would be a visible part of that."""
LEAST_BUFFER_BYTES = 1 << 20
COLUMNS = 1024
NUM_ROUNDS, NUM_QUEUED_READS = 7, 50
"""Timed rounds, and an accelerator's reads in each. A CPU reads once."""

Read = Callable[[], torch.Tensor]


def measure_roofline(target: HFTarget) -> Roofline:
    """Compute the roofline of a target with torch's current number of threads.

    A target whose weights are streamed is
    bound by the bytes that each pass reads from its files, and by the rate of these reads so far.
    """
    if target.stream is not None and (num_bytes := target.stream.plan.streamed_bytes):
        rate = target.stream.bytes_per_second / 1e9
        return Roofline(weight_bytes=num_bytes, bandwidth_gbs=rate, cache_bytes=None, streamed=True)
    num_bytes = weight_bytes(target.model)
    if target.stream is not None:  # all of it is in memory, but some units only during their turn
        num_bytes += sum(unit.num_bytes for unit in target.stream.units)
    return Roofline(
        weight_bytes=num_bytes,
        bandwidth_gbs=measure_bandwidth(num_bytes, target.device),
        cache_bytes=cache_bytes(target.device),
        streamed=False,
    )


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of weights that one plain decode step reads.

    All parameters count. An embedding that is not also the head counts one row only. For a mixture
    of experts this counts every expert, though a step reads only a few.
    """
    embeddings = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(parameter) for module in model.modules() if isinstance(module, nn.Linear) for parameter in module.parameters()}
    unread = sum(weight[1:].nbytes for key, weight in embeddings.items() if key not in heads)
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def measure_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Measure the best bandwidth of repeated reads of `num_bytes`, in gigabytes per second.

    On a CPU the buffer has at most MAX_BUFFER_BYTES. On an accelerator it has at most
    MAX_ACCELERATOR_BYTES, and no more than its memory holds. Two kernels read the buffer: a norm,
    and the matrix-vector product that decoding consists of. The faster one counts, since the result
    serves as a bound.
    """
    largest = MAX_BUFFER_BYTES if device.type == "cpu" else MAX_ACCELERATOR_BYTES
    matrix = _buffer(min(num_bytes, largest), device)
    vector = torch.ones(matrix.shape[1], device=device)
    reads: list[Read] = [lambda: torch.linalg.vector_norm(matrix), lambda: torch.mv(matrix, vector)]
    seconds = min(_seconds(read, device) for read in reads)
    return matrix.nbytes / seconds / 1e9


def _buffer(num_bytes: int, device: torch.device) -> Float[torch.Tensor, "row column"]:
    """Allocate a matrix of about `num_bytes`, halved until it fits into memory."""
    try:
        return torch.ones(max(1, num_bytes // (4 * COLUMNS)), COLUMNS, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error) or num_bytes <= LEAST_BUFFER_BYTES:
            raise
    return _buffer(num_bytes // 2, device)


def _seconds(read: Read, device: torch.device) -> float:
    """Time rounds of reads by the host's clock; return the seconds of a read in the fastest round.

    An accelerator reads many times in a round, since the host launches reads ahead. So launches and
    the wait at the end hardly count.
    """
    num_reads, best = 1 if device.type == "cpu" else NUM_QUEUED_READS, float("inf")
    for _ in range(1 + NUM_ROUNDS):  # the first call chooses its kernel
        synchronize(device)
        start = time.perf_counter()
        for _ in range(num_reads):
            read()
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / num_reads)
    return best


def cache_bytes(device: torch.device) -> int | None:
    """Read the size of the last-level cache of the first CPU, or of the GPU.

    Returns None where the system doesn't report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)
