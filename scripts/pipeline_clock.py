"""Virtual time: the stages and links of a pipeline as an event queue.

A `Clock` counts seconds at the head: draft passes and the head's work move it on, and waiting for an
answer moves it to the answer. Stages are servers that handle messages in order. Links have a latency
and a bandwidth. Nothing here measures anything.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a pipeline's parts."""

    stage_seconds: tuple[float, ...]
    """Seconds of each stage for one entry."""
    factors: tuple[float, ...] = ()
    """Seconds for 1, 2, ... entries over those for one, where they were measured."""
    entry_share: float = 0.16
    """Seconds of each further entry, over those of the first one, beyond `factors`."""
    hop_seconds: float = 1e-3
    bytes_per_second: float = 125e6
    entry_bytes: int = 16_384
    header_bytes: int = 256
    draft_seconds: float = 2e-3
    head_seconds: float = 1e-3
    """Seconds of the head for an answer that wasn't cancelled."""
    skip_seconds: float = 1e-4
    """Seconds in which a stage passes a cancelled run on."""
    layers: int = 4
    """Layers of a stage. It looks for cancellations between layers."""

    @property
    def num_stages(self) -> int:
        return len(self.stage_seconds)

    def seconds(self, stage: int, num_entries: int) -> float:
        """Return the seconds of a stage for a run."""
        if num_entries <= len(self.factors):
            return self.stage_seconds[stage] * self.factors[num_entries - 1]
        known = max(len(self.factors), 1)
        last = self.factors[-1] if self.factors else 1.0
        return self.stage_seconds[stage] * (last + self.entry_share * (num_entries - known))

    def message_bytes(self, num_entries: int) -> int:
        return self.header_bytes + self.entry_bytes * num_entries


class AnyClock(Protocol):
    """Virtual time or the wall clock."""

    @property
    def now(self) -> float: ...

    def draft(self, seconds: float) -> None: ...


@dataclass(slots=True)
class Clock:
    """Seconds since the beginning, at the head."""

    now: float = 0.0
    drafts: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each draft pass."""

    def draft(self, seconds: float) -> None:
        self.drafts.append((self.now, self.now + seconds))
        self.now += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Time in which a stage computed a run."""

    stage: int
    start: float
    end: float
    number: int
    num_entries: int


@dataclass(slots=True, kw_only=True)
class Message:
    """A run on its way. `is_skipped` once a stage has skipped it."""

    number: int
    num_entries: int
    is_skipped: bool = False


@dataclass(slots=True)
class Server:
    """A stage: its queue, and what it computes now."""

    queue: deque[Message] = field(default_factory=deque)
    current: Message | None = None
    start: float = 0.0
    end: float = inf
    link_free: float = 0.0
    """When the link behind it has sent all bytes."""
    cancelled: set[int] = field(default_factory=set)


class Pipeline:
    """Event queue of stages and links. The head sends at the clock's time.

    `cancels` and `is_backward` are for ablations: without cancellations, or with cancellations that
    enter at the last stage and go against the direction of the runs, as PipeInfer's.
    """

    def __init__(self, costs: Costs, clock: Clock, *, cancels: bool = True, is_backward: bool = False) -> None:
        self.costs, self.clock, self.cancels, self.is_backward = costs, clock, cancels, is_backward
        self.servers = [Server() for _ in costs.stage_seconds]
        self.answers: deque[tuple[float, Message]] = deque()
        self.spans: list[Span] = []
        self.cancelled: set[int] = set()
        self.sizes: dict[int, int] = {}
        """Number of entries of each run that was sent."""
        self.bytes_sent = 0
        """Bytes over the head's outgoing link."""
        self._link_free = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0

    @property
    def now(self) -> float:
        return self.clock.now

    def send(self, number: int, num_entries: int) -> None:
        """Send a run to the first stage."""
        self._run_to(self.now)
        self.sizes[number] = num_entries
        self.bytes_sent += self.costs.message_bytes(num_entries)
        message = Message(number=number, num_entries=num_entries)
        self._link_free = self._transfer(message, self.now, self._link_free, 0)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Send cancellations to all stages."""
        self.cancelled.update(numbers)
        if not self.cancels or not numbers:
            return
        for stage in range(len(self.servers)):
            hops = len(self.servers) - stage if self.is_backward else 1
            self._at(self.now + hops * self.costs.hop_seconds, lambda time, stage=stage: self._cancel(stage, numbers, time))  # type: ignore[misc]

    def forget(self) -> None:
        """Forget the figures of what was sent: they count from a prefill on."""
        self.spans, self.sizes, self.bytes_sent = [], {}, 0
        self.cancelled = set()

    def full_seconds(self, number: int) -> float:
        """Return the seconds that a run takes in all stages if it isn't cancelled."""
        return sum(self.costs.seconds(stage, self.sizes[number]) for stage in range(len(self.servers)))

    def has_answer(self) -> bool:
        self._run_to(self.now)
        return bool(self.answers)

    def receive(self) -> Message:
        """Wait for the next answer, and return it."""
        while not self.answers:
            assert self._events, "the head waits for an answer, and no run is under way"
            self._run_next()
        arrival, message = self.answers.popleft()
        self.clock.now = max(self.now, arrival)
        return message

    # --- events

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, action))

    def _run_to(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            self._run_next()

    def _run_next(self) -> None:
        time, _, action = heapq.heappop(self._events)
        action(time)

    def _transfer(self, message: Message, time: float, link_free: float, stage: int) -> float:
        """Send a message to a stage (or to the head); return when the link is free again."""
        size = self.costs.message_bytes(0 if message.is_skipped else message.num_entries)
        sent = max(time, link_free) + size / self.costs.bytes_per_second
        self._at(sent + self.costs.hop_seconds, lambda time: self._arrive(stage, message, time))
        return sent

    def _arrive(self, stage: int, message: Message, time: float) -> None:
        if stage == len(self.servers):
            self.answers.append((time, message))
            return
        self.servers[stage].queue.append(message)
        self._start(stage, time)

    def _start(self, stage: int, time: float) -> None:
        """Begin the next run of a stage, if the stage is idle."""
        server = self.servers[stage]
        if server.current is not None or not server.queue:
            return
        message = server.current = server.queue.popleft()
        message.is_skipped = message.is_skipped or message.number in server.cancelled
        seconds = self.costs.skip_seconds if message.is_skipped else self.costs.seconds(stage, message.num_entries)
        server.start, server.end = time, time + seconds
        self._at(server.end, lambda time: self._finish(stage, message, time))

    def _finish(self, stage: int, message: Message, time: float) -> None:
        server = self.servers[stage]
        if server.current is not message or time != server.end:
            return  # it ended earlier, by a cancellation
        is_aborted = not message.is_skipped and message.number in server.cancelled
        if not message.is_skipped:
            self.spans.append(
                Span(stage=stage, start=server.start, end=time, number=message.number, num_entries=message.num_entries)
            )
        message.is_skipped = message.is_skipped or is_aborted
        server.current = None
        server.link_free = self._transfer(message, time, server.link_free, stage + 1)
        self._start(stage, time)

    def _cancel(self, stage: int, numbers: Sequence[int], time: float) -> None:
        """Let a stage abort the run that it computes, after the current layer."""
        server = self.servers[stage]
        server.cancelled.update(numbers)
        message = server.current
        if message is None or message.is_skipped or message.number not in numbers:
            return
        layer = self.costs.seconds(stage, message.num_entries) / self.costs.layers
        end = server.start + ceil((time - server.start) / layer) * layer
        if end < server.end:
            server.end = end
            self._at(end, lambda time: self._finish(stage, message, time))
