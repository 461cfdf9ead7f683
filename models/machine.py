"""The hardware that a process computes on, by the names that its makers gave it."""

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The model of a GPU or a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model() if device.type == "cpu" else str(device)


def hardware(device: torch.device, num_processes: int) -> str:
    """What so many processes compute on, if each has such a device."""
    each = f"{device_name(device)}, {torch.get_num_threads()} threads" if device.type == "cpu" else device_name(device)
    return each if num_processes == 1 else f"{num_processes} x {each}"


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
