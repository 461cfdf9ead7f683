"""Counts operations that make the host wait for an accelerator.

These read values as Python numbers, or have shapes that depend on values. They also work on a CPU,
where nothing waits: the count is what would wait on another device. This module is next to the
scripts that import it, since they are run from here and not installed. The tests load it, too
(tests/host_reads.py).

Copies between devices (`to`) don't count as reads. They wait if the host's memory is pageable;
`DeviceCopies` counts those to a device.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
"""Methods of a tensor that read values."""
SCALAR_OPERATORS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
"""Operators that the methods, and C++ code, dispatch to. `tolist` and `numpy` dispatch nothing on a
CPU."""
SIZED_OPERATORS = frozenset({"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount"})
"""Operators with a result whose size depends on values."""


class HostReads(TorchFunctionMode):
    """Records the name of every read in Python code.

    Names are those in `METHODS`, `unique`, and `mask` for a mask used as an index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in METHODS or name == "unique":
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
        if function.overloadpacket._qualified_op_name in SCALAR_OPERATORS:
            self.count += 1
        return function(*args, **(kwargs or {}))


class Transfers(TorchFunctionMode):
    """Calls `on_read` for each read that no operator shows on a CPU.

    Together with `waits_for_device` it counts every read once: `tensor.cpu().numpy()` is one.
    """

    def __init__(self, on_read: Any) -> None:
        super().__init__()
        self.on_read = on_read
        self._on_host: torch.Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("tolist", "cpu", "numpy") and args[0] is not self._on_host:
            self.on_read()
        output = function(*args, **(kwargs or {}))
        if name == "cpu":
            self._on_host = output
        return output


class DeviceCopies(TorchFunctionMode):
    """Calls `on_copy` with the bytes of each tensor of integers or of a mask that is moved to a device.

    On a CPU nothing is copied: the count is what would be copied to another device. Such tensors are
    made on the host. Those of other types aren't counted: most are on the device already.
    """

    def __init__(self, on_copy: Any) -> None:
        super().__init__()
        self.on_copy = on_copy

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "to":
            to_device = isinstance(kwargs.get("device", (*args, None)[1]), torch.device)
            if to_device and not args[0].is_floating_point():
                self.on_copy(args[0].nbytes)
        return function(*args, **kwargs)


def waits_for_device(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator makes the host wait on an accelerator.

    It does if it returns a number, a result of unknown size, or uses a mask as an index.
    """
    name = function.overloadpacket._qualified_op_name
    if name in SCALAR_OPERATORS or name in SIZED_OPERATORS or function is torch.ops.aten.repeat_interleave.Tensor:
        return True
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        # Exception: a mask under which one value is written, since that is `masked_fill`.
        fills = name != "aten::index" and args[2].numel() == 1
        return not fills and any(index is not None and index.dtype == torch.bool for index in args[1])
    return False


@contextmanager
def patched_reads() -> Iterator[Mapping[str, int]]:
    """Count calls of `METHODS` by patching the tensor class.

    Compiled code then runs as usual. Under a torch mode it would not.
    """
    counts: Counter[str] = Counter()

    def counted(name: str, method: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return read

    for name in METHODS:
        setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    try:
        yield counts
    finally:
        for name in METHODS:
            delattr(torch.Tensor, name)  # the base class has them
