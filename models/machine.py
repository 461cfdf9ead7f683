"""The hardware that a process computes on: its name, when its work is done, and when its memory is used up."""

import gc
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


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work. A CPU has finished it when an operation returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "MPS backend out of memory",
    # Memory that isn't from PyTorch's allocator: of a CUDA graph, a kernel or a library.
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What only their text tells from other RuntimeErrors."""
MAX_CHAINED_ERRORS = 16


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, here or in an error behind this one."""
    return find_out_of_memory(error) is not None


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the failed allocation that this error is, or was raised because of.

    Where memory runs out in a CUDA graph's capture, the end of the capture fails too, and its error
    replaces the first one. So the errors behind this one are searched as a traceback shows them.
    """
    link: BaseException | None = error
    for _ in range(MAX_CHAINED_ERRORS):
        if link is None or _is_failed_allocation(link):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def _is_failed_allocation(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    )


def release_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more: to the system, so that a larger block finds room."""
    gc.collect()  # an error's frames may lie in a cycle with their tensors
    if device.type != "cpu":
        torch.accelerator.empty_cache()


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
