"""The hardware of a process: its name, synchronisation, and its memory."""

import gc
import logging
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


CGROUPS = Path("/sys/fs/cgroup")


def device_name(device: torch.device) -> str:
    """Return the model name of a GPU or a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model() if device.type == "cpu" else str(device)


def parse_device(name: str | int) -> torch.device:
    """Return the device of a name, or of an accelerator's index. Raises ValueError if it can't be used."""
    try:
        device = torch.device(name)
        # The name may be valid, but the device absent or unusable (meta).
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"there is no device {name!r} ({error}); use one like cpu, cuda or cuda:1") from error
    return device


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a CPU lacks the instructions that oneDNN's products of a 16-bit type need (AVX-512 at least).

    PyTorch converts the numbers then, which takes many rows several times as long.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    kernels = torch.ops.mkldnn
    is_native = {torch.bfloat16: kernels._is_mkldnn_bf16_supported, torch.float16: kernels._is_mkldnn_fp16_supported}
    return dtype in is_native and not is_native[dtype]()


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work; a CPU operation returns when it is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def available_memory() -> int | None:
    """Return the bytes of memory that a process could still take, or None if that is unknown.

    A container's limit counts as well (the memory controller of cgroups, versions 2 and 1).
    """
    free = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    groups = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    for group, limit, used in groups:
        with suppress(OSError, ValueError):  # "max" is no number
            folder = CGROUPS / group
            free.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return min(free, default=None)


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device's memory, or None if that is unknown."""
    if device.type == "cpu":
        return available_memory()
    read = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if read is None else int(read(device)[0])


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on CUDA, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "MPS backend out of memory",
    # Memory outside PyTorch's allocator: of a CUDA graph, a kernel or a library.
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Only their text distinguishes these errors from other RuntimeErrors."""
MAX_CHAINED_ERRORS = 16


def is_for_users(error: BaseException) -> bool:
    """Return whether an error tells a user enough: memory ran out, or this package, no library, raised a ValueError."""
    if is_out_of_memory(error):
        return True
    if not isinstance(error, ValueError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this error, or one in its chain, is a failed allocation of memory."""
    return find_out_of_memory(error) is not None


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the failed allocation in this error's chain, or None.

    If memory runs out during the capture of a CUDA graph, the end of the capture fails too, and its
    error replaces the first one. So the chain of causes and contexts is searched, in the order of a
    traceback.
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
    """Return unreferenced memory to the system, so that a larger block finds room."""
    gc.collect()  # an error's frames may be in a reference cycle with their tensors
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def turn_off_cudnn_attention(device: torch.device) -> None:
    """Turn off cuDNN's attention kernel in the whole process, on NVIDIA GPUs.

    PyTorch prefers this kernel on an H100. It makes a new plan for every shape and stride of keys,
    queries and masks, which takes tens of milliseconds, and in decoding each step has another
    shape. The flash and the memory-efficient kernel make no plans.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        logger.info("attention: cuDNN's kernel is off in this process, because it makes a new plan for every text length")


def hardware(device: torch.device, num_processes: int) -> str:
    """Describe the devices of `num_processes` processes, if each process has such a `device`."""
    name = device_name(device)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        name = f"{name}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return name if num_processes == 1 else f"{num_processes} x {name}"


def cpu_model() -> str:
    """Return the processor's name, as far as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
