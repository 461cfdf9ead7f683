"""Precision of float32 matrix products in training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Use TF32 for float32 matrix products inside the block.

    It is several times faster on a GPU. TF32 has float32's range and 10 bits of its fraction, which
    is enough for gradients. Only the drafter's forward and backward use it. Labelling, evaluation
    and validation don't, since they compare tokens, and the target's states must be the same in all
    of them. On a CPU it changes nothing, because PyTorch's switch may mean bf16 there. A lower
    precision that is already set stays.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cpu" or before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
