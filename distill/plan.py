"""Which process makes which shard: fixed by the data and the configuration alone, before anything runs.

Shard k holds the k-th portion of the data, whichever process makes it and whenever. The shards that
are missing are dealt out to the processes of the moment like cards, so a run may be resumed with
another number of processes, and none is idle after one has died.
"""

import hashlib
import logging
import resource
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from tqdm import tqdm

from ..data.manifest import BaseEntry, BaseManifest
from ..data.store import ShardStore
from ..data.types import Conversation, Example
from ..models.target.tensor_parallel import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item", Example, Conversation)
Entry = TypeVar("Entry", bound=BaseEntry)
M = TypeVar("M", bound=BaseManifest)


def plan_shards(items: Sequence[T], shard_items: int) -> list[list[T]]:
    """Divide examples or conversations, in their order, `shard_items` to a shard; the last one has what is left."""
    return [list(items[start : start + shard_items]) for start in range(0, len(items), shard_items)]


def plan_sha256(shards: Sequence[Sequence[Example | Conversation]], data_sha256: str) -> str:
    """Return a digest of which examples or conversations go into which shard; `data_sha256` is their own."""
    digest = hashlib.sha256(data_sha256.encode())
    for shard in shards:
        digest.update(f"\0{len(shard)}".encode())
        for item in shard:
            digest.update(f"\0{item.id}".encode())
    return digest.hexdigest()


def run_shards(
    store: ShardStore[Entry, M],
    manifest: M,
    plan: Sequence[Sequence[Item]],
    accelerator: Accelerator,
    worker: Worker,
    *,
    num_units: Callable[[Sequence[Item]], int],
    make: Callable[[Mapping[int, Sequence[Item]], tqdm], None],
    finish: Callable[[list[Entry]], None],
    unit: str,
    data_facts: Mapping[str, Any],
) -> M:
    """Make the shards that are missing, each process its part of them, and return the complete manifest.

    An interrupted run loses at most the shard that each process was at. `make` writes the shards of one worker and counts their
    `num_units` in the progress bar; `finish` writes the statistics, in the main process. Raises ValueError before any work
    where the folder holds another run's shards than those of `manifest`, or a damaged one.
    """
    # 1. Each process checks its part of the shards that are there; all list the missing ones before any process writes.
    store.require_same(manifest, data_facts)
    for index in range(accelerator.process_index, len(plan), accelerator.num_processes):
        if entry := store.read_entry(index):
            store.verify(entry)
    accelerator.wait_for_everyone()
    pending = [index for index in range(len(plan)) if not store.is_written(index)]
    accelerator.wait_for_everyone()
    # 2. The manifest without shards says whose shards these are; a complete folder is left alone.
    if accelerator.is_main_process and not store.is_complete(len(plan)):
        store.save_data_facts(data_facts)
        store.save(manifest)
    accelerator.wait_for_everyone()
    # 3. The missing shards, dealt like cards: of 3 4 7 9 11 the first of two workers makes 3 7 11, the other one 4 9.
    if dealt := pending[worker.index :: worker.num_workers]:
        logger.info("%d of %d shards are missing, this process makes %d", len(pending), len(plan), len(dealt))
        finished = sum(map(num_units, plan)) - sum(num_units(plan[index]) for index in pending)
        finished //= worker.num_workers  # this worker's share of what there was
        total = finished + sum(num_units(plan[index]) for index in dealt)
        show = accelerator.is_main_process
        with tqdm(total=total, initial=finished, unit=unit, unit_scale=True, disable=not show) as progress:
            make({index: plan[index] for index in dealt}, progress)
    accelerator.wait_for_everyone()
    # 4. All entries into the complete manifest, after the statistics.
    if accelerator.is_main_process:
        if store.is_complete(len(plan)):
            logger.info("%s is already complete: %d shards, nothing to do", store.directory, len(plan))
        else:
            entries = store.entries(len(plan))
            assert len(entries) == len(plan), "every process has finished its shards"
            finish(entries)
            store.save(replace(manifest, shards=entries, complete=True))
    accelerator.wait_for_everyone()
    return store.load()


def total(kind: type[T], parts: Collection[T]) -> T:
    """Return the sum of dataclasses of numbers, field by field."""
    names = [field.name for field in fields(cast("Any", kind))]
    return kind(**{name: sum(getattr(part, name) for part in parts) for name in names})


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held so far: on a CUDA device that of its tensors, else all of it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB
