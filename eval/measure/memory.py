"""Going on where something doesn't fit into memory."""

import logging
from collections.abc import Callable
from typing import TypeVar

from ...models.machine import find_out_of_memory, release_memory
from ...models.target.hf_target import HFTarget

logger = logging.getLogger(__name__)

T = TypeVar("T")


def within_memory(work: Callable[[], T], target: HFTarget) -> T | None:
    """Return what `work` returns, or None where it ran out of memory.

    The target's caches are then given back.
    """
    try:
        return work()
    except Exception as error:  # of any type: memory may have run out behind it
        failed_allocation = str(find_out_of_memory(error) or "")
        if not failed_allocation:
            raise
        logger.warning("%s", failed_allocation.partition("\n")[0])
    # Not before the error is gone: its traceback keeps the tensors of every frame that it went
    # through.
    target.release_cache()
    release_memory(target.device)
    return None
