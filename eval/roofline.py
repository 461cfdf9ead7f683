"""How fast plain decoding could be at best: every step reads every weight once."""

import time
from pathlib import Path

import torch
from torch import nn

from .run_files import Roofline

MAX_BUFFER_BYTES = 1 << 30
NUM_READS = 7


def measure_roofline(model: nn.Module, device: torch.device, bandwidth_gbs: float | None = None) -> Roofline:
    """The roofline of `model` on `device` with torch's current number of threads; `bandwidth_gbs` None measures it."""
    num_bytes = weight_bytes(model)
    return Roofline(
        weight_bytes=num_bytes,
        bandwidth_gbs=bandwidth_gbs or measure_bandwidth(num_bytes, device),
        given=bandwidth_gbs is not None,
        cache_bytes=cache_bytes(device),
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that one plain decode step reads: all parameters, but of an embedding that is not also the head one row.

    For a mixture of experts this counts every expert, though a step reads only a few.
    """
    embeddings = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(parameter) for module in model.modules() if isinstance(module, nn.Linear) for parameter in module.parameters()}
    unread = sum(weight[1:].nbytes for key, weight in embeddings.items() if key not in heads)
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def measure_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Gigabytes per second of reading a buffer of `num_bytes` (at most MAX_BUFFER_BYTES) again and again, at best.

    Two kernels read it: a norm, and the matrix-vector product that decoding consists of. The better one counts, since a bound
    is wanted.
    """
    columns = 1024
    rows = max(1, min(num_bytes, MAX_BUFFER_BYTES) // (4 * columns))
    matrix = torch.ones(rows, columns, device=device)
    vector = torch.ones(columns, device=device)
    best = float("inf")
    for read in (lambda: torch.linalg.vector_norm(matrix), lambda: torch.mv(matrix, vector)):
        read().cpu()  # not timed: the first call sets things up
        for _ in range(NUM_READS):
            start = time.perf_counter()
            read().cpu()  # the copy to the host waits for an accelerator
            best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best / 1e9


def cache_bytes(device: torch.device) -> int | None:
    """Size of the last-level cache of the first CPU, or of the GPU; None where it can't be told."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)
