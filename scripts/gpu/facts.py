"""What there is on this machine: the card, its driver, torch, and the packages that outrider needs.

    python scripts/gpu/facts.py --output facts.json

Imports nothing but torch, and runs without that: what is missing is part of the answer.
"""

import argparse
import json
import platform
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TEST_PACKAGES = ("pytest", "beartype")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm", "--format=csv,noheader")


def main() -> None:
    args = parse_args()
    facts = {"python": platform.python_version(), **packages(), **card(), "nvidia_smi": nvidia_smi()}
    args.output.write_text(json.dumps(facts, indent=2))
    print(json.dumps(facts, indent=2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def packages() -> dict[str, Any]:
    """Versions of what outrider depends on, and which are missing, or older than it asks for."""
    asked = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    least = dict(re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?.*", line).groups() for line in asked)  # type: ignore[union-attr]
    found = {name: installed(name) for name in ("outrider", *least, *TEST_PACKAGES)}
    return {
        "packages": found,
        "missing": [name for name, number in found.items() if number is None],
        "older": [
            f"{name} {number}, needs {least[name]}"
            for name, number in found.items()
            if number and least.get(name) and numbers(number) < numbers(least[name])
        ],
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    """A version's release numbers: those before `+cu130` or `rc1`."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", text)[0])]


def card() -> dict[str, Any]:
    """What torch sees."""
    try:
        import torch
    except ImportError as error:
        return {"cuda": False, "torch_error": str(error)}
    if not torch.cuda.is_available():
        return {"cuda": False}
    properties = torch.cuda.get_device_properties(0)
    return {
        "cuda": True,
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "num_devices": torch.cuda.device_count(),
        "cuda_version": torch.version.cuda,
        "cudnn_version": torch.backends.cudnn.version(),
    }


def nvidia_smi() -> str | None:
    try:
        return subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=False).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


if __name__ == "__main__":
    main()
