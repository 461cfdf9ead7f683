"""Number of parts that attention splits the keys of long texts into, measured on the GPU.

CUDA's kernel for masks is slow for few texts of many keys (see `split_attention`). What parts gain
depends on the GPU and on the shape of a pass: rows, queries, keys, heads. So each number of parts is
timed on the device that decodes, with the keys and values of all layers in turn, as a pass reads
them. If passes are recorded, so is this work: a replay doesn't wait for launches.

Passes without a mask need none of this: prompts, and eager plain decoding of equally long rows.
PyTorch's flash attention computes them, and splits keys itself.

All numbers of parts give the same attention up to rounding. But rounding can change a token whose
logits are nearly tied. So a choice must not change while texts are decoded and compared. It

- depends only on the shape of a pass, so plain decoding and all drafters share it;
- is made before a batch's first pass of a shape, for all lengths that the batch has room for, and
  never inside a recording or compiled code;
- stays the same in a process, and is kept in a file of this machine for later processes.

Passes of different shapes differ by rounding anyway: plain decoding reads one token per row, and
verification reads a tree. `outrider certify` allows for such differences.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..machine import cpu_model, device_name, synchronize
from .attention_kernels import has_kernel, on_cuda
from .cuda_graphs import CudaGraphRecorder
from .machine_file import MachineFile
from .split_attention import PARTS, can_split, split_mask
from .tree_attention import IMPLEMENTATION
from .tree_cache import TreeCache

Name = TypeVar("Name")

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the measurement."""
MIN_KEYS = 1024
"""Attention to fewer keys is a small share of a pass. A power of two."""
MAX_BATCH = 4
"""With more rows, the kernel keeps a GPU busy without parts."""
MIN_GAIN = 1.05
"""Smallest ratio of times that decides for parts; a smaller one may be chance."""
NUM_ROUNDS = 5
"""How often each number of parts is timed, after a warm-up. The shortest time counts."""

LayerStates = Sequence[tuple[torch.Tensor, ...]]
"""Keys and values of each layer, [batch, kv_head, key, head_dim]."""
Seconds = dict[int, float]
"""Seconds of all layers' attention in a pass, by number of parts."""


class Layers(NamedTuple):
    """The layers whose attention is timed: all layers like the first one."""

    device: torch.device
    dtype: torch.dtype
    num_layers: int
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int


class Shape(NamedTuple):
    """Shape of the attention in a pass.

    The number of queries is rounded up to a power of two, and the number of keys down.
    """

    layers: Layers
    is_recorded: bool
    batch: int
    num_queries: int
    num_keys: int

    @property
    def name(self) -> str:
        """Key of the shape in the machine's file."""
        _, dtype, *sizes = self.layers
        numbers = [*sizes, self.batch, self.num_queries, self.num_keys]
        return f"{dtype} {'x'.join(map(str, numbers))}" + " recorded" * self.is_recorded


_CHOSEN: dict[Shape, int] = {}
"""Numbers of parts that this process has chosen. They never change."""


class KeySplits:
    """Numbers of parts for the passes of one model.

    `is_recorded`: passes run in CUDA graphs, or as compiled code.
    """

    def __init__(self, model: PreTrainedModel, *, is_recorded: bool) -> None:
        self.model, self.is_recorded = model, is_recorded
        self._layers: Layers | None = None

    def prepare(self, cache: TreeCache) -> None:
        """Choose for the masked pass that begins, and for longer texts up to the cache's capacity.

        A new shape takes up to some seconds, if the machine's file has no times of it.
        """
        largest = self._shape(cache, cache.capacity)
        if largest is None or largest in _CHOSEN:
            return
        # Layers that have read nothing have no keys to measure with. That is so if texts left a batch
        # of another target and came to this one; their first pass is whole.
        if states := _like_the_first(cache.states(cache.capacity)):
            assert not torch.compiler.is_compiling()  # in a recording, CUDA raises an error at `synchronize`
            exponents = range(MIN_KEYS.bit_length() - 1, largest.num_keys.bit_length())
            _choose_all([largest._replace(num_keys=1 << exponent) for exponent in exponents], states)

    def num_parts(self, cache: TreeCache) -> int:
        """Return the number of parts of the masked pass that began; 1 if nothing was chosen."""
        shape = self._shape(cache, cache.extent)
        num_parts = 1 if shape is None else _CHOSEN.get(shape, 1)
        return num_parts if can_split(cache.extent, num_parts) else 1

    def _shape(self, cache: TreeCache, num_columns: int) -> Shape | None:
        """Return the shape of a pass over these columns; None if it is never split."""
        if not on_cuda(cache.lengths.device) or num_columns < MIN_KEYS or cache.batch > MAX_BATCH:
            return None
        # Only layers that call our attention function can read a mask in parts.
        if self.model.config.get_text_config()._attn_implementation != "sdpa" or not self.model._supports_attention_backend:
            return None
        self._layers = self._layers or _layers(self.model, cache.states(1))
        if self._layers is None:
            return None
        num_queries, num_keys = 1 << (cache.num_written - 1).bit_length(), 1 << (num_columns.bit_length() - 1)
        return Shape(self._layers, self.is_recorded, cache.batch, num_queries, num_keys)


def _layers(model: PreTrainedModel, states: LayerStates) -> Layers | None:
    """Describe the layers; None if they have read nothing, or the kernel can't read a layer's keys."""
    if not states or not all(has_kernel(*layer) and layer[0].dtype == model.dtype for layer in states):
        return None
    config = model.config.get_text_config()
    key, value = states[0]
    num_groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return Layers(
        device=key.device,
        dtype=key.dtype,
        num_layers=len(_like_the_first(states)),
        num_heads=key.shape[1] * num_groups,
        num_kv_heads=key.shape[1],
        key_width=key.shape[3],
        value_width=value.shape[3],
    )


def _like_the_first(states: LayerStates) -> LayerStates:
    """Return the layers whose keys and values have the shapes and the device of the first layer's."""
    looks = [[(tensor.shape, tensor.device) for tensor in layer] for layer in states]
    return [layer for layer, look in zip(states, looks, strict=True) if look == looks[0]]


def choose(seconds: Mapping[int, float]) -> int:
    """Return the fastest number of parts; 1 unless the fastest is clearly faster, or without times."""
    if not seconds:
        return 1
    fastest = min(seconds, key=lambda num_parts: seconds[num_parts])
    return fastest if seconds[1] > MIN_GAIN * seconds[fastest] else 1


def _choose_all(shapes: Sequence[Shape], states: LayerStates) -> None:
    """Choose for shapes that differ in their number of keys; measure what the file lacks."""
    # 1. Times in the machine's file, and of the other shapes.
    file = MachineFile("attention", _machine(shapes[0].layers.device))
    known = file.read(_checked)
    missing = [shape for shape in shapes if shape.name not in known]
    if missing:
        started = time.perf_counter()
        measured = {shape.name: _measure_shape(shape, states) for shape in missing}
        logger.info("attention: measured split keys in %.1f s; kept in %s", time.perf_counter() - started, file.path)
        # Another process may have added times meanwhile. A clock that stood still gave none.
        known = {**measured, **file.read(_checked)}
        file.write({name: seconds for name, seconds in known.items() if all(map(math.isfinite, seconds.values()))})
    # 2. Choices of this process stay as they are.
    for shape in shapes:
        chosen = _CHOSEN.setdefault(shape, choose(known[shape.name]))
        logger.info("attention: %d parts for %s", chosen, shape.name)


def _measure_shape(shape: Shape, states: LayerStates) -> Seconds:
    first_keys = [tuple(tensor[:, :, : shape.num_keys] for tensor in layer) for layer in states]
    return measure(first_keys, num_heads=shape.layers.num_heads, num_queries=shape.num_queries, is_recorded=shape.is_recorded)


@torch.inference_mode()
def measure(states: LayerStates, *, num_heads: int, num_queries: int, is_recorded: bool) -> Seconds:
    """Time all layers' attention with each number of parts, in turns.

    The time is infinite if the clock stood still.
    """
    # Queries as a projection lays them out in memory, and a mask that hides nothing.
    key, _ = states[0]
    query = key.new_ones(len(key), num_queries, num_heads, key.shape[3]).transpose(1, 2)
    mask = key.new_zeros(len(key), 1, num_queries, key.shape[2])
    works = {num_parts: partial(_attend, query, states, split_mask(mask, num_parts)) for num_parts in PARTS}
    return time_in_turns(works, key.device, is_recorded=is_recorded)


def time_in_turns(works: Mapping[Name, Callable[[], None]], device: torch.device, *, is_recorded: bool) -> dict[Name, float]:
    """Return the seconds of each work on a device. Recorded work is timed as a replay."""
    runs: dict[Name, Callable[[], Any]] = dict(works)
    if is_recorded:
        runs = {name: CudaGraphRecorder()(work)[0] for name, work in works.items()}
    best = dict.fromkeys(runs, math.inf)
    for number in range(1 + NUM_ROUNDS):
        for name, run in runs.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            seconds = time.perf_counter() - start
            # The first round warms up. A clock may stand still or jump back.
            if number > 0 and seconds > 0:
                best[name] = min(best[name], seconds)
    return best


def _attend(query: torch.Tensor, states: LayerStates, mask: torch.Tensor) -> None:
    """Attend to the keys and values of each layer, as the layers of a pass do."""
    attention, module = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION], nn.Module()
    for key, value in states:
        attention(module, query, key, value, mask)


def _machine(device: torch.device) -> dict[str, Any]:
    """Describe all that the times depend on. Without a recording they include the host's launches."""
    return {
        "format": [FORMAT, [*PARTS]],
        "device": device_name(device),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _checked(values: Mapping[str, Any]) -> Seconds:
    """Return a file's times. Raises ValueError if they aren't the times of PARTS."""
    seconds = {int(num_parts): float(value) for num_parts, value in values.items()}
    if (*seconds,) != PARTS or not all(0 < value < math.inf for value in seconds.values()):
        raise ValueError(f"seconds above 0 are needed for each of {PARTS} parts")
    return seconds
