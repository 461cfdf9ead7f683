"""The hardware that a process computes on, by the names that its makers gave it."""

import logging
import platform
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


def device_name(device: torch.device) -> str:
    """The model of a GPU or a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model() if device.type == "cpu" else str(device)


def turn_off_cudnn_attention(device: torch.device) -> None:
    """Take cuDNN's kernel out of PyTorch's choice of attention kernels, in the whole process, if
    `device` is a GPU of NVIDIA's.

    PyTorch prefers it on an H100. It plans anew for every shape and stride of keys, queries and
    masks, for tens of milliseconds, and in decoding each step has another shape. The flash and the
    memory-efficient kernel plan nothing.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        logger.info("attention: cuDNN's kernel is off in this process; it would plan anew for every length of a text")


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
