"""Copies from a device to the host that are waited for once."""

from collections.abc import Callable, Mapping

import torch


def start_host_copies(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """Start to copy the tensors of one device to the host; return a function that waits for the copies.

    From a GPU the copies go to pinned memory, so the host continues, and one wait is enough for all
    of them. The function may run in another thread. It returns tensors in pageable memory, because
    pinned memory is scarce: PyTorch uses it again for the next copies. On other devices the tensors
    are ready at once.
    """
    if not any(tensor.is_cuda for tensor in tensors.values()):
        host = {name: tensor.cpu() for name, tensor in tensors.items()}
        return lambda: host
    pinned = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    copied = torch.cuda.current_stream(next(iter(tensors.values())).device).record_event()

    def wait() -> dict[str, torch.Tensor]:
        copied.synchronize()
        return {name: tensor.clone() for name, tensor in pinned.items()}

    return wait
