"""CUDA graphs played on a CPU: the operators of a first run, executed again on the same memory without any Python of ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReplayingRecorder(TorchDispatchMode):
    """Stands in for `CudaGraphRecorder`. Like a capture it fails where the host reads from the device."""

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.num_replays = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.operators = []
        with self:
            output = function()
        operators = self.operators

        def replay() -> None:
            self.num_replays += 1
            for operator, args, kwargs, outputs in operators:
                again = operator(*args, **kwargs)
                for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay, output

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket._qualified_op_name
        assert name not in self.READS, f"{name} can't be captured"
        outputs = operator(*args, **(kwargs or {}))
        self.operators.append((operator, args, kwargs or {}, outputs))
        return outputs
