"""Copies of tensors and arrays to a device."""

import numpy as np
import torch


def to_device(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values as a tensor on `device`; a tensor that is there is returned as it is.

    Memory is pinned for CUDA first: a copy from pageable memory may wait for the device.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_cuda else tensor.pin_memory()).to(device, non_blocking=True)
