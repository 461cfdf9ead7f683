"""A stopwatch for parts of a schedule's work."""

import time
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Stopwatch:
    """Sum of the seconds that its `with` blocks take; blocks aren't nested.

    With an accelerator's `device` it waits for the device at both ends of a block, so that the work
    before a block doesn't count.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 0.0
    _started: float = field(default=0.0, init=False)

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._started

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()
        return time.perf_counter()
