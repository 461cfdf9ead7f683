"""Placing of a model's weights within a memory budget: which stay, which are read in every pass.

The weights of a unit (a decoder layer, or an untied head) go to one of three places:

    resident   parameters, in the type of the computation
    kept       as stored in the files, in host memory; copied or cast into a slot at the unit's turn
    streamed   read from the files into a slot, ahead of the unit's turn

Every byte that stays is a byte less to read in each pass, whichever unit it belongs to. So as many
units as possible are kept, which takes their stored bytes. What room is left makes kept units
resident. Units that stay lie evenly among the others: while the pass computes them, the next ones
are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, floor, log10

GIB = 2**30
NUM_SLOTS = 2
"""Slots for units that aren't resident: one is used by the pass, the other one is filled."""


class WeightPlace(StrEnum):
    """Place of a unit's weights between passes."""

    RESIDENT = "resident"
    KEPT = "kept"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Weights that are used together: those of a decoder layer, or of the head."""

    stored_bytes: int
    """Bytes in the files."""
    computed_bytes: int
    """Bytes in the type of the computation."""
    is_head: bool = False
    place: WeightPlace = WeightPlace.RESIDENT


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Places of all units, in the order of a pass, and the bytes of each part of the memory."""

    units: tuple[Unit, ...]
    budget_bytes: int
    ends_bytes: int
    """Weights outside the units: embeddings, norms, and a head that is tied or resident."""
    cache_bytes: int
    """Keys and values of `budget_tokens`."""
    budget_tokens: int
    keeps_on_host: bool = False
    """Whether kept units are outside the budget, which is an accelerator's memory."""
    slot_bytes: int = 0
    """Bytes of one slot: the largest unit that isn't resident. 0 if all units are resident."""
    staging_bytes: int = 0
    """Buffers into which files are read."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each pass reads from the files."""
        return sum(unit.stored_bytes for unit in self.units if unit.place is WeightPlace.STREAMED)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of the memory that the plan takes, by its name in messages.

        On an accelerator, kept units are in the host's memory and don't count.
        """
        resident = sum(unit.computed_bytes for unit in self.units if unit.place is WeightPlace.RESIDENT)
        kept = sum(unit.stored_bytes for unit in self.units if unit.place is WeightPlace.KEPT)
        return {
            "embeddings and norms": self.ends_bytes,
            "layers and head that stay": resident,
            "layers kept as stored": 0 if self.keeps_on_host else kept,
            f"{NUM_SLOTS} slots for layers that are read": NUM_SLOTS * self.slot_bytes,
            "buffers of the reader": self.staging_bytes,
            f"keys and values of {self.budget_tokens} tokens": self.cache_bytes,
        }

    @property
    def planned_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    def count(self, place: WeightPlace) -> int:
        """Count the decoder layers in a place."""
        return sum(unit.place is place and not unit.is_head for unit in self.units)

    def describe(self, bytes_per_second: float | None = None) -> str:
        """Describe in one line what stays, what is read in each pass, and in how many seconds."""
        heads = [unit for unit in self.units if unit.is_head and unit.place is not WeightPlace.RESIDENT]
        counts = {place: self.count(place) for place in WeightPlace}
        verbs = {WeightPlace.RESIDENT: "stay", WeightPlace.KEPT: "kept as stored", WeightPlace.STREAMED: "stream"}
        places = ", ".join(f"{count} {verbs[place]}" for place, count in counts.items() if count)
        head_verbs = {WeightPlace.KEPT: "is kept as stored", WeightPlace.STREAMED: "streams"}
        head = "".join(f", the head {head_verbs[unit.place]}" for unit in heads)
        reading = f"{_gib(self.streamed_bytes)} GiB a pass" if self.streamed_bytes else "a pass reads no file"
        if self.streamed_bytes and bytes_per_second:
            seconds = self.streamed_bytes / bytes_per_second
            duration = f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
            reading += f", {duration} s at the {bytes_per_second / 1e9:.2g} GB/s measured"
        total = f"{_gib(self.planned_bytes)} of {_gib(self.budget_bytes)} GiB"
        return f"{sum(counts.values())} layers: {places}{head} ({reading}); {total}"


def plan_memory(
    units: Sequence[Unit],
    *,
    budget_bytes: int,
    ends_bytes: int,
    token_bytes: int,
    budget_tokens: int,
    staging_bytes: int,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """Choose a place for each unit.

    `token_bytes` are those of one token's keys and values. `host_bytes` is the memory for kept
    units on an accelerator, where the budget is the device's memory; None counts them into the
    budget. The head stays if the budget allows it: drafters compute with it outside passes.

    Raises ValueError, with the least budget that works, if the budget is too small.
    """
    plan = MemoryPlan(
        units=tuple(replace(unit, place=WeightPlace.RESIDENT) for unit in units),
        budget_bytes=budget_bytes,
        ends_bytes=ends_bytes,
        cache_bytes=token_bytes * budget_tokens,
        budget_tokens=budget_tokens,
        keeps_on_host=host_bytes is not None,
    )
    # 1. If all fits, no slots are needed.
    if plan.planned_bytes <= budget_bytes:
        return plan
    # 2. Else slots are the first need. Then the room is filled.
    leasts = []
    for head_streams in (False, True):
        least = _least(plan, staging_bytes, head_streams)
        if least.planned_bytes <= budget_bytes:
            return _filled(least, host_bytes)
        leasts.append(least)
    # 3. No plan fits: name what the smallest one takes.
    least = min(leasts, key=lambda plan: plan.planned_bytes)
    parts = ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in least.parts.items() if num_bytes)
    raise ValueError(
        f"target.memory_budget_gib is {budget_bytes / GIB:.3g}, and this model needs at least "
        f"{_gib(least.planned_bytes, up=True)} GiB ({parts}); raise it, or lower target.budget_tokens ({budget_tokens})"
    )


def _least(plan: MemoryPlan, staging_bytes: int, head_streams: bool) -> MemoryPlan:
    """Return the plan that streams all layers, and the head if `head_streams`."""
    units = [unit if unit.is_head and not head_streams else replace(unit, place=WeightPlace.STREAMED) for unit in plan.units]
    slot = max(unit.computed_bytes for unit in units if unit.place is WeightPlace.STREAMED)
    return replace(plan, units=tuple(units), slot_bytes=slot, staging_bytes=staging_bytes)


def _filled(plan: MemoryPlan, host_bytes: int | None) -> MemoryPlan:
    """Keep streamed units while there is room, then make kept units resident."""
    units, room = list(plan.units), plan.budget_bytes - plan.planned_bytes
    # Reversed binary digits visit the units evenly: 0 4 2 6 1 5 3 7 of 8.
    order = sorted(range(len(units)), key=lambda index: f"{index:032b}"[::-1])
    streamed = [index for index in order if units[index].place is WeightPlace.STREAMED]

    def move(indexes: Sequence[int], place: WeightPlace, room: int, from_bytes: Callable[[Unit], int]) -> int:
        for index in indexes:
            num_bytes = from_bytes(units[index])
            if num_bytes <= room:
                units[index], room = replace(units[index], place=place), room - num_bytes
        return room

    if host_bytes is None:
        # Units that take as little room in the type of the computation stay in that type.
        narrow = [index for index in streamed if units[index].stored_bytes < units[index].computed_bytes]
        wide = [index for index in streamed if index not in narrow]
        room = move(wide, WeightPlace.RESIDENT, room, lambda unit: unit.computed_bytes)
        room = move(narrow, WeightPlace.KEPT, room, lambda unit: unit.stored_bytes)
        kept = [index for index in narrow if units[index].place is WeightPlace.KEPT]
        move(kept, WeightPlace.RESIDENT, room, lambda unit: unit.computed_bytes - unit.stored_bytes)
    else:
        move(streamed, WeightPlace.RESIDENT, room, lambda unit: unit.computed_bytes)
        rest = [index for index in streamed if units[index].place is WeightPlace.STREAMED]
        move(rest, WeightPlace.KEPT, host_bytes, lambda unit: unit.stored_bytes)
    return replace(plan, units=tuple(units))


def _gib(num_bytes: int, *, up: bool = False) -> str:
    """Format bytes in GiB with three digits; `up` rounds up, so that the figure is enough."""
    gib = num_bytes / GIB
    digits = 2 - floor(log10(gib)) if gib else 2
    return f"{(ceil(gib * 10**digits) / 10**digits if up else gib):.{max(0, digits)}f}"
