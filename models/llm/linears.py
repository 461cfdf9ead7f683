"""Linear layers on a CPU, each computed in the way that is fastest on this machine.

Decoding multiplies each weight matrix with a handful of rows: one for plain decoding, one per node
for a draft tree. Four ways compute the same product:

- rows first: `F.linear` on the weights as they are stored, [out, in];
- columns first: `F.linear` on the same weights with the memory order of their transpose;
- packed: a oneDNN kernel on a second copy of the weights, in a layout of its own;
- native: `F.linear` without oneDNN, for one row. In bfloat16 PyTorch's own kernel is faster on some processors.

Which one is fastest depends on the processor, the number type, the matrix and the number of rows.
So a stage that decodes times the ways, for the shapes with the most weights. Plain decoding and trees use
the same choice, first the fastest for plain decoding: otherwise a speedup would partly be a kernel's. A run
records it, because another process may measure otherwise, and the ways round differently. Training chooses nothing.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice, product
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from ..machine import available_memory

logger = logging.getLogger(__name__)

TYPES = (torch.float32, torch.bfloat16)
"""Types with fast kernels on some CPUs."""
MIN_ELEMENTS = 1 << 15
"""Smaller matrices stay as they are: their product takes a few microseconds in any way."""
NUM_SHAPES = 8
"""Shapes that are timed: those with the most weights. The others stay as they are. A target has about
five and a drafter three: with fewer, a large drafter would decide whether the target's head is packed."""
TIMED_ROWS = (1, 8, 128)
"""Rows of plain decoding, those that stand for all draft trees, and those for prompts and wide batches."""
PACKED_FROM = (1, 2)
"""Fewest rows that a packed copy may multiply: those of plain decoding, or of the smallest tree."""
MOST_PACKED_ROWS = 64
"""More rows, as of prompts, are multiplied by the weights as they are stored, unless packed ones are faster there, too."""
MIN_GAIN = 1.1
"""Smallest ratio that decides for another way than rows first; a smaller one may be chance."""
MAX_MEMORY_SHARE = 0.5
"""Largest share of the free memory that packed copies may take."""
SECONDS_PER_SHAPE, MIN_ROUNDS = 0.1, 4
"""A shape is timed in rounds until the seconds are over; the first round warms up."""
MAX_ELEMENTS = 1 << 22
"""A larger matrix is timed with fewer outputs."""
POOL_BYTES, MAX_POOL = 1 << 25, 16
"""Equal matrices that take turns, as the layers of a model do."""
MAX_BETWEEN = 1 << 27
"""Most bytes that are read before a sample, as a pass reads its other weights: kernels differ most on weights in no cache."""
SAMPLE_WORK = 1 << 25
"""Multiplications of one timed sample: at least one product, and at most one by each matrix."""


class Shape(NamedTuple):
    """A linear layer's shape and type."""

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype


class Times(NamedTuple):
    """Seconds of one product in each way, for each number of TIMED_ROWS."""

    rows_first: tuple[float, float, float]
    columns_first: tuple[float, float, float]
    packed: tuple[float, float, float]
    """Infinite where the type can't be packed on this machine."""
    native: tuple[float, float, float] = (math.inf,) * 3
    """Infinite for several rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the products of one matrix are computed."""

    columns_first: bool = False
    packed_from: int | None = None
    """Fewest rows that the packed copy multiplies; None packs nothing."""
    packs_many: bool = False
    """Whether it multiplies more than MOST_PACKED_ROWS rows, too."""
    native_row: bool = False
    """Whether one row is multiplied without oneDNN, where the packed copy doesn't multiply it."""

    def __str__(self) -> str:
        order = ("columns first" if self.columns_first else "rows first") + ", one row native" * self.native_row
        most = "rows on" if self.packs_many else f"to {MOST_PACKED_ROWS} rows"
        return order if self.packed_from is None else f"{order}, packed from {self.packed_from} {most}"


_PACKED = [(None, False), *product(PACKED_FROM, (False, True))]
_ONE_ROW: tuple[dict[str, bool], ...] = ({}, {"columns_first": True}, {"native_row": True})
CHOICES = [Choice(packed_from=fewest, packs_many=many, **one_row) for one_row in _ONE_ROW for fewest, many in _PACKED]
BY_NAME = {str(choice): choice for choice in CHOICES}
"""Every choice by its name in records."""


def choose(times: Times, *, in_place: bool = True) -> Choice:
    """Choose how to compute a matrix's products, from the seconds of each way.

    Without `in_place` the memory order stays rows first.
    """
    # 1. Plain decoding decides about the memory order: drafters are compared with it.
    native_row = times.rows_first[0] > MIN_GAIN * times.native[0]
    one_row = times.native[0] if native_row else times.rows_first[0]
    columns_first = in_place and one_row > MIN_GAIN * times.columns_first[0]
    native_row &= not columns_first
    stored = times.columns_first if columns_first else (one_row, *times.rows_first[1:])
    gains = [without > MIN_GAIN * packed for without, packed in zip(stored, times.packed, strict=True)]
    # 2. The packed copy serves draft trees, and one row and many rows too where it is faster.
    if not gains[1]:
        return Choice(columns_first, native_row=native_row)
    return Choice(columns_first, PACKED_FROM[0 if gains[0] else 1], packs_many=gains[2], native_row=native_row)


# --- timing


@cache
def timed(shape: Shape, num_threads: int, between: int = 0) -> Times:
    """Time the ways in turns; the fastest sample of each counts, because others were disturbed.

    Before each sample `between` bytes are read. A process times a shape once for each number of threads and of bytes.
    A clock that stands still makes all ways equal.
    """
    with torch.inference_mode():
        return _timed(shape, between)


def _timed(shape: Shape, between: int) -> Times:
    # 1. Matrices that take turns, in each way that this machine has.
    num_outputs = max(1, min(shape.num_outputs, MAX_ELEMENTS // shape.num_inputs))
    size = num_outputs * shape.num_inputs
    count = max(1, min(MAX_POOL, POOL_BYTES // (size * shape.dtype.itemsize)))
    stored = [torch.full((num_outputs, shape.num_inputs), 0.01, dtype=shape.dtype) for _ in range(count)]
    ways: dict[str, tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]] = {
        "rows_first": (F.linear, stored),
        "columns_first": (F.linear, [weight.t().contiguous().t() for weight in stored]),
    }
    with suppress(RuntimeError):  # the type can't be packed here
        ways["packed"] = (packed_linear, [pack(weight) for weight in stored])
    if torch._C._get_mkldnn_enabled():  # otherwise rows first is native already
        ways["native"] = (native_linear, stored)
    others = torch.ones(between // 4)
    # 2. Rounds of all numbers of rows and all ways, until the time is over.
    turns = {way: cycle(weights) for way, (_, weights) in ways.items()}
    best = dict.fromkeys(Times._fields, [math.inf] * len(TIMED_ROWS))
    deadline, number = time.perf_counter() + SECONDS_PER_SHAPE, 0
    while number < MIN_ROUNDS or 0 < time.perf_counter() < deadline:
        for index, rows in enumerate(TIMED_ROWS):
            x = torch.ones(1, rows, shape.num_inputs, dtype=shape.dtype)
            num_calls = min(count, max(1, SAMPLE_WORK // (rows * size)))
            for way, (multiply, _) in ways.items():
                if way == "native" and rows > 1:
                    continue
                others.sum()
                start = time.perf_counter()
                for weight in islice(turns[way], num_calls):
                    multiply(x, weight, None)
                seconds = (time.perf_counter() - start) / num_calls
                if number:
                    best[way] = [min(seconds, old) if place == index else old for place, old in enumerate(best[way])]
        number += 1
    return Times(**{way: (one, several, many) for way, (one, several, many) in best.items()})


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight [out, in] to the layout that oneDNN's kernels read.

    Raises RuntimeError if this machine or build of torch has no such kernel for the type.
    """
    try:
        # torch.compile emits these operators for a frozen linear layer. They have no public API.
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
    except AttributeError as error:
        raise RuntimeError("this build of torch has no oneDNN") from error
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear layer with a packed weight."""
    output: torch.Tensor = _operator()(x, packed, bias, "none", [], "")
    return output


def native_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a linear layer without oneDNN. Other threads do without it meanwhile."""
    if not torch._C._get_mkldnn_enabled():  # by the user, who wants it so, or by another thread, which turns it on again
        return F.linear(x, weight, bias)
    try:
        # The switch of torch.backends.mkldnn, without its layers of Python, which each layer of each pass would pay.
        torch._C._set_mkldnn_enabled(False)
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


@cache
def _operator() -> Callable[..., Any]:
    operator: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default
    return operator


# --- the layers


def choose_linears(*modules: nn.Module, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Compute linear layers of frozen modules in the fastest way; return the ways by shape.

    This concerns linear layers on a CPU, of at least MIN_ELEMENTS weights, in a type that has fast
    kernels. The choice depends on torch's number of threads, so call this again if it changes.

    `recorded` is an earlier result. Nothing is timed then, and shapes that it lacks stay as they are.
    The result equals `recorded`, unless this machine can't compute a layer in the recorded way, or no
    layer of these modules has a recorded shape and type on a CPU.

    A packed copy is made when a layer first decodes. It is used in `torch.inference_mode` only, and
    made again if the weights have changed, except in place through `.data`, which PyTorch doesn't
    count as a change. Weights that are columns first hold the same numbers;
    only their strides differ. Rounding may differ between the ways, as it does between two BLAS
    libraries.
    """
    plain_linears(*modules)
    layers = _linears(modules)
    choices = _fastest(layers, in_place=True) if recorded is None else _named(recorded)
    return {shape: str(choice) for shape, choice in _apply(layers, choices).items()}


def plain_linears(*modules: nn.Module) -> None:
    """Undo `choose_linears`."""
    for module in _distinct(modules):
        if isinstance(vars(module).get("forward"), FastestForRows):
            del vars(module)["forward"]
        if _is_linear(module) and not module.weight.requires_grad and not module.weight.is_contiguous():
            module.weight.data = module.weight.data.contiguous()


@contextmanager
def packed_where_faster(*modules: nn.Module, recorded: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Compute in the fastest way that changes no weight inside the block. Yields the ways by shape.

    Layers that `choose_linears` has handled stay as they are. For `recorded` see `choose_linears`.
    """
    layers = [layer for layer in _linears(modules, only_frozen=False) if layer.linear.weight.is_contiguous()]
    try:
        choices = _fastest(layers, in_place=False) if recorded is None else _named(recorded)
        yield {shape: str(choice) for shape, choice in _apply(layers, choices).items()}
    finally:
        for layer in layers:
            vars(layer.linear).pop("forward", None)


@dataclass(frozen=True, slots=True)
class _Layer:
    linear: nn.Linear
    is_shared: bool
    """Whether embeddings have the same weight. Its rows stay together, because they are looked up."""

    @property
    def shape(self) -> Shape:
        return Shape(self.linear.out_features, self.linear.in_features, self.linear.weight.dtype)

    @property
    def name(self) -> str:
        """The shape in a record, such as `512x128 float32`."""
        num_outputs, num_inputs, dtype = self.shape
        name = f"{num_outputs}x{num_inputs} {str(dtype).removeprefix('torch.')}"
        return name + " (shared with embeddings)" * self.is_shared


def _fastest(layers: Sequence[_Layer], *, in_place: bool) -> dict[str, Choice]:
    """Time the shapes with the most weights, and choose a way for each."""
    sizes = Counter[Shape]()
    for layer in layers:
        sizes[layer.shape] += layer.linear.weight.nbytes
    between = min(sizes.total(), MAX_BETWEEN)
    times = {shape: timed(shape, torch.get_num_threads(), between) for shape, _ in sizes.most_common(NUM_SHAPES)}
    return {
        layer.name: choose(times[layer.shape], in_place=in_place and not layer.is_shared)
        for layer in layers
        if layer.shape in times
    }


def _named(recorded: Mapping[str, str]) -> dict[str, Choice]:
    return {shape: BY_NAME.get(name, Choice()) for shape, name in recorded.items()}


def _apply(layers: Sequence[_Layer], choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """Change the layers that have a choice. Returns their choices, as far as they were possible here."""
    # 1. Pack nothing without a kernel, or without memory for all copies.
    layers = [layer for layer in layers if layer.name in choices]
    to_pack = [layer for layer in layers if choices[layer.name].packed_from is not None]
    can_pack = {dtype: _can_pack(dtype) for dtype in {layer.shape.dtype for layer in to_pack}}
    has_room = _has_room(sum(layer.linear.weight.nbytes for layer in to_pack))
    unpacked = {layer.name for layer in to_pack if not (can_pack[layer.shape.dtype] and has_room)}
    possible = {
        name: replace(choice, packed_from=None) if name in unpacked else choice
        for name, choice in choices.items()
        if any(layer.name == name for layer in layers)
    }
    # 2. Change the layers.
    for layer in layers:
        choice, linear = possible[layer.name], layer.linear
        if choice.columns_first:
            linear.weight.data = linear.weight.data.t().contiguous().t()
        if choice.packed_from is not None or choice.native_row:
            # An attribute of the instance hides the class's forward; `weight` stays as it is.
            vars(linear)["forward"] = FastestForRows(linear, choice)
    return possible


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        pack(torch.ones(8, 8, dtype=dtype))
    except RuntimeError:
        return False
    return True


def _has_room(copies_bytes: int) -> bool:
    """Check that packed copies take at most a share of the free memory; warn if they don't."""
    free = available_memory()
    if not copies_bytes or free is None or copies_bytes <= MAX_MEMORY_SHARE * free:
        return True
    logger.warning(
        "linear layers: packed copies of %.1f GiB would take most of the %.1f GiB of free memory, so there are none, and "
        "decoding is slower",
        copies_bytes / 2**30,
        free / 2**30,
    )
    return False


def _distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for root in modules for module in root.modules()}.values())


def _linears(modules: Sequence[nn.Module], *, only_frozen: bool = True) -> list[_Layer]:
    """Return the layers that a choice exists for, each once."""
    distinct = _distinct(modules)
    # A parameter that several modules have comes several times.
    uses = Counter(id(parameter) for module in distinct for parameter in module.parameters(recurse=False))
    return [
        _Layer(module, is_shared=uses[id(module.weight)] > 1)
        for module in distinct
        if _is_linear(module)
        and module.weight.numel() >= MIN_ELEMENTS
        and not (only_frozen and module.weight.requires_grad)
        and "forward" not in vars(module)
    ]


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    # Subclasses may compute something else, and quantised or sliced weights have another format.
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        return False
    weight = module.weight
    return weight.device.type == "cpu" and weight.dtype in TYPES and not weight.is_inference()


class FastestForRows:
    """A linear layer's forward: native or packed for some numbers of rows in inference, else as always."""

    def __init__(self, linear: nn.Linear, choice: Choice) -> None:
        self.linear = linear
        self.native_row = choice.native_row
        self.fewest = math.inf if choice.packed_from is None else choice.packed_from * linear.in_features
        self.most = math.inf if choice.packs_many else MOST_PACKED_ROWS * linear.in_features
        self._packed: Any = None
        self._packed_from: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        linear = self.linear
        weight = linear.weight
        # A user's compiled code has kernels of its own.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or x.dtype != weight.dtype:
            return F.linear(x, weight, linear.bias)
        if not self.fewest <= x.numel() <= self.most:
            multiply = native_linear if self.native_row and x.numel() == linear.in_features else F.linear
            return multiply(x, weight, linear.bias)
        packed_from = (weight.data_ptr(), weight._version)
        if self._packed_from != packed_from:
            self._packed, self._packed_from = pack(weight.detach()), packed_from
        return packed_linear(x, self._packed, linear.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed weights, which can't be copied; a copy packs its own."""
        return {**vars(self), "_packed": None, "_packed_from": None}
