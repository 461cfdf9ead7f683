"""The environment of a measurement, the target's memory budget and stages, and what happens without memory.

Numbers from different environments must not be mixed.
"""

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...models.llm.hf_target import HFTarget
from ...models.llm.memory_plan import GIB
from ...models.llm.stages.staged_target import StagedTarget
from ...models.machine import cpu_model, find_out_of_memory, release_memory
from ..records.run_files import BudgetFacts, Environment

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
    return BudgetFacts(plan=target.stream.plan.describe(), read_gbs=rate / 1e9, peak_bytes=peak_bytes(target.device))


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest memory of the device, or of this process on a CPU; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource  # Windows has no such module
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
