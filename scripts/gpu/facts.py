"""Facts about this machine: GPU, driver, torch, and the packages that outrider needs.

    python scripts/gpu/facts.py --output facts.json

The script imports no package except torch, and runs without torch, too: missing packages are part
of the result.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TEST_PACKAGES = ("pytest", "beartype")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.max.sm", "--format=csv,noheader")
SEE_CARD = "import json, facts; print(json.dumps(facts.card()))"
SEE_SECONDS, ERROR_CHARACTERS = 120, 300
INSTALL = "install torch built for CUDA: make install TORCH_INDEX=https://download.pytorch.org/whl/cu130"


def main() -> None:
    args = parse_args()
    facts = {"commit": commit(), "python": platform.python_version(), **packages(), **card(), "nvidia_smi": nvidia_smi()}
    args.output.write_text(json.dumps(facts, indent=2))
    print(json.dumps(facts, indent=2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def packages() -> dict[str, Any]:
    """Return versions of outrider's dependencies, and which are missing or too old."""
    requirements = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    least = dict(re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?.*", line).groups() for line in requirements)  # type: ignore[misc, union-attr]
    versions = {name: installed(name) for name in ("outrider", *least, *TEST_PACKAGES)}
    return {
        "packages": versions,
        "missing": [name for name, number in versions.items() if number is None],
        "older": [
            f"{name} {number}, needs {least[name]}"
            for name, number in versions.items()
            if number and least.get(name) and numbers(number) < numbers(least[name])
        ],
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    """Return a version's release numbers: those before `+cu130` or `rc1`."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", text)[0])]


def card() -> dict[str, Any]:
    """Return torch's facts about the GPU, or the reason why torch doesn't see one."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        return {"cuda": False, "torch": None, "torch_error": str(error)}
    build = {"torch": str(torch.__version__), "cuda_version": torch.version.cuda}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()
    if not has_cuda:  # for an old driver torch only warns
        return {"cuda": False, **build, "torch_error": " ".join(str(warning.message) for warning in caught) or None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "cuda": True,
        **build,
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "num_devices": torch.cuda.device_count(),
        "cudnn_version": torch.backends.cudnn.version(),
    }


def seen_by_torch() -> dict[str, Any]:
    """Return `card`'s result from a process that ends, because torch keeps memory of the GPU."""
    command = [sys.executable, "-c", SEE_CARD]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=SEE_SECONDS
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"cuda": False, "torch_error": f"torch was not ready after {SEE_SECONDS} s"}
    except (IndexError, ValueError):
        return {"cuda": False, "torch_error": f"python ended with {done.returncode}: {done.stderr.strip()[-ERROR_CHARACTERS:]}"}


def unseen(listed: str, seen: dict[str, Any]) -> str:
    """Return the message if nvidia-smi lists a GPU that torch doesn't see: state, rule and
    remedy."""
    version, cuda_version, hidden = seen.get("torch"), seen.get("cuda_version"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if version is None:
        torch, remedy = "torch cannot be imported", INSTALL
    elif cuda_version is None:
        torch, remedy = f"torch {version} is built without CUDA", INSTALL
    elif hidden is not None:
        torch, remedy = f"torch {version} does not see it", f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r}"
    else:
        torch = f"torch {version} (CUDA {cuda_version}) does not see it"
        remedy = f"install a driver for CUDA {cuda_version}, or torch built for the CUDA version that nvidia-smi shows"
    reason = f" ({seen['torch_error']})" if seen.get("torch_error") else ""
    return f"""nvidia-smi lists a GPU ({listed}), but {torch}{reason}.
Without --tiny the parts measure the GPU, so torch must see it. Nothing was run.
Remedy: {remedy}. `--only facts` lists installed and missing packages. `--tiny` runs small shapes on the CPU."""


def nvidia_smi() -> str | None:
    """Return the GPUs that the driver lists; None if there are none, or no driver."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def commit() -> str | None:
    """Return the checked-out commit, with `-dirty` if files differ from it.

    None without git or a repository.
    """
    command = ("git", "describe", "--always", "--dirty")
    try:
        done = subprocess.run(command, cwd=PROJECT.parent, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


if __name__ == "__main__":
    main()
