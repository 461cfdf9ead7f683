"""CUDA graphs: kernels recorded once per shape of the inputs, and replayed without Python.

A decode step launches hundreds of kernels, and a large GPU finishes many of them sooner than Python
launches the next one. Recorded work must not depend on the host: it reads no numbers from the
device, and uses the same memory and the same shapes each time.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch

from ..machine import is_out_of_memory

Output = TypeVar("Output")

MAX_RECORDINGS = 256
"""Most recordings kept; then the least recently used one is dropped.

Batch sizes, tree sizes and lengths make many shapes: 5 x 5 x 4 for batches of up to 16, trees in
five buckets, and texts of 2,048 tokens. Each setting of a drafter has as many.
"""

WARM_UP_CALLS = 3
"""Calls before the recording, in which libraries initialise; PyTorch's documentation advises
this."""


@runtime_checkable
class Recorder(Protocol):
    """Recorder of functions, which replays them without Python."""

    def __call__(self, function: Callable[[], Output]) -> tuple[Callable[[], Any], Output]:
        """Run a function once and record it. Return the replay function, and the output.

        Each replay overwrites the output.
        """

    def forget(self) -> None:
        """Drop all state that belongs to earlier recordings, which are gone."""


class GraphedFunction(Generic[Output]):
    """Function of tensors, recorded once for each `key` and set of input shapes.

    Later calls overwrite the output: use it, or copy it, before the next call. The function must be
    deterministic. It may depend on its inputs, on memory at a fixed address, and on `key`, but on
    nothing else.

    A recording runs the function several times, so a repetition must leave the same memory as one run.
    Other functions need `neutral`: from the inputs of a call it returns inputs of the same shapes with
    which the function changes nothing.
    """

    num_recorded: ClassVar[int] = 0
    """Recordings of all functions of this process."""

    def __init__(
        self,
        function: Callable[..., Output],
        recorder: Recorder | None = None,
        *,
        neutral: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    ) -> None:
        self.function, self.neutral, self._recorder = function, neutral, recorder
        self._recorded: OrderedDict[Hashable, tuple[tuple[torch.Tensor, ...], Callable[[], Any], Output]] = OrderedDict()

    def __call__(self, *inputs: torch.Tensor, key: Hashable = None) -> Output:
        shapes = (key, *(tensor.shape for tensor in inputs))
        # 1. Record the function if these shapes are new, on inputs at a fixed address. It may write to
        # memory that the inputs are parts of, so they are copied before.
        if shapes not in self._recorded:
            inputs = tuple(tensor.clone() for tensor in inputs)
            with torch.inference_mode(False):  # the copies can then be written in any mode
                static = tuple(tensor.clone() for tensor in (self.neutral(*inputs) if self.neutral else inputs))
            if len(self._recorded) == MAX_RECORDINGS:
                self._recorded.popitem(last=False)
            self._recorded[shapes] = static, *self.recorder(lambda: self.function(*static))
            GraphedFunction.num_recorded += 1
        # 2. Replay it with the new inputs. The first recording is the least recently used one.
        self._recorded.move_to_end(shapes)
        static, replay, output = self._recorded[shapes]
        copy_all(static, inputs)
        replay()
        return output

    @property
    def recorder(self) -> Recorder:
        """The recorder, made when it is first needed: many functions are never called."""
        self._recorder = self._recorder or CudaGraphRecorder()
        return self._recorder

    def __len__(self) -> int:
        """Return the number of recordings. Each recording keeps the memory of its outputs."""
        return len(self._recorded)

    def forget(self) -> None:
        """Drop all recordings: the memory that they write to has moved."""
        self._recorded.clear()
        if self._recorder is not None:
            self._recorder.forget()


def num_graphs() -> int:
    """Count the graphs that this process has recorded, and those that torch.compile has built."""
    compiler = sys.modules.get("torch._dynamo.utils")
    num_compiled = 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]
    return GraphedFunction.num_recorded + int(num_compiled)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, by one kernel for all tensors of a type."""
    by_dtype: defaultdict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        if target.numel():
            by_dtype[target.dtype][0].append(target)
            by_dtype[target.dtype][1].append(source)
    for same_type_targets, same_type_sources in by_dtype.values():
        torch._foreach_copy_(same_type_targets, same_type_sources, non_blocking=True)


class CudaGraphRecorder:
    """Records with `torch.cuda.graph`; graphs share scratch memory, so none run in parallel.

    The outputs of a recording may be in the scratch memory of earlier ones, whose replay overwrites
    them. So functions whose outputs are read after each other's calls need recorders of their own.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Output]) -> tuple[Callable[[], Any], Output]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        # 1. Warm up in a side stream, as PyTorch's documentation advises.
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                function()
        stream.wait_stream(side)
        # 2. Record.
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()
        except RuntimeError as error:
            self._leave_capture(stream)
            if is_out_of_memory(error):
                raise
            # Some models read numbers from the device, for example mixtures of experts.
            raise ValueError(f"this model can't be recorded as a CUDA graph ({error}); turn target.cuda_graphs off") from error
        return graph.replay, output

    def forget(self) -> None:
        """Use a new memory pool for later recordings.

        A pool without graphs is closed. A closed pool can't be used for another recording while one
        of its tensors is alive; PyTorch asserts that. The last output of a dropped recording may
        still be alive.
        """
        self._pool = None

    def _leave_capture(self, stream: Any) -> None:
        """Return to `stream`: when a capture fails, `torch.cuda.graph` doesn't leave its stream."""
        torch.cuda.set_stream(stream)
        self.forget()  # memory that the capture has allocated stays in its pool


class SharedBuffer:
    """Memory shared by the outputs of many recordings, of which only the latest is read.

    Otherwise each recording would keep its own output: the logits of 16 rows and 61 entries over
    128,000 tokens take 250 MB in 16 bits.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def hold(self, values: torch.Tensor) -> torch.Tensor:
        """Copy `values` into the shared memory, and return the copy.

        If they don't fit, new memory is allocated. Earlier recordings keep the old memory.
        """
        if self._memory is None or self._memory.dtype != values.dtype or len(self._memory) < values.numel():
            with torch.inference_mode(False):  # the memory can then be written in any mode
                self._memory = torch.empty(values.numel(), dtype=values.dtype, device=values.device)
        return self._memory[: values.numel()].view(values.shape).copy_(values)
