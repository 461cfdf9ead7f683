"""Placing of a model's weights within a memory budget: which stay, which are read in every pass.

The weights of a unit (a decoder layer, or an untied head) go to one of three places:

    resident   parameters, in the type of the computation
    kept       as stored in the files, in host memory; copied or cast into a slot at the unit's turn
    streamed   read from the files into a slot, ahead of the unit's turn

Every byte that stays is a byte less to read in each pass, whichever unit it belongs to. So as many
units as possible are kept, which takes their stored bytes. What room is left makes kept units
resident.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

GIB = 2**30
NUM_SLOTS = 2
"""Slots for units that aren't resident: one is used by the pass, the other one is filled."""


class Place(StrEnum):
    """Place of a unit's weights between passes."""

    RESIDENT = "resident"
    KEPT = "kept"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Weights that are used together: those of a decoder layer, or of the head."""

    name: str
    stored_bytes: int
    """Bytes in the files."""
    computed_bytes: int
    """Bytes in the type of the computation."""
    is_head: bool = False
    place: Place = Place.RESIDENT


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
    slot_bytes: int = 0
    """Bytes of one slot: the largest unit that isn't resident. 0 if all units are resident."""
    staging_bytes: int = 0
    """Buffers into which files are read."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each pass reads from the files."""
        return sum(unit.stored_bytes for unit in self.units if unit.place is Place.STREAMED)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of the memory that the plan takes, by its name in messages."""
        raise NotImplementedError

    @property
    def planned_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())

    def count(self, place: Place) -> int:
        """Count the decoder layers in a place."""
        return sum(unit.place is place and not unit.is_head for unit in self.units)

    def describe(self, bytes_per_second: float | None = None) -> str:
        """Describe in one line what stays, what is read in each pass, and in how many seconds."""
        raise NotImplementedError


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

    `token_bytes` are those of one token's keys and values. `host_bytes` is the memory for kept units
    on an accelerator, where the budget is the device's memory; None counts them into the budget.

    Raises ValueError, with the least budget that works, if the budget is too small.
    """
    raise NotImplementedError
