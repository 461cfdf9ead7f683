"""A target's memory budget: what speeds depend on, and what tables show."""

import sys
from typing import Any

import torch

from ...models.llm.hf_target import HFTarget
from ...models.llm.memory_plan import GIB
from ..records.run_files import BudgetFacts


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
