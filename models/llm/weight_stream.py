"""Streaming of a model's weights: each unit's weights are read ahead of its turn in the pass.

Hooks on the units bind their parameters to a slot before their forward, and empty them after it. So
any forward of the model works, whichever code calls it:

    turn     0    1    2    3    4    5    0    ...       units 1, 3 and 4 stream, into two slots
    slot A   .  [1]    .    .  [4]    .    .              [1]: unit 1 computes with slot A
    slot B   .    .    .  [3]    .    .    .              Between its turns a slot is filled.

Each released slot is filled with the next unit of the cycle; after the last one comes the first.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..decoding.protocols import Meanwhile
from ..phases import StreamCounts
from .memory_plan import NUM_SLOTS, MemoryPlan
from .weight_reader import Loading, WeightReader, Weights

ALIGNMENT = 64
"""Parameters begin at multiples of this number of bytes in a slot, as torch allocates tensors: so
kernels compute the same as with resident weights."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedUnit:
    """A unit of the model whose weights come and go."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    weights: Weights
    """Where the parameters' values are, in their order."""

    @property
    def num_bytes(self) -> int:
        """Bytes in a slot."""
        return sum(_rounded(size) for size in self._sizes)

    @property
    def _sizes(self) -> list[int]:
        pairs = zip(self.weights.stored, self.parameters, strict=True)
        return [stored.num_bytes // stored.dtype.itemsize * parameter.dtype.itemsize for stored, parameter in pairs]

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' values in a slot."""
        views, start = [], 0
        for stored, parameter, size in zip(self.weights.stored, self.parameters, self._sizes, strict=True):
            views.append(slot[start : start + size].view(parameter.dtype).view(stored.shape))
            start += _rounded(size)
        return views

    def bind(self, values: Sequence[torch.Tensor]) -> None:
        """Let the parameters have these values, without a copy."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value


@dataclass(frozen=True, slots=True, eq=False)
class ReadTurn:
    """A unit that is being loaded, or that computes."""

    index: int
    slot: torch.Tensor
    values: list[torch.Tensor]
    loading: Loading


class WeightStream:
    """Weights of a model's streamed units, read in the order in which passes use them.

    Between its turn and the next a unit's parameters are empty tensors: code that reads them then
    finds nothing, not another unit's weights. `require_copyable_weights` names such code's remedy.

    A pass may end anywhere, by an error or because no later layer is needed. The next pass begins
    with the first unit again, and what was read for other units is dropped.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        reader: WeightReader,
        plan: MemoryPlan,
        device: torch.device,
        *,
        num_slots: int = NUM_SLOTS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.units, self.plan, self.device = units, plan, device
        self.meanwhile: Meanwhile | None = None
        """Work for the waits of the present pass (`during_waits`)."""
        self._reader, self._clock, self._process = reader, clock, os.getpid()
        self._counts = StreamCounts()
        slot_bytes = max(unit.num_bytes for unit in units)
        with torch.inference_mode(False):
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(num_slots)]
            self._nothing = [[parameter.data.new_empty(0) for parameter in unit.parameters] for unit in units]
        self._used: dict[int, torch.cuda.Event] = {}
        self._ahead: deque[ReadTurn] = deque()
        self._now: ReadTurn | None = None
        self._last_index = len(units)
        for index, unit in enumerate(units):
            unit.bind(self._nothing[index])
            unit.module.register_forward_pre_hook(partial(self._enter, index))
            unit.module.register_forward_hook(partial(self._leave, index), always_call=True)
            unit.module.register_state_dict_pre_hook(_refuse_to_save)
        self._read_ahead(0)

    @property
    def stats(self) -> StreamCounts:
        """Counts since the stream's start, as a value."""
        return replace(self._counts, bytes_read=self._reader.bytes_read, read_seconds=self._reader.read_seconds)

    @property
    def bytes_per_second(self) -> float:
        """Rate at which files were read so far."""
        return self._reader.bytes_per_second

    @contextmanager
    def during_waits(self, meanwhile: Meanwhile | None) -> Iterator[None]:
        """Call `meanwhile` while the pass in the block waits for weights."""
        self.meanwhile = meanwhile
        try:
            yield
        finally:
            self.meanwhile = None

    def seconds_left(self) -> float:
        """Return for how many seconds files will still be read for the present pass.

        That is until all slots are full, or until the pass's last unit is read. Work for so long
        delays no read.
        """
        turns = [turn for turn in self._ahead if turn.index >= self._ahead[0].index]
        return sum(turn.loading.bytes_left for turn in turns) / self.bytes_per_second

    def wait_until_ahead(self) -> None:
        """Wait until all slots are full. Raises what the reader raised."""
        for turn in self._ahead:
            turn.loading.future.result()

    def close(self) -> None:
        """Stop reading. Later passes raise RuntimeError."""
        self._drop(len(self._ahead))
        self._reader.close()

    # --- the hooks

    def _enter(self, index: int, module: nn.Module, args: Any) -> None:
        """Bind the unit's parameters before its forward, once they are loaded."""
        if os.getpid() != self._process:  # a fork has no threads: it would wait forever
            raise RuntimeError("streamed weights are read only in the process that loaded the target; load it in each process")
        # 1. An interrupted pass (Ctrl-C) ends without forward hooks.
        self._end_turn()
        # 2. Drop units that this pass doesn't compute, or that the last one didn't reach.
        num_passed = next((position for position, turn in enumerate(self._ahead) if turn.index == index), len(self._ahead))
        self._counts += StreamCounts(passes=int(index <= self._last_index), restarts=int(num_passed > 0))
        self._last_index = index
        self._drop(num_passed)
        self._read_ahead(index)
        # 3. Wait for the weights.
        try:
            self._wait(self._ahead[0].loading)
        except BaseException:
            self._drop(1)
            raise
        self._now = self._ahead.popleft()
        self.units[index].bind(self._now.values)

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Empty the unit's parameters after its forward, also if it raised an error."""
        if self._now is not None and self._now.index == index:
            self._end_turn()
            self._read_ahead((index + 1) % len(self.units))

    def _wait(self, loading: Loading) -> None:
        """Wait for weights, and draft meanwhile. Raises what the reader raised."""
        began = self._clock()
        while self.meanwhile is not None and not loading.future.done():
            seconds_left, start = self.seconds_left(), self._clock()
            if not self.meanwhile(seconds_left):
                break
            spent = self._clock() - start
            late = max(0.0, spent - seconds_left) if loading.future.done() else 0.0
            self._counts += StreamCounts(drafts=1, draft_seconds=spent, late_drafts=int(late > 0), late_seconds=late)
        try:
            loading.future.result()
        finally:
            self._counts += StreamCounts(wait_seconds=self._clock() - began)

    # --- slots

    def _read_ahead(self, index: int) -> None:
        """Load the units from `index` on, or those behind the ones ahead, into the free slots.

        Ctrl-C may come between any two lines here. A slot is free if no turn has it: so none is
        lost, and a slot that is loaded twice has the later unit's weights.
        """
        held = {turn.slot.data_ptr() for turn in (*self._ahead, *([] if self._now is None else [self._now]))}
        for slot in (slot for slot in self._slots if slot.data_ptr() not in held):
            if self._ahead:
                index = (self._ahead[-1].index + 1) % len(self.units)
            unit = self.units[index]
            with torch.inference_mode(False):
                values = unit.views(slot)
                loading = Loading(unit.weights, values, self._used.get(slot.data_ptr()))
            self._reader.load(loading)
            self._ahead.append(ReadTurn(index, slot, values, loading))

    def _drop(self, num_turns: int) -> None:
        """Give up the first units ahead."""
        for _ in range(num_turns):
            self._ahead.popleft().loading.is_cancelled = True

    def _end_turn(self) -> None:
        """Empty the parameters of the unit that computed last, and free its slot."""
        if self._now is not None:
            self.units[self._now.index].bind(self._nothing[self._now.index])
            if self.device.type == "cuda":  # the host is ahead of the device, which still computes
                self._used[self._now.slot.data_ptr()] = torch.cuda.current_stream(self.device).record_event()
            self._now = None


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise ValueError where weights would be saved or copied, since they are empty then."""
    raise ValueError(
        f"the weights of {prefix.rstrip('.') or type(module).__name__} are in memory only during passes "
        "(target.memory_budget_gib), so they can't be saved or copied; load the target without a budget"
    )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
