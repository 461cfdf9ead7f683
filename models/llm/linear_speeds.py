"""Speeds of linear layers in several ways, measured once per machine and remembered in a file.

The file lies in the folder OUTRIDER_CACHE, or `~/.cache/outrider`. It is named after the machine: the
hardware, torch's version and all else that the seconds depend on. A file that can't be read, or
that belongs to another machine, is ignored and written again.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ...data.files import write_json
from ..machine import cpu_details, cpu_model

logger = logging.getLogger(__name__)

TYPES = (torch.float32, torch.bfloat16)
"""Types with fast kernels on some CPUs."""
FORMAT = 2
"""Version of the measurement. It is part of the file's name, as are ROWS and WAYS, so that several
versions on one machine don't rewrite each other's files."""
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128)
"""Numbers of rows that are measured: 1 is plain decoding, the others are draft trees and batches.

Seconds don't always grow with the rows: bfloat16 with columns first took 0.6 ms at 32 rows, 1.5 at 48
and 0.7 at 64."""
MAX_SECONDS, MAX_SECONDS_PER_SHAPE = 1.4, 0.3
"""Limits for all measurements of one call, and for one shape. A drafter has few shapes that its
target hasn't, so it takes less."""
MIN_ROUNDS, MAX_ROUNDS = 3, 100
WAYS = ("rows_first", "columns_first", "packed")
LAST_NEEDED = 8
"""Number of rows up to which the limit of time doesn't hold: on a machine that is too slow for it,
larger numbers are left out."""
MAX_ELEMENTS = 1 << 22
"""A larger matrix is measured with fewer outputs."""
POOL_BYTES, MAX_POOL_BYTES, MAX_POOL = 1 << 24, 1 << 27, 64
"""Bytes of equal matrices that take turns, as the layers of a model do. The first is for few layers:
their weights are read from farther away than the innermost cache. The second is for many large
ones, which no cache holds: kernels differ most in how they read from memory."""
SAMPLE_WORK, MAX_CALLS = 1 << 23, 256
"""Multiplications of one timed sample, unless that takes too many calls."""


class Shape(NamedTuple):
    """A linear layer's shape and type."""

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one product in each way, by number of rows."""

    rows: tuple[int, ...]
    rows_first: tuple[float, ...]
    columns_first: tuple[float, ...]
    packed: tuple[float, ...]
    """Infinite where the type can't be packed on this machine."""

    def __post_init__(self) -> None:
        ways = (self.rows_first, self.columns_first, self.packed)
        if not self.rows or self.rows != ROWS[: len(self.rows)] or any(len(way) != len(self.rows) for way in ways):
            raise ValueError(f"each way needs the seconds of each number of rows, which are the first of {ROWS}")
        if not all(value > 0 for way in ways for value in way):  # also false for NaN
            raise ValueError("seconds must be above 0")


def linear_speeds(shapes: Sequence[Shape]) -> dict[Shape, Times]:
    """Return the times of each shape with torch's present number of threads.

    `shapes` has one entry for each layer: how many equal layers there are decides from where their
    weights are read.

    A shape that can't be timed is missing. Those that this machine's file lacks are measured first,
    in about MAX_SECONDS together.
    """
    machine = _machine()
    path = _cache_folder() / f"linears-{_digest(repr(machine))}.json"
    known = _read(path, machine)
    keys = {shape: _key(shape, count) for shape, count in Counter(shapes).items()}
    missing = {shape: count for shape, count in Counter(shapes).items() if keys[shape] not in known}
    if missing:
        started = time.perf_counter()
        measured = {}
        for shape, count in missing.items():
            with suppress(ValueError):  # the clock stood still
                seconds = min(MAX_SECONDS_PER_SHAPE, MAX_SECONDS / len(missing))
                measured[keys[shape]] = _measure(shape, _num_matrices(shape, count), seconds)
        seconds = time.perf_counter() - started
        logger.info("linear layers: measured the fastest kernels in %.1f s; kept in %s", seconds, path)
        known = {**_read(path, machine), **measured}  # another process may have added its own meanwhile
        _write(path, machine, known)
    return {shape: known[key] for shape, key in keys.items() if key in known}


def _num_outputs(shape: Shape) -> int:
    return max(1, min(shape.num_outputs, MAX_ELEMENTS // shape.num_inputs))


def _num_matrices(shape: Shape, count: int) -> int:
    """Return the number of matrices that take turns, for a model with `count` such layers."""
    num_bytes = _num_outputs(shape) * shape.num_inputs * shape.dtype.itemsize
    few, many = (max(1, min(MAX_POOL, limit // num_bytes)) for limit in (POOL_BYTES, MAX_POOL_BYTES))
    return max(few, min(count, many))


# --- packed weights


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


@cache
def _operator() -> Callable[..., Any]:
    operator: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default
    return operator


# --- measuring


@torch.inference_mode()
def _measure(shape: Shape, num_matrices: int, max_seconds: float) -> Times:
    """Time the ways in turns; the fastest sample of each counts, because others were disturbed."""
    # 1. Matrices that take turns, in each way that this machine has.
    num_outputs = _num_outputs(shape)
    stored = [torch.full((num_outputs, shape.num_inputs), 0.01, dtype=shape.dtype) for _ in range(num_matrices)]
    columns = [weight.t().contiguous().t() for weight in stored]
    packed: list[torch.Tensor] = []
    with suppress(RuntimeError):  # the type can't be packed here
        packed = [pack(weight) for weight in stored]
    ways: dict[str, tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]] = {
        "rows_first": (F.linear, stored),
        "columns_first": (F.linear, columns),
    }
    if packed:
        ways["packed"] = (packed_linear, packed)

    # 2. Rounds of all numbers of rows and ways, until the time is over.
    inputs = {rows: torch.ones(1, rows, shape.num_inputs, dtype=shape.dtype) for rows in ROWS}
    turns = {way: cycle(weights) for way, (_, weights) in ways.items()}
    best = {way: dict.fromkeys(ROWS, math.inf) for way in WAYS}
    deadline = time.perf_counter() + max_seconds
    for number in range(MAX_ROUNDS):
        for rows, x in inputs.items():
            is_measured = all(math.isfinite(best[way][rows]) for way in ways)
            if time.perf_counter() > deadline and (is_measured or rows > LAST_NEEDED):
                continue
            num_calls = max(1, min(MAX_CALLS, SAMPLE_WORK // (rows * num_outputs * shape.num_inputs)))
            for way, (product, _) in ways.items():
                start = time.perf_counter()
                for weight in islice(turns[way], num_calls):
                    product(x, weight, None)
                seconds = (time.perf_counter() - start) / num_calls
                # The first round warms up. A clock may stand still or jump back.
                if number > 0 and seconds > 0:
                    best[way][rows] = min(best[way][rows], seconds)
        if number >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
    # 3. The numbers of rows that were measured in every way.
    measured = tuple(rows for rows in ROWS if all(math.isfinite(best[way][rows]) for way in ways))
    return Times(rows=measured, **{way: tuple(seconds[rows] for rows in measured) for way, seconds in best.items()})


# --- the machine's file


def _machine() -> dict[str, Any]:
    """Describe all that the file depends on: the machine, and what is measured on it."""
    return {
        "format": [FORMAT, [*ROWS], [*WAYS]],
        "cpu": cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": _digest(cpu_details()),
        "max_instructions": [
            os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
        ],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _key(shape: Shape, count: int) -> str:
    key = f"{shape.num_outputs}x{shape.num_inputs} {str(shape.dtype).removeprefix('torch.')}"
    num_matrices = _num_matrices(shape, count)
    return key if num_matrices == _num_matrices(shape, 1) else f"{key}, {num_matrices} in turns"


def _read(path: Path, machine: dict[str, Any]) -> dict[str, Times]:
    """Return what the machine's file holds, by the shapes' keys."""
    try:
        content = json.loads(path.read_text())
        return {key: _times(values) for key, values in content["times"].items()} if content["machine"] == machine else {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("%s can't be read (%s); the speeds of linear layers are measured again", path, error)
        return {}


def _write(path: Path, machine: dict[str, Any], times: dict[str, Times]) -> None:
    """Write the machine's file; without it the next process measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"machine": machine, "times": {key: _values(of_shape) for key, of_shape in times.items()}})
    except OSError as error:
        logger.info("%s can't be written (%s): the next process measures linear layers again", path, error)


def _times(values: dict[str, Any]) -> Times:
    ways = {way: tuple(math.inf if value is None else float(value) for value in values[way]) for way in WAYS}
    return Times(rows=tuple(values["rows"]), **ways)


def _values(times: Times) -> dict[str, list[Any]]:
    return {name: [value if math.isfinite(value) else None for value in values] for name, values in asdict(times).items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _cache_folder() -> Path:
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:  # a user without a home: this process measures for itself
        return Path(os.devnull)
