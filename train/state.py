"""What a process must remember of a training to resume it exactly: copies of tensors on the host, and random numbers."""

import mmap
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

CUDA_HOST_REGISTER_PORTABLE = 1
"""CUDA's cudaHostRegisterPortable: the memory is page-locked for every device."""


class HostCopy:
    """Copies nested values to the host. Tensors go to the same memory every time, so a copy is good until the next one.

    Memory that is used again costs no page faults, and memory that is page-locked (for tensors on CUDA) takes a fraction of the
    time to fill and very long to allocate.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, value: Any, path: str = "") -> Any:
        """A copy of dictionaries, lists, tuples and tensors; anything else is returned as it is. Waits for the device."""
        if isinstance(value, torch.Tensor):
            return self._room(path, value).copy_(value.detach())
        if isinstance(value, Mapping):
            return {key: self(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self(item, f"{path}/{index}") for index, item in enumerate(value))
        return value

    def _room(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._memory.get(path)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            locked = tensor.is_cuda and tensor.numel() > 0
            room = page_locked_like(tensor) if locked else torch.empty(tensor.shape, dtype=tensor.dtype)
            self._memory[path] = room
        return room


class _Registered(mmap.mmap):
    """Memory that CUDA forgets before it is unmapped."""

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor on the host, of page-locked memory, for copies of `tensor`, which has at least one element.

    It takes the bytes of `tensor`, rounded up to pages. PyTorch rounds its own (`pin_memory=True`) up to a power of two: of
    weights and optimizer up to twice as much. Raises MemoryError where the memory can't be locked.
    """
    memory = _Registered(-1, tensor.nbytes)  # shared with forked processes: a copy on write would move it away from the device
    room = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    if error := int(torch.cuda.cudart().cudaHostRegister(room.data_ptr(), tensor.nbytes, CUDA_HOST_REGISTER_PORTABLE)):
        raise MemoryError(
            f"{tensor.nbytes} bytes of host memory for a checkpoint can't be page-locked (CUDA error {error}); free some, or "
            "set train.checkpoint_in_background=false, which needs no copy"
        )
    memory.address = room.data_ptr()
    return room


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all generators that a training on `device` uses, as values that `torch.load` accepts."""
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
