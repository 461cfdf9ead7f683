"""Linear layers on a CPU, with weights in the layout that oneDNN's kernels read.

Decoding multiplies each weight matrix with a handful of rows: one for plain decoding, one per node
for a draft tree. `F.linear` leaves the layout to BLAS, which takes twice as long for two rows as
for one. With weights packed beforehand, a few rows cost hardly more than one. In a comparison,
plain decoding and tree decoding must both use packed weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import nn

TYPICAL_ROWS = 8
"""Number of rows that the packed layout is optimised for; other numbers work as well.

Values between 1 and 16 make no measurable difference.
"""


@contextmanager
def packed_linears(*modules: nn.Module) -> Iterator[int]:
    """Compute with packed copies of weights inside the block: float32 linear layers on a CPU.

    Yields the number of packed layers of `modules`. The copies take the weights' memory once more.
    Changes of the weights inside the block have no effect. Rounding may differ from `F.linear`, as
    it does between two BLAS libraries. If torch was built without oneDNN, nothing is packed.
    """
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    linears = dict.fromkeys(module for root in modules for module in root.modules() if available and _can_pack(module))
    try:
        for linear in linears:
            # An attribute of the instance hides the class's forward; `weight` stays as it is.
            vars(linear)["forward"] = _Packed(linear)
        yield len(linears)
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    # Subclasses may compute something else, and quantised weights have another format.
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or "forward" in vars(module):
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


class _Packed:
    def __init__(self, linear: nn.Linear) -> None:
        self.bias = linear.bias.detach() if linear.bias is not None else None
        # torch.compile emits these operators for a frozen linear layer on a CPU. They have no
        # public API.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return output
