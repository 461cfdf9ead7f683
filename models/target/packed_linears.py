"""Linear layers on a CPU, with weights in the layout that oneDNN's kernels read.

Decoding multiplies each weight matrix with a handful of rows: one for plain decoding, one per node for a draft tree.
`F.linear` leaves the layout to BLAS, which takes twice as long for two rows as for one; with weights packed beforehand a few
rows cost hardly more than one. Both sides of a comparison must have it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import nn

TYPICAL_ROWS = 8
"""Rows that the packed layout is chosen for; other numbers run as well. Between 1 and 16 it makes no measurable difference."""


@contextmanager
def packed_linears(*modules: nn.Module) -> Iterator[int]:
    """Within, the float32 linear layers of `modules` on a CPU compute with packed copies of their weights. Yields how many.

    The copies take the weights' memory once more. Weights that are changed within are not seen. Rounding may differ from
    `F.linear`'s, as it does between two BLAS libraries. Where torch comes without oneDNN, nothing is packed.
    """
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    linears = dict.fromkeys(module for root in modules for module in root.modules() if available and _can_pack(module))
    try:
        for linear in linears:
            # On the instance, it hides the class's own forward; the weights stay where everybody looks for them.
            vars(linear)["forward"] = _Packed(linear)
        yield len(linears)
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    # Subclasses may compute something else, and quantised weights are kept in a form of their own.
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or "forward" in vars(module):
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


class _Packed:
    def __init__(self, linear: nn.Linear) -> None:
        self.bias = linear.bias.detach() if linear.bias is not None else None
        # What torch.compile emits for a frozen linear layer on a CPU; torch has no other door to it.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return output
