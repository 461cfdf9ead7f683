"""How fast plain decoding could be at best: every step reads every weight once."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import nn

from ...models.machine import is_out_of_memory, synchronize
from ..records.run_files import Roofline

MAX_BUFFER_BYTES, MAX_ACCELERATOR_BYTES = 1 << 30, 1 << 32
"""An H100 reads a GiB in 0.3 ms, of which starting and ending a kernel would be a visible part."""
LEAST_BUFFER_BYTES = 1 << 20
COLUMNS = 1024
NUM_READS, NUM_QUEUED_READS = 7, 10
"""On a CPU one at a time, and on an accelerator one behind the other."""

Read = Callable[[], torch.Tensor]


def measure_roofline(model: nn.Module, device: torch.device, bandwidth_gbs: float | None = None) -> Roofline:
    """Return the roofline of `model` on `device` with torch's current number of threads.

    `bandwidth_gbs` None measures it.
    """
    num_bytes = weight_bytes(model)
    return Roofline(
        weight_bytes=num_bytes,
        bandwidth_gbs=bandwidth_gbs or measure_bandwidth(num_bytes, device),
        given=bandwidth_gbs is not None,
        cache_bytes=cache_bytes(device),
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that one plain decode step reads.

    All parameters, but of an embedding that is not also the head one row. For a mixture of experts
    this counts every expert, though a step reads only a few.
    """
    embeddings = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(parameter) for module in model.modules() if isinstance(module, nn.Linear) for parameter in module.parameters()}
    unread = sum(weight[1:].nbytes for key, weight in embeddings.items() if key not in heads)
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def measure_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Gigabytes per second of reading a buffer of `num_bytes` again and again, at best.

    On a CPU the buffer has at most MAX_BUFFER_BYTES, on an accelerator MAX_ACCELERATOR_BYTES and
    what fits into its memory. Two kernels read it: a norm, and the matrix-vector product that
    decoding consists of. The better one counts, since a bound is wanted.
    """
    on_cpu = device.type == "cpu"
    matrix = _buffer(min(num_bytes, MAX_BUFFER_BYTES if on_cpu else MAX_ACCELERATOR_BYTES), device)
    vector = torch.ones(matrix.shape[1], device=device)
    reads: list[Read] = [lambda: torch.linalg.vector_norm(matrix), lambda: torch.mv(matrix, vector)]
    seconds = min(_seconds_alone(read) if on_cpu else _seconds_in_a_row(read, device) for read in reads)
    return matrix.nbytes / seconds / 1e9


def _buffer(num_bytes: int, device: torch.device) -> Float[torch.Tensor, "row column"]:
    """Return a matrix of about so many bytes, halved until it fits into memory."""
    try:
        return torch.ones(max(1, num_bytes // (4 * COLUMNS)), COLUMNS, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error) or num_bytes <= LEAST_BUFFER_BYTES:
            raise
    return _buffer(num_bytes // 2, device)


def _seconds_alone(read: Read) -> float:
    """Seconds of the fastest of NUM_READS single reads, by the host's clock.

    A CPU has read when the call returns.
    """
    read()  # not timed: the first call sets things up
    best = float("inf")
    for _ in range(NUM_READS):
        start = time.perf_counter()
        read()
        best = min(best, time.perf_counter() - start)
    return best


def _seconds_in_a_row(read: Read, device: torch.device) -> float:
    """Seconds of one of NUM_QUEUED_READS reads, by the accelerator's own clock.

    Events before the first and after the last. The host launches ahead meanwhile, so neither
    launches nor a wait are in the time, unless the buffer is so small (some ten MB) that it is read
    faster than the next read is launched.
    """
    stream = torch.accelerator.current_stream(device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    read()  # not timed: the first call chooses its kernel
    synchronize(device)
    start.record(stream)
    for _ in range(NUM_QUEUED_READS):
        read()
    end.record(stream)
    synchronize(device)
    return start.elapsed_time(end) / 1e3 / NUM_QUEUED_READS  # it is in milliseconds


def cache_bytes(device: torch.device) -> int | None:
    """Size of the last-level cache of the first CPU, or of the GPU.

    None where it can't be told.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)
