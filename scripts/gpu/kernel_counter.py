"""Counts the kernels that a GPU would launch, from operators that run on a CPU."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from host_reads import waits_for_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REST = "rest"
"""The phase of all kernels outside other phases."""
SORT, COPY_AND_WRITE = 4, 2
KERNELS = {
    "aten::sort": SORT,  # CUB's radix sort: fill the indexes, several passes, gather
    # radix selection over many blocks: counts, their sums, the gathering; then a sort of the result
    "aten::topk": 6,
    # a maximum, its guard against infinity, a difference, exp, a sum, a logarithm
    "aten::logsumexp": 6,
    "aten::nonzero": 3,  # count, prefix sums, write
    "aten::scatter": COPY_AND_WRITE,
    "aten::scatter_add": COPY_AND_WRITE,
    "aten::masked_fill": COPY_AND_WRITE,
    "aten::index_put": COPY_AND_WRITE,
    "aten::index_add": COPY_AND_WRITE,
    "aten::nll_loss_backward": COPY_AND_WRITE,
    # rows of the same token are added in sorted order
    "aten::embedding_dense_backward": SORT + 2,
    # on CUDA: sums of rows, gradients, their conversion
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}
"""Number of kernels of operators that launch several, according to PyTorch's sources."""
NO_KERNEL = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")}
"""Operators that only allocate memory."""


class Counted(TorchDispatchMode):
    """Counts kernels, launches, replays, host reads, new tensors and copies to the device by phase.

    Kernels of a replay count as kernels, but not as launches. A replay writes to memory that it has
    had since its recording, so only tensors made outside of replays are new ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = REST
        self.reset()
        self._is_replaying = self._is_paused = False

    def reset(self) -> None:
        self.kernels, self.launches, self.replays, self.host_reads, self.new_tensors = (Counter[str]() for _ in range(5))
        self.copies, self.copied_bytes = Counter[str](), Counter[str]()
        self.new_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            # in inference mode, composite operators arrive undecomposed
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        output = function(*args, **kwargs)
        if not self._is_paused:
            if waits_for_device(function, args):
                self.read()
            new = new_tensors(function, args, kwargs, output)
            self._launch(num_kernels(function, args, kwargs, output))
            if not self._is_replaying:
                self.new_tensors[self.phase] += len(new)
                self.new_bytes += sum(tensor.nbytes for tensor in new)
        return output

    def within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its kernels count for this phase."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            outer, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = outer

        return counted

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        self.replays[self.phase] += 1
        self.launches[self.phase] += 1
        self._is_replaying = True
        try:
            yield
        finally:
            self._is_replaying = False

    def _launch(self, count: int) -> None:
        self.kernels[self.phase] += count
        if not self._is_replaying:
            self.launches[self.phase] += count

    def move_to(self, device: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Replace `bundles.move_to`: a copy from the host is a launch, and a new tensor."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if not (self._is_paused or self._is_replaying):
                self._launch(1)
                self.new_tensors[self.phase] += 1
                self.new_bytes += tensor.nbytes
            return tensor

        return move

    def read(self) -> None:
        if not self._is_paused:
            self.host_reads[self.phase] += 1

    def copy(self, num_bytes: int) -> None:
        """Count a copy to the device."""
        if not self._is_paused:
            self.copies[self.phase] += 1
            self.copied_bytes[self.phase] += num_bytes


def num_kernels(function: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the number of kernels of an operator.

    It is 0 if the operator writes no memory, as for views, allocations and empty tensors.
    """
    name = function.overloadpacket._qualified_op_name
    if function._schema.is_mutable:
        writes = any(tensor.numel() for tensor in _tensors_in(output) or _tensors_in((args, kwargs))[:1])
    else:
        writes = bool(new_tensors(function, args, kwargs, output))
    if not writes or name in NO_KERNEL:
        return 0
    if name == "aten::cat":  # tensors of several types are copied one by one
        parts = [tensor for tensor in _tensors_in(args) if tensor.numel()]
        return len(parts) if len({part.dtype for part in parts}) > 1 else 1
    return KERNELS.get(name, 1)


def new_tensors(function: Any, args: Any, kwargs: Any, output: Any) -> list[torch.Tensor]:
    """Return the outputs of an operator that are in new memory."""
    known = {tensor.untyped_storage()._cdata for tensor in _tensors_in((args, kwargs))}
    return [tensor for tensor in _tensors_in(output) if tensor.numel() and tensor.untyped_storage()._cdata not in known]


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class CountingRecorder:
    """Replaces `CudaGraphRecorder`: a replay calls the function, and counts as one launch."""

    def __init__(self, counted: Counted) -> None:
        self.counted, self.num_recordings = counted, 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.num_recordings += 1
        output = function()

        def replay() -> None:
            with self.counted.replaying():
                again = function()
            with self.counted.paused():
                for old, new in zip(_tensors(output), _tensors(again), strict=True):
                    old.copy_(new)

        return replay, output

    def forget(self) -> None:
        """Do nothing: no recording is kept."""


class SkippingRecorder:
    """Replaces `CudaGraphRecorder`: a replay does nothing, so that only the host's work is left."""

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), function()

    def forget(self) -> None:
        """Do nothing: no recording is kept."""


def _tensors(output: Any) -> list[torch.Tensor]:
    values = [getattr(output, field.name) for field in fields(output)] if is_dataclass(output) else [output]
    return [value for value in values if isinstance(value, torch.Tensor)]
