"""Copies of tensors and arrays to a device."""

from collections.abc import Callable

import numpy as np
import torch

Move = Callable[[torch.Tensor], torch.Tensor]
"""A copy of a tensor to other memory."""


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
