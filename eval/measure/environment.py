"""The environment of a measurement. Numbers from different environments must not be mixed."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...models.machine import cpu_model
from ..records.run_files import Environment

PACKAGES = ("outrider", "torch", "transformers")


def describe_environment(device: torch.device, linears: str = "") -> Environment:
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
        linears=linears,
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
