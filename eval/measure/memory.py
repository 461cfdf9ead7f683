"""Continuation after an out-of-memory error."""

import logging
from collections.abc import Callable
from typing import TypeVar

from ...models.llm.hf_target import HFTarget
from ...models.machine import find_out_of_memory, release_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")


def within_memory(work: Callable[[], T], target: HFTarget) -> T | None:
    """Run `work` and return its result, or None when memory runs out.

    In that case the target's caches are released.
    """
    try:
        return work()
    except Exception as error:  # any type: an out-of-memory error may be its cause
        failed_allocation = str(find_out_of_memory(error) or "")
        if not failed_allocation:
            raise
        logger.warning("%s", failed_allocation.partition("\n")[0])
    # Release only after the `except` block: the error's traceback keeps the tensors of all its
    # frames alive.
    target.release_cache()
    release_memory(target.device)
    return None
