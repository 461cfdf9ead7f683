"""CUDA graphs: a function's kernels are recorded once for each shape of its inputs, and replayed without Python.

A decode step launches hundreds of kernels, and a large card finishes many of them sooner than Python launches the next one.
What is recorded must not depend on the host: no numbers read from the device, the same memory and the same shapes each time.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from ..machine import is_out_of_memory

Output = TypeVar("Output")

MAX_RECORDINGS = 256
"""Recordings kept; beyond them the one is dropped that was used longest ago. Batch sizes, tree
sizes and lengths make many shapes: 5 x 5 x 4 for batches of up to 16, trees in five buckets, and
texts of 2,048 tokens; and so for each setting of a drafter."""

WARM_UP_CALLS = 3
"""Calls before the recording, in which libraries set themselves up; what PyTorch's documentation advises."""


@runtime_checkable
class Recorder(Protocol):
    """Records functions, so that they can be run again without Python."""

    def __call__(self, function: Callable[[], Output]) -> tuple[Callable[[], Any], Output]:
        """Run a function once, recording. Return what runs it again, and its output, which each
        replay overwrites."""

    def forget(self) -> None:
        """Take note that all recordings are gone."""


class GraphedFunction(Generic[Output]):
    """A function of tensors, recorded at its first call with inputs of such shapes and under such a `key`, then replayed.

    The output is overwritten by later calls: use it, or copy it, before the next one. The function must give the same when
    called twice, and may depend on nothing but its inputs, memory that stays where it is, and `key`.
    """

    def __init__(self, function: Callable[..., Output], recorder: Recorder | None = None) -> None:
        self.function = function
        self.recorder = recorder or CudaGraphRecorder()
        self._recorded: OrderedDict[Hashable, tuple[tuple[torch.Tensor, ...], Callable[[], Any], Output]] = OrderedDict()

    def __call__(self, *inputs: torch.Tensor, key: Hashable = None) -> Output:
        shapes = (key, *(tensor.shape for tensor in inputs))
        if shapes not in self._recorded:
            with torch.inference_mode(False):  # so that they can be written in any mode
                static = tuple(tensor.clone() for tensor in inputs)
            if len(self._recorded) == MAX_RECORDINGS:
                self._recorded.popitem(last=False)
            self._recorded[shapes] = static, *self.recorder(lambda: self.function(*static))
        self._recorded.move_to_end(shapes)  # the first is the one that was used longest ago
        static, replay, output = self._recorded[shapes]
        for recorded_input, new_input in zip(static, inputs, strict=True):
            recorded_input.copy_(new_input)
        replay()
        return output

    def __len__(self) -> int:
        """Return the number of recordings. Each keeps the memory of its outputs."""
        return len(self._recorded)

    def forget(self) -> None:
        """Drop all recordings: the memory that they write has moved."""
        self._recorded.clear()
        self.recorder.forget()


class CudaGraphRecorder:
    """Records with `torch.cuda.graph`. Its graphs share their scratch memory, so they never run side by side."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Output]) -> tuple[Callable[[], Any], Output]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                function()
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()
        except RuntimeError as error:
            self._leave_capture(stream)
            if is_out_of_memory(error):
                raise
            # The model reads numbers from the device, as mixtures of experts may.
            raise ValueError(f"this model can't be recorded as a CUDA graph ({error}); turn target.cuda_graphs off") from error
        return graph.replay, output

    def forget(self) -> None:
        """Take a new pool for later recordings.

        A pool without graphs is closed. PyTorch asserts against another recording in it while a
        tensor of it is alive, and the last output of a dropped recording may well be.
        """
        self._pool = None

    def _leave_capture(self, stream: Any) -> None:
        """Go back to `stream`: where a capture fails, `torch.cuda.graph` raises before it leaves
        the stream that it captured."""
        torch.cuda.set_stream(stream)
        self.forget()  # what the capture has allocated stays in its pool


class SharedBuffer:
    """Memory that the outputs of many recordings share, since only the latest of them is looked at.

    Without it each recording would keep an output of its own: the logits of 16 rows and 61 entries
    over 128,000 tokens take 250 MB in 16 bits.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def hold(self, values: torch.Tensor) -> torch.Tensor:
        """Copy `values` here. Where they don't fit, new memory is taken; what was recorded with the
        old keeps that."""
        if self._memory is None or self._memory.dtype != values.dtype or len(self._memory) < values.numel():
            with torch.inference_mode(False):  # so that it can be written in any mode
                self._memory = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
        return self._memory[: values.numel()].view(values.shape).copy_(values)
