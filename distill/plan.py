"""The plan of a distillation: which process computes which shard.

The content of the shards depends only on the data and the configuration. Shard k holds the k-th
portion of the data, whichever process computes it. The missing shards are dealt out to the present
processes like cards. So a run may be resumed with another number of processes, and no process is
idle after one has died.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from tqdm import tqdm

from ..data.conversations import Conversation
from ..data.manifest import BaseEntry, BaseManifest
from ..data.store import ShardStore
from ..data.types import Example
from ..models.llm.tensor_parallel import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item", Example, Conversation)
PlannedShard = TypeVar("PlannedShard", bound=BaseEntry)
M = TypeVar("M", bound=BaseManifest)


def plan_shards(items: Sequence[T], shard_items: int) -> list[list[T]]:
    """Divide items in order into shards of `shard_items` items; the last shard may be smaller."""
    return [list(items[start : start + shard_items]) for start in range(0, len(items), shard_items)]


def plan_sha256(shards: Sequence[Sequence[Example | Conversation]], data_sha256: str) -> str:
    """Return a digest of the assignment of items to shards; `data_sha256` is the items' digest."""
    digest = hashlib.sha256(data_sha256.encode())
    for shard in shards:
        digest.update(f"\0{len(shard)}".encode())
        for item in shard:
            digest.update(f"\0{item.id}".encode())
    return digest.hexdigest()


def run_shards(
    store: ShardStore[PlannedShard, M],
    manifest: M,
    plan: Sequence[Sequence[Item]],
    accelerator: Accelerator,
    worker: Worker,
    *,
    num_units: Callable[[Sequence[Item]], int],
    make: Callable[[Mapping[int, Sequence[Item]], tqdm], None],
    finish: Callable[[list[PlannedShard]], None],
    unit: str,
) -> M:
    """Compute the missing shards, divided among processes, and return the complete manifest.

    An interrupted run loses at most the current shard of each process. `make` writes the shards of
    one worker and adds their `num_units` to the progress bar. `finish` writes the statistics, in
    the main process.

    Raises ValueError before any work if the folder holds another run's shards, or a damaged shard.
    """
    # 1. Each process checks a part of the existing shards. All processes list the missing shards before any
    # process writes.
    store.require_same(manifest)
    for index in range(accelerator.process_index, len(plan), accelerator.num_processes):
        if entry := store.read_entry(index):
            store.require_intact(entry)
    accelerator.wait_for_everyone()
    pending = [index for index in range(len(plan)) if not store.is_written(index)]
    accelerator.wait_for_everyone()
    # 2. A manifest without shards marks the folder as this run's. A complete folder keeps its manifest.
    if accelerator.is_main_process and not store.is_complete(len(plan)):
        store.save(manifest)
    accelerator.wait_for_everyone()
    # 3. Deal the missing shards like cards, and compute them: of 3 4 7 9 11 the first of two workers gets 3 7 11.
    indices = pending[worker.index :: worker.num_workers]
    if 0 < len(pending) < len(plan):
        logger.info("%d of %d shards are finished; the others are computed now", len(plan) - len(pending), len(plan))
    finished = sum(map(num_units, plan)) - sum(num_units(plan[index]) for index in pending)
    finished //= worker.num_workers  # this worker's share of the earlier work
    total = finished + sum(num_units(plan[index]) for index in indices)
    hide = not (accelerator.is_main_process and indices)
    with progress_bar(total, finished, unit, hide=hide) as progress:
        if indices:
            make({index: plan[index] for index in indices}, progress)
        accelerator.wait_for_everyone()
    # 4. Write the statistics, then the complete manifest.
    if accelerator.is_main_process:
        if store.is_complete(len(plan)):
            logger.info("%s is already complete: %d shards, nothing to do", store.directory, len(plan))
        else:
            entries = store.entries(len(plan))
            assert len(entries) == len(plan), "every process must have finished its shards"
            finish(entries)
            store.save(replace(manifest, shards=entries, complete=True))
    accelerator.wait_for_everyone()
    return store.load()


def progress_bar(num_units: int, finished: int, unit: str, *, hide: bool) -> tqdm:
    """Return a bar that shows every update, at the mean rate: all answers of a batch come at once, and then none for long."""
    return tqdm(
        total=num_units, initial=finished, unit=unit, unit_scale=True, smoothing=0, miniters=1, mininterval=0, disable=hide
    )


def total(kind: type[T], parts: Collection[T]) -> T:
    """Sum dataclasses of numbers, field by field."""
    names = [field.name for field in fields(cast("Any", kind))]
    return kind(**{name: sum(getattr(part, name) for part in parts) for name in names})
