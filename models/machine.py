"""The hardware that a process computes on, by the names that its makers gave it."""

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The model of a GPU or a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model() if device.type == "cpu" else str(device)


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
