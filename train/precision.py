"""How precisely a training multiplies matrices of float32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Multiply matrices of float32 in TF32 within the block, several times as fast on a GPU; change nothing on a CPU.

    TF32 has float32's range and 10 bits of its fraction, which gradients can bear. Only the drafter's forward and backward run
    so. Labelling, evaluation and validation compare tokens, and the target's states must be the same wherever they are
    computed. On a CPU the same switch of PyTorch may mean bf16. A process that allows less precise products already keeps them.
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
