"""Counts operations that make the host wait for an accelerator.

These read values as Python numbers, or have shapes that depend on values. They also work on a CPU,
where nothing waits: the count is what would wait on another device. Copies between devices (`to`)
don't count.
"""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.models.decoding import acceptance

METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that read values."""
SIZED_BY_VALUES = ("nonzero", "unique", "unique_consecutive", "bincount")
"""Functions whose results have sizes that depend on values."""
READING_OPERATORS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}) | {
    "aten::unique_consecutive",
    "aten::bincount",
}
"""Operators that these methods and functions, and C++ code, dispatch to. `tolist` and `numpy`
dispatch nothing on a CPU."""


class HostReads(TorchFunctionMode):
    """Records the name of every read in Python code.

    Names are those in `METHODS` and `SIZED_BY_VALUES`, and `mask` for a mask used as an index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in METHODS or name in SIZED_BY_VALUES:
            self.names.append(name)
        # A mask as an index gives a result of unknown size; an index tensor of integers doesn't.
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.names += ["mask" for part in index if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
        return function(*args, **(kwargs or {}))


class ScalarReads(TorchDispatchMode):
    """Counts the reads that reach the dispatcher, including those in C++ code."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket._qualified_op_name in READING_OPERATORS:
            self.count += 1
        return function(*args, **(kwargs or {}))


def decide_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let acceptance choose after all nodes at once, as on an accelerator: on a CPU it reads each token on the way."""
    monkeypatch.setattr(acceptance, "decides_on_host", lambda output: False)
