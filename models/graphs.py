"""CUDA graphs: a function's kernels are recorded once for each shape of its inputs, and replayed without Python.

A decode step launches hundreds of kernels, and a large card finishes many of them sooner than Python launches the next one.
What is recorded must not depend on the host: no numbers read from the device, the same memory and the same shapes each time.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from .decoding.sampling import Randomness
from .decoding.tree import DraftTree
from .interfaces import Drafter

Output = TypeVar("Output")

Recorder = Callable[[Callable[[], Output]], tuple[Callable[[], Any], Output]]
"""Runs a function once, recording. Returns what does the same again, and the output, which each replay overwrites."""

MAX_RECORDINGS = 64
"""Recordings kept, the oldest being dropped: rows that leave a batch make new shapes, and each keeps its outputs' memory."""

WARM_UP_CALLS = 3
"""Calls before the recording, in which libraries set themselves up; what PyTorch's documentation advises."""


class GraphedFunction(Generic[Output]):
    """A function of tensors, recorded at its first call with inputs of such shapes and under such a `key`, then replayed.

    The output is overwritten by later calls: use it, or copy it, before the next one. The function must give the same when
    called twice, and may depend on nothing but its inputs, memory that stays where it is, and `key`.
    """

    def __init__(self, function: Callable[..., Output], recorder: Recorder[Output] | None = None) -> None:
        self.function = function
        self.recorder = recorder or CudaGraphRecorder()
        self._recorded: dict[Hashable, tuple[tuple[torch.Tensor, ...], Callable[[], Any], Output]] = {}

    def __call__(self, *inputs: torch.Tensor, key: Hashable = None) -> Output:
        shapes = (key, *(each.shape for each in inputs))
        if shapes not in self._recorded:
            with torch.inference_mode(False):  # written in whatever mode
                own = tuple(each.clone() for each in inputs)
            if len(self._recorded) == MAX_RECORDINGS:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[shapes] = own, *self.recorder(lambda: self.function(*own))
        own, replay, output = self._recorded[shapes]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        replay()
        return output

    def __len__(self) -> int:
        """How many recordings there are. Each keeps the memory of its outputs."""
        return len(self._recorded)

    def forget(self) -> None:
        """Drop all recordings: the memory that they write has moved."""
        self._recorded.clear()


class CudaGraphRecorder:
    """Records with `torch.cuda.graph`. Its graphs share their scratch memory, so they never run side by side."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Output]) -> tuple[Callable[[], Any], Output]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the model reads numbers from the device, as mixtures of experts may
            raise ValueError(f"this model can't be recorded as a CUDA graph ({error}); turn target.cuda_graphs off") from error
        return graph.replay, output


class GraphedDrafter:
    """A drafter replayed as a CUDA graph: one whose `propose` reads only its arguments and draws nothing at random (ReDrafter).

    The tree that it proposes is overwritten by its next one. Its settings must stay as they are.
    """

    def __init__(self, drafter: Drafter[torch.Tensor], recorder: Recorder[DraftTree] | None = None) -> None:
        self.drafter = drafter
        self.max_nodes, self.feature_layers = drafter.max_nodes, drafter.feature_layers
        self.init_state, self.advance, self.select = drafter.init_state, drafter.advance, drafter.select
        self._propose = GraphedFunction(drafter.propose, recorder)

    def propose(self, state: torch.Tensor, last_token: torch.Tensor, *, generator: Randomness = None) -> DraftTree:
        return self._propose(state, last_token)
