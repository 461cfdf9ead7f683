"""Upper bound on the speed of plain decoding: every step reads every weight once."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import nn

from ...models.llm.hf_target import HFTarget
from ...models.machine import is_out_of_memory, synchronize
from ..records.run_files import Roofline

MAX_BUFFER_BYTES, MAX_ACCELERATOR_BYTES = 1 << 30, 1 << 32
"""The accelerator's buffer is larger because an H100 reads a GiB in 0.3 ms. Starting and ending a
kernel would be a visible part of that."""
LEAST_BUFFER_BYTES = 1 << 20
COLUMNS = 1024
NUM_READS, NUM_QUEUED_READS = 7, 10
"""Number of timed reads: single ones on a CPU, queued ones on an accelerator."""

Read = Callable[[], torch.Tensor]


def measure_roofline(target: HFTarget) -> Roofline:
    """Compute the roofline of a target with torch's current number of threads.

    A target whose weights are streamed is
    bound by the bytes that each pass reads from its files, and by the rate of these reads so far.
    """
    if target.stream is not None and (num_bytes := target.stream.plan.streamed_bytes):
        rate = target.stream.bytes_per_second / 1e9
        return Roofline(weight_bytes=num_bytes, bandwidth_gbs=rate, cache_bytes=None, streamed=True)
    num_bytes = weight_bytes(target.model)
    if target.stream is not None:  # all of it is in memory, but some units only during their turn
        num_bytes += sum(unit.num_bytes for unit in target.stream.units)
    return Roofline(
        weight_bytes=num_bytes,
        bandwidth_gbs=measure_bandwidth(num_bytes, target.device),
        cache_bytes=cache_bytes(target.device),
        streamed=False,
    )


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of weights that one plain decode step reads.

    All parameters count. An embedding that is not also the head counts one row only. For a mixture
    of experts this counts every expert, though a step reads only a few.
    """
    embeddings = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(parameter) for module in model.modules() if isinstance(module, nn.Linear) for parameter in module.parameters()}
    unread = sum(weight[1:].nbytes for key, weight in embeddings.items() if key not in heads)
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def measure_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Measure the best bandwidth of repeated reads of `num_bytes`, in gigabytes per second.

    On a CPU the buffer has at most MAX_BUFFER_BYTES. On an accelerator it has at most
    MAX_ACCELERATOR_BYTES, and no more than its memory holds. Two kernels read the buffer: a norm,
    and the matrix-vector product that decoding consists of. The faster one counts, since the result
    serves as a bound.
    """
    on_cpu = device.type == "cpu"
    matrix = _buffer(min(num_bytes, MAX_BUFFER_BYTES if on_cpu else MAX_ACCELERATOR_BYTES), device)
    vector = torch.ones(matrix.shape[1], device=device)
    reads: list[Read] = [lambda: torch.linalg.vector_norm(matrix), lambda: torch.mv(matrix, vector)]
    seconds = min(_seconds_alone(read) if on_cpu else _seconds_in_a_row(read, device) for read in reads)
    return matrix.nbytes / seconds / 1e9


def _buffer(num_bytes: int, device: torch.device) -> Float[torch.Tensor, "row column"]:
    """Allocate a matrix of about `num_bytes`, halved until it fits into memory."""
    try:
        return torch.ones(max(1, num_bytes // (4 * COLUMNS)), COLUMNS, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error) or num_bytes <= LEAST_BUFFER_BYTES:
            raise
    return _buffer(num_bytes // 2, device)


def _seconds_alone(read: Read) -> float:
    """Time NUM_READS single reads by the host's clock; return the seconds of the fastest.

    A CPU has finished the read when the call returns.
    """
    read()  # not timed: the first call initializes the kernel
    best = float("inf")
    for _ in range(NUM_READS):
        start = time.perf_counter()
        read()
        best = min(best, time.perf_counter() - start)
    return best


def _seconds_in_a_row(read: Read, device: torch.device) -> float:
    """Time NUM_QUEUED_READS reads by the accelerator's clock; return the seconds of one.

    One event is recorded before the first read, one after the last. The host launches reads ahead,
    so neither launches nor waits are in the time. The exception is a buffer so small (some ten MB)
    that the device reads it faster than the host launches the next read.
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
    return start.elapsed_time(end) / 1e3 / NUM_QUEUED_READS  # elapsed_time is in milliseconds


def cache_bytes(device: torch.device) -> int | None:
    """Read the size of the last-level cache of the first CPU, or of the GPU.

    Returns None where the system doesn't report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)
