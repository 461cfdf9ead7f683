"""State that a process needs to resume exactly: copies of tensors, and random numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class HostCopy:
    """Copies nested values to the host. Each call overwrites the tensors of the call before.

    The memory is reused, because new memory costs page faults, and pinned memory (for tensors on
    CUDA), which is much faster to fill, takes long to allocate.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, value: Any, path: str = "") -> Any:
        """Copy dictionaries, lists, tuples and tensors; return other values as they are.

        Waits for the device.
        """
        if isinstance(value, torch.Tensor):
            return self._buffer(path, value).copy_(value.detach())
        if isinstance(value, Mapping):
            return {key: self(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self(item, f"{path}/{index}") for index, item in enumerate(value))
        return value

    def _buffer(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._memory.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[path] = buffer
        return buffer


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random generators, as values that `torch.load` accepts."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, list(map(int, keys)), *rest), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a `random_state` of a device of the same type in every generator."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type])
