"""Who answers or labels what: fixed by the data and the configuration alone, before anything runs.

Shard k holds the k-th portion of the data, whoever makes it and whenever. Shards that are missing are dealt out to the
processes of the moment like cards, so a run may go on with another number of them, and none is idle after one has died.
"""

import hashlib
import resource
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator

from ..data.types import Conversation, Example
from ..models.target.tensor_parallel import Worker

T = TypeVar("T")
Shards = list[list[Example]]


def plan_shards(items: Sequence[T], shard_items: int) -> list[list[T]]:
    """Examples or conversations in their order, `shard_items` to a shard; the last one has what is left."""
    return [list(items[start : start + shard_items]) for start in range(0, len(items), shard_items)]


def plan_sha256(shards: Sequence[Sequence[Example | Conversation]], data_sha256: str) -> str:
    """A digest of which examples or conversations go into which shard; `data_sha256` is their own."""
    digest = hashlib.sha256(data_sha256.encode())
    for shard in shards:
        digest.update(f"\0{len(shard)}".encode())
        for item in shard:
            digest.update(f"\0{item.id}".encode())
    return digest.hexdigest()


def pending_shards(
    accelerator: Accelerator, num_shards: int, *, check: Callable[[int], None], is_written: Callable[[int], bool]
) -> list[int]:
    """The shards that are missing, the same in every process, once each has checked its part of those that are there."""
    for index in range(accelerator.process_index, num_shards, accelerator.num_processes):
        check(index)
    accelerator.wait_for_everyone()  # what was damaged is told, or gone
    pending = [index for index in range(num_shards) if not is_written(index)]
    accelerator.wait_for_everyone()  # all have looked before anybody writes
    return pending


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has held so far: on a CUDA device that of its tensors, else all of the process's own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


def deal(pending: Sequence[int], worker: Worker) -> list[int]:
    """The shards among the pending ones that a worker makes. For example, 3 4 7 9 11 among two: 3 7 11 and 4 9."""
    return list(pending[worker.index :: worker.num_workers])
