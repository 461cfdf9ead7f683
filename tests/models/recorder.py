"""Imitation of CUDA graphs on a CPU.

It records the operators of a first run, and executes them again on the same memory. A replay runs
none of our Python code.
"""

import weakref
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = -7


class ReplayingRecorder(TorchDispatchMode):
    """Replacement for `CudaGraphRecorder`.

    Like a real capture, it fails where the host reads from the device.
    """

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

    def forget(self) -> None:
        """Do nothing: this recorder has no pool."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket._qualified_op_name
        assert name not in self.READS, f"{name} can't be captured"
        outputs = operator(*args, **(kwargs or {}))
        self.operators.append((operator, args, kwargs or {}, outputs))
        return outputs


class PoolRecorder(ReplayingRecorder):
    """Recorder that fails where PyTorch's allocator would.

    That is a recording into a pool that has no graph left but has tensors in use:
    `create_or_incref_pool` asserts that such a pool is still used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()
        self.num_pools = 0

    def forget(self) -> None:
        self._graphs: list[Any] = []
        self._outputs: list[Any] = []

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        has_graph = any(graph() is not None for graph in self._graphs)
        in_use = any(output() is not None for output in self._outputs)
        assert has_graph or not in_use, "a recording into a pool whose graphs are gone, with a tensor of it in use"
        self.num_pools += not has_graph
        replay, output = super().__call__(function)
        self._graphs.append(weakref.ref(replay))
        self._outputs += [weakref.ref(leaf) for leaf in leaves(output)]
        return replay, output


class ScratchRecorder(ReplayingRecorder):
    """Recorder whose replays overwrite the outputs of later recordings.

    In PyTorch's pool, these outputs may be in the scratch memory of earlier recordings.
    """

    def __init__(self) -> None:
        super().__init__()
        self._later: list[list[torch.Tensor]] = []
        self.num_overwritten = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        run, output = super().__call__(function)
        # A model's own buffers may be among the outputs: they are in no scratch memory.
        given: set[int] = set()
        made: set[int] = set()
        for _, args, kwargs, results in self.operators:
            given |= storages((args, kwargs)) - made
            made |= storages(results) - given
        for outputs in self._later:
            outputs += [leaf for leaf in leaves(output) if storages(leaf) <= made]
        later: list[torch.Tensor] = []
        self._later.append(later)

        def replay() -> None:
            for tensor in later:
                tensor.fill_(float("nan") if tensor.is_floating_point() else GARBAGE)
            self.num_overwritten += len(later)
            run()

        return replay, output


def storages(tree: Any) -> set[int]:
    """Return the memory of the tensors in a tree."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def leaves(output: Any) -> list[torch.Tensor]:
    """List the tensors of an output, which may be a dataclass."""
    values = [getattr(output, field.name) for field in fields(output)] if is_dataclass(output) else tree_leaves(output)
    return [value for value in values if isinstance(value, torch.Tensor)]
