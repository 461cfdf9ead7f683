"""A seeded scheduler of stages: it decides who moves next, and when cancellations land."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to cancellations on their way, as probabilities."""

    dropped: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    """Delayed past the answer: it lands when the run is long gone."""


NO_FAULTS = Faults()
FAULTS = (NO_FAULTS, Faults(dropped=0.5), Faults(doubled=0.9), Faults(delayed=0.7), Faults(dropped=1.0))


class Scheduler:
    """Moves of stages and of cancellations, in an order that follows from the seed.

    `inboxes` are the messages to each stage, then those to the head. `advance` lets a stage handle
    its oldest message. `cancelled` are the numbers that have reached each stage.
    """

    def __init__(
        self,
        seed: int,
        faults: Faults,
        inboxes: list[deque[Any]],
        cancelled: list[set[int]],
        advance: Callable[[int], None],
    ) -> None:
        self.random, self.faults = Random(seed), faults
        self.paces = self.random.choice([(0,) * 9 + (1,), (0, 0, 0, 1), (0, 1, 2)])
        """How many moves there are between two calls of the head."""
        self.inboxes, self.cancelled, self.advance = inboxes, cancelled, advance
        self.on_the_way: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.num_moves = 0

    def move_some(self) -> None:
        for _ in range(self.random.choice(self.paces)):
            if not self.move():
                break

    def move(self) -> bool:
        """Let one stage or one cancellation move; return False if nothing can."""
        ready = [stage for stage, inbox in enumerate(self.inboxes[:-1]) if inbox]
        if not ready and not self.on_the_way:
            return False
        self.num_moves += 1
        choice = self.random.randrange(len(ready) + len(self.on_the_way))
        if choice < len(ready):
            self.advance(ready[choice])
        else:
            number, stage = self.on_the_way.pop(choice - len(ready))
            self.cancelled[stage].add(number)
        return True

    def wait(self) -> None:
        """Move until there is an answer."""
        while not self.inboxes[-1]:
            assert self.move(), "nothing can move: the head would wait for ever"

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            for stage in range(len(self.cancelled)):
                if self.random.random() < self.faults.dropped:
                    continue
                if self.random.random() < self.faults.delayed:
                    self.late.append((number, stage))
                    continue
                self.on_the_way.append((number, stage))
                if self.random.random() < self.faults.doubled:
                    self.on_the_way.append((number, stage))
        self.move_some()

    def deliver_late(self, number: int) -> None:
        """Deliver the delayed cancellations of a run that was answered."""
        for late, stage in self.late:
            if late == number:
                self.cancelled[stage].add(number)
        self.late = [pair for pair in self.late if pair[0] != number]
