"""Streaming of a model's weights: each unit's weights are read ahead of its turn in the pass.

Hooks on the units bind their parameters to a slot before their forward and empty them after it. So
any forward of the model works, whichever code calls it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from ..decoding.protocols import Meanwhile
from .memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Counts of a stream since its start. The difference of two counts the time between them."""

    passes: int = 0
    """Passes that began, in the order of the first unit that isn't resident."""
    bytes_read: int = 0
    """Bytes read from the files, those read in vain included."""
    read_seconds: float = 0.0
    """Seconds in which units were read from files, copied and cast. Most run beside the pass."""
    wait_seconds: float = 0.0
    """Seconds in which passes waited for weights, those of `meanwhile` included."""
    drafts: int = 0
    """Calls of `meanwhile`."""
    draft_seconds: float = 0.0
    """Seconds in `meanwhile`."""
    late_drafts: int = 0
    """Calls of `meanwhile` that took longer than the wait."""
    late_seconds: float = 0.0
    """Seconds by which those calls delayed passes."""
    restarts: int = 0
    """Passes that began while the stream expected another unit: passes before them ended early."""

    def __sub__(self, earlier: "StreamStats") -> "StreamStats":
        """Return the counts since `earlier`."""
        return StreamStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


class WeightStream:
    """Weights of a model's streamed units, read in the order in which passes use them.

    Between its turn and the next a unit's parameters are empty tensors: code that reads them then
    finds nothing, not another unit's weights. `require_resident_weights` names such code's remedy.
    """

    plan: MemoryPlan

    @property
    def stats(self) -> StreamStats:
        """Counts since the stream's start, as a value."""
        raise NotImplementedError

    @property
    def bytes_per_second(self) -> float:
        """Rate at which units were read, cast included; measured first when the target loads."""
        raise NotImplementedError

    def seconds_left(self) -> float:
        """Return for how many seconds the pass will still wait; 0 if it needn't."""
        raise NotImplementedError

    @contextmanager
    def during_waits(self, meanwhile: Meanwhile | None) -> Iterator[None]:
        """Call `meanwhile` while the pass in the block waits for weights."""
        raise NotImplementedError
        yield

    def close(self) -> None:
        """Stop reading. Later passes raise RuntimeError."""
        raise NotImplementedError
