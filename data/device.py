"""Copies of tensors and arrays to a device, and to the host."""

from collections.abc import Sequence

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


def copied_to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors to the host. The host waits for the `device` once."""
    if device.type == "cpu":
        return [tensor.clone() for tensor in tensors]
    # Copies into pinned memory run at once. For others, which are staged, the host waits for each.
    copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True) for one in tensors]
    torch.accelerator.current_stream(device).synchronize()
    return copies
