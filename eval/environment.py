"""Where a measurement was made: numbers from different environments must not be mixed."""

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..models.machine import cpu_model

PACKAGES = ("outrider", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Software and hardware that a speed depends on."""

    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    num_cpus: int
    num_threads: int
    device: str
    git_hash: str | None
    """Commit of the library's own clone, with `-dirty` where files differ from it; None outside a clone."""

    @property
    def digest(self) -> str:
        return digest_of(dataclasses.asdict(self))


def describe_environment(device: torch.device) -> Environment:
    """This process's environment; `num_threads` is torch's current setting."""
    return Environment(
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu_model(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        git_hash=_git_hash(Path(__file__).parents[1]),
    )


def digest_of(value: Any) -> str:
    """Short digest of a JSON-like value; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(recorded: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two nested configs differ, a text each, such as `target.dtype (was torch.float32, is torch.bfloat16)`."""
    texts = []
    for key in dict.fromkeys([*recorded, *current]):
        old, new = recorded.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            texts += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            texts.append(f"{prefix}{key} (was {old}, is {new})")
    return texts


def _git_hash(directory: Path) -> str | None:
    if not (directory / ".git").exists():  # an installed copy may lie inside somebody else's clone
        return None
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or one that takes forever
        return None
    return result.stdout.strip() or None
