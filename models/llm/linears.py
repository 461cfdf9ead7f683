"""Linear layers on a CPU, each computed in the way that is fastest on this machine.

Decoding multiplies each weight matrix with a handful of rows: one for plain decoding, one per node
for a draft tree. Three ways compute the same product:

- rows first: `F.linear` on the weights as they are stored, [out, in];
- columns first: `F.linear` on the same weights with the memory order of their transpose;
- packed: a oneDNN kernel on a second copy of the weights, in a layout of its own.

Which one is fastest depends on the processor, the number type, the matrix and the number of rows.
So `linear_speeds` measures it, once per machine, and plain decoding and tree decoding use the same
choice: otherwise a speedup over plain decoding would partly be that of a kernel.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from ..machine import available_memory
from .linear_speeds import TYPES, Shape, Times, linear_speeds, pack, packed_linear

logger = logging.getLogger(__name__)

MIN_ELEMENTS = 1 << 15
"""Smaller matrices stay as they are: their product takes a few microseconds in any way."""
PLAIN_TOLERANCE = 1.02
"""Largest ratio to the fastest way at one row. Plain decoding is what drafters are compared with, so
it comes first."""
MIN_GAIN = 1.04
"""Smallest ratio that decides for columns first or packed; a smaller one may be chance."""
MIN_GAIN_OF_SECOND_COPY = 1.15
"""Smallest ratio that decides for packed only at several rows. A step of a drafter then reads both
copies of the weights, so that fewer of them stay in the processor's cache."""
MAX_MEMORY_SHARE = 0.5
"""Largest share of the free memory that packed copies may take."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the products of one matrix are computed."""

    columns_first: bool = False
    packed_rows: tuple[int, int] | None = None
    """Fewest and most rows that the packed copy multiplies; None packs nothing."""

    def __str__(self) -> str:
        order = "columns first" if self.columns_first else "rows first"
        return order if self.packed_rows is None else f"{order}, packed for {self.packed_rows[0]} to {self.packed_rows[1]} rows"


def choose(times: Times, *, in_place: bool = True, packs: bool = True) -> Choice:
    """Choose how to compute a matrix's products, from the seconds of each way.

    The memory order must be within PLAIN_TOLERANCE of the fastest way at one row. Among such orders
    the one with the lowest mean of relative seconds over all numbers of rows counts. Without
    `in_place` the memory order stays rows first, and without `packs` nothing is packed.
    """
    # 1. The range of rows that is packed in each memory order, and the seconds that follow.
    rows_first, rows_first_seconds = _with_packed(times, times.rows_first, columns_first=False, packs=packs)
    columns_first, columns_first_seconds = _with_packed(times, times.columns_first, columns_first=True, packs=packs)
    if not in_place:
        return rows_first
    # 2. At one row, an order that is too slow is out.
    fastest = min(rows_first_seconds[0], columns_first_seconds[0])
    if columns_first_seconds[0] > PLAIN_TOLERANCE * fastest:
        return rows_first
    if rows_first_seconds[0] > PLAIN_TOLERANCE * fastest:
        return columns_first
    # 3. Over all numbers of rows, columns first must be clearly faster.
    ratios = [rows / columns for rows, columns in zip(rows_first_seconds, columns_first_seconds, strict=True)]
    return columns_first if sum(ratios) / len(ratios) > MIN_GAIN else rows_first


def _with_packed(times: Times, plain: Sequence[float], *, columns_first: bool, packs: bool) -> tuple[Choice, list[float]]:
    """Return the choice in one memory order, and its seconds by number of rows."""
    packed_rows = _packed_range(times, plain) if packs else None
    fewest, most = packed_rows or (0, 0)
    pairs = zip(times.rows, plain, times.packed, strict=True)
    return Choice(columns_first, packed_rows), [
        packed if fewest <= rows <= most else without for rows, without, packed in pairs
    ]


def _packed_range(times: Times, plain: Sequence[float]) -> tuple[int, int] | None:
    """Return the range of rows at which the packed copy is clearly faster than another order."""
    from_one = _best_run(times, plain, MIN_GAIN, firsts=(0,))
    return from_one or _best_run(times, plain, MIN_GAIN_OF_SECOND_COPY, firsts=range(len(plain)))


def _best_run(times: Times, plain: Sequence[float], min_gain: float, firsts: Sequence[int]) -> tuple[int, int] | None:
    """Return the range of rows with the largest gains above `min_gain`; None without a gain.

    The range starts at one of the `firsts`, and ends before a number of rows that loses. A disturbed
    measurement inside the range doesn't end it.
    """
    # 1. The range whose sum of gains is largest: it begins and ends with a gain.
    ratios = [without / packed for without, packed in zip(plain, times.packed, strict=True)]
    gains = [math.log(ratio / min_gain) if ratio else -math.inf for ratio in ratios]
    runs = [range(first, end) for first in firsts for end in range(first + 1, len(gains) + 1)]
    best = max(runs, key=lambda run: sum(gains[index] for index in run))
    if gains[best[0]] <= 0:
        return None
    # 2. The numbers of rows up to the neighbours.
    first, last = best[0], best[-1]
    fewest = times.rows[first - 1] + 1 if first > 0 and ratios[first - 1] >= 1 else times.rows[first]
    most = times.rows[last + 1] - 1 if last + 1 < len(ratios) and ratios[last + 1] >= 1 else times.rows[last]
    return fewest, most


def choose_linears(*modules: nn.Module) -> str:
    """Compute linear layers of frozen modules in the fastest way; describe the ways.

    This concerns linear layers on a CPU, of at least MIN_ELEMENTS weights, in a type that has fast
    kernels. The first call for a target measures for at most two seconds, and keeps the result in a
    file of this machine. The choice depends on torch's number of threads, so call this again if it changes.

    A packed copy is made when a layer first decodes. It is used in `torch.inference_mode` only, and
    made again if the weights have changed, except in place through `.data`, which PyTorch doesn't
    count as a change. Weights that are columns first hold the same numbers;
    only their strides differ. Rounding may differ between the ways, as it does between two BLAS
    libraries.
    """
    plain_linears(*modules)
    return _describe(_apply(_linears(modules), in_place=True))


def plain_linears(*modules: nn.Module) -> None:
    """Undo `choose_linears`."""
    for module in _distinct(modules):
        if isinstance(vars(module).get("forward"), PackedForSomeRows):
            del vars(module)["forward"]
        if _is_linear(module) and not module.weight.requires_grad and not module.weight.is_contiguous():
            module.weight.data = module.weight.data.contiguous()


@contextmanager
def packed_where_faster(*modules: nn.Module) -> Iterator[None]:
    """Decode with packed copies inside the block where they are faster; change no weight.

    Layers that `choose_linears` has handled stay as they are.
    """
    layers = [layer for layer in _linears(modules, only_frozen=False) if layer.linear.weight.is_contiguous()]
    try:
        _apply(layers, in_place=False)
        yield
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
        """The shape in a description."""
        return f"{self.shape.num_outputs}x{self.shape.num_inputs}" + " (shared with embeddings)" * self.is_shared


def _apply(layers: Sequence[_Layer], *, in_place: bool) -> dict[str, Choice]:
    """Choose a way for each layer, and change the layers; return the choices by name."""
    # 1. Choose by the machine's speeds.
    speeds = linear_speeds([layer.shape for layer in layers])
    layers = [layer for layer in layers if layer.shape in speeds]

    def choices(packs: bool) -> dict[str, Choice]:
        return {
            layer.name: choose(speeds[layer.shape], in_place=in_place and not layer.is_shared, packs=packs) for layer in layers
        }

    chosen = choices(packs=True)
    # 2. Copies of all weights may not fit into memory.
    copies = sum(layer.linear.weight.nbytes for layer in layers if chosen[layer.name].packed_rows)
    free = available_memory()
    if copies and free is not None and copies > MAX_MEMORY_SHARE * free:
        logger.warning(
            "linear layers: packed copies of %.1f GiB would take most of the %.1f GiB of free memory, so there are none, and "
            "decoding is slower",
            copies / 2**30,
            free / 2**30,
        )
        chosen = choices(packs=False)
    # 3. Change the layers.
    for layer in layers:
        choice, linear = chosen[layer.name], layer.linear
        if choice.columns_first:
            linear.weight.data = linear.weight.data.t().contiguous().t()
        if choice.packed_rows is not None:
            # An attribute of the instance hides the class's forward; `weight` stays as it is.
            vars(linear)["forward"] = PackedForSomeRows(linear, *choice.packed_rows)
    return chosen


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


def _describe(choices: Mapping[str, Choice]) -> str:
    """Describe the choices, the matrices of one choice together."""
    names: dict[Choice, list[str]] = {}
    for name, choice in choices.items():
        names.setdefault(choice, []).append(name)
    return "; ".join(f"{', '.join(sorted(of_choice))}: {choice}" for choice, of_choice in names.items())


class PackedForSomeRows:
    """A linear layer's forward: packed for some numbers of rows in inference, else as always."""

    def __init__(self, linear: nn.Linear, fewest: int, most: int) -> None:
        self.linear = linear
        self.fewest, self.most = fewest * linear.in_features, most * linear.in_features
        self._packed: Any = None
        self._packed_from: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        linear = self.linear
        weight = linear.weight
        # A user's compiled code has kernels of its own.
        if torch.compiler.is_compiling() or not (
            self.fewest <= x.numel() <= self.most and torch.is_inference_mode_enabled() and x.dtype == weight.dtype
        ):
            return F.linear(x, weight, linear.bias)
        packed_from = (weight.data_ptr(), weight._version)
        if self._packed_from != packed_from:
            self._packed, self._packed_from = pack(weight.detach()), packed_from
        return packed_linear(x, self._packed, linear.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed weights, which can't be copied; a copy packs its own."""
        return {**vars(self), "_packed": None, "_packed_from": None}
