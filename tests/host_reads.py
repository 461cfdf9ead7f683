"""Counts what makes the host wait for an accelerator, on a CPU."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchFunctionMode):
    """Counts what makes the host wait for an accelerator: values read as Python numbers, and shapes that depend on values."""

    METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.METHODS:
            self.names.append(name)
        # A mask as an index has a result of unknown size; so has no index tensor of integers.
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.names += ["mask" for part in index if isinstance(part, torch.Tensor) and part.dtype == torch.bool]
        return function(*args, **(kwargs or {}))


class ScalarReads(TorchDispatchMode):
    """Catches reads that C++ code makes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket._qualified_op_name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            self.count += 1
        return function(*args, **(kwargs or {}))
