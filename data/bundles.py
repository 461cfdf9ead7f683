"""Arrays in one buffer, so that one copy moves all of them to a device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import UInt8

Move = Callable[[torch.Tensor], torch.Tensor]
"""A copy of a tensor to other memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Arrays in one buffer of bytes, those of the widest type first."""

    buffer: UInt8[torch.Tensor, " byte"]
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    """Name, type and shape of each array, in the order of the buffer."""

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Bundle":
        """Copy the arrays into a buffer."""
        # An element must begin at a multiple of its size, so wide types come first.
        names = sorted(arrays, key=lambda name: -arrays[name].itemsize)
        parts = [np.ascontiguousarray(arrays[name]).reshape(-1) for name in names]
        layout = [(name, torch.from_numpy(part[:0]).dtype, arrays[name].shape) for name, part in zip(names, parts, strict=True)]
        joined = np.concatenate([part.view(np.uint8) for part in parts])
        # An empty array becomes a tensor of stride 0, which can't be viewed as another type.
        buffer = torch.from_numpy(joined) if len(joined) else torch.empty(0, dtype=torch.uint8)
        return cls(buffer=buffer, layout=tuple(layout))

    def moved(self, move: Move) -> "Bundle":
        """Return the bundle with `move` applied to its buffer."""
        return replace(self, buffer=move(self.buffer))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arrays as tensors, which are views of the buffer."""
        sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in self.layout]
        parts = self.buffer.split(sizes)
        return {name: part.view(dtype).view(shape) for (name, dtype, shape), part in zip(self.layout, parts, strict=True)}


def move_to(device: torch.device) -> Move:
    """Return the copy to `device`; tensors that are there are returned as they are.

    Memory is pinned for CUDA first: a copy from pageable memory may wait for the device.
    """
    if device.type != "cuda":
        return lambda tensor: tensor.to(device)
    return lambda tensor: (tensor if tensor.is_cuda else tensor.pin_memory()).to(device, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor of the array on `device`: see `move_to`."""
    return move_to(device)(torch.from_numpy(array))
