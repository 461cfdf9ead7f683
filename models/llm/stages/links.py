"""Links between the processes of a target in stages.

    head --> stage 1 --> ... --> stage n --> head       work
    head <--> each stage       cancellations, failures, the end

A cancellation takes one hop, and a stage looks for it between two layers. Each process notices the
loss of those that it sends to (see `Exchange`); a stage reports it to the head, which names the lost
stage and ends the others.
"""

import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import FrameType
from typing import Any

from .exchange import ENDED, Exchange, Message
from .messages import HEAD, StageLost, Work

REPORT_SECONDS = 0.3
"""Longest time between the end of a stage and its report."""
REMEDY = "Look at the last lines that its process printed, and run the same command again: recorded answers are kept"
PLAIN_FIELDS = [field.name for field in fields(Work) if field.name != "hidden"]


def send_work(exchange: Exchange, rank: int, work: Work) -> None:
    """Send a run."""
    exchange.send(rank, "work", work.hidden, **{name: getattr(work, name) for name in PLAIN_FIELDS})


def work_of(message: Message) -> Work:
    """Return the run that a message carries."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in message.fields.items()
    }
    return Work(**values, hidden=message.tensor)


class ProcessLink:
    """The head's link to stages in other processes, by their numbers. `names` are for messages."""

    def __init__(self, exchange: Exchange, names: Mapping[int, str]) -> None:
        self._exchange, self._names = exchange, names
        self.num_stages = len(names)
        self._answers: deque[Work] = deque()
        self._lost: StageLost | None = None
        # Also at the end of the process, whatever ends it.
        self.close = weakref.finalize(self, exchange.close, "stop")

    def send(self, work: Work) -> None:
        """Send a message to the first stage, without waiting for it."""
        self._move(0.0)
        self.look_for_loss(0.0)
        send_work(self._exchange, 1, work)

    def has_answer(self) -> bool:
        """Return whether `receive` wouldn't wait."""
        self._move(0.0)
        return bool(self._answers) or self._lost is not None

    def receive(self) -> Work:
        """Wait for the next message from the last stage, and return it.

        Raises StageLost if a stage has ended or doesn't answer.
        """
        while not self._answers:
            self.look_for_loss(0.0)
            self._move(None)
        return self._answers.popleft()

    def cancel(self, numbers: Sequence[int]) -> None:
        """Send every stage the numbers of runs that it may skip, without waiting."""
        for rank in self._names if numbers and self._lost is None else ():
            self._exchange.send(rank, "cancel", numbers=list(numbers))

    def look_for_loss(self, seconds: float) -> None:
        """Wait at most so long for the loss of a stage. Raises StageLost if one is lost."""
        end = time.monotonic() + seconds
        while self._lost is None and (rest := end - time.monotonic()) > 0:
            self._move(rest)
        if self._lost is not None:
            raise self._lost

    def _move(self, seconds: float | None) -> None:
        """Receive what has arrived, and notice losses."""
        if self._lost is not None:
            return
        for message in self._exchange.receive(seconds):
            if message.topic == "work":
                self._answers.append(work_of(message))
            else:
                self._lose(message.fields["stage"], message.fields["error"])
        if self._exchange.lost:
            self._lose(min(self._exchange.lost), ENDED)

    def _lose(self, rank: int, what: str) -> None:
        """Stop all stages, since none can work without the lost one."""
        self._lost = self._lost or StageLost(f"a stage of the target is lost: {self._names[rank]} {what}. {REMEDY}")
        self.close()


def report_loss_on_sigterm(link: ProcessLink) -> None:
    """Let a SIGTERM raise StageLost where a stage was lost.

    Launchers end all processes as soon as one has ended, and the head is to name it first.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    remembered = weakref.WeakMethod(link.look_for_loss)

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if look_for_loss := remembered():
            look_for_loss(REPORT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


class StageLink:
    """A stage's link to the head, and to the process that reads its results (`following`)."""

    def __init__(self, exchange: Exchange, following: int) -> None:
        self._exchange, self._following = exchange, following
        self._works: deque[Work] = deque()
        self._cancelled: set[int] = set()

    def receive(self) -> Work:
        """Wait for the next message and return it."""
        while not self._works:
            self._move(None)
        work = self._works.popleft()
        self._cancelled = {number for number in self._cancelled if number >= work.number}
        return work

    def send(self, work: Work) -> None:
        """Send a message to the next stage, or from the last one to the head."""
        send_work(self._exchange, self._following, work)

    def is_cancelled(self, number: int) -> bool:
        """Return whether a run may be skipped. To be called before each layer."""
        self._move(0.0)
        return number in self._cancelled

    def _move(self, seconds: float | None) -> None:
        """Receive what has arrived. Ends the process when the head does; raises StageLost without its word."""
        for message in self._exchange.receive(seconds):
            match message.topic:
                case "work":
                    self._works.append(work_of(message))
                case "cancel":
                    self._cancelled.update(message.fields["numbers"])
                case "stop":
                    self._exchange.close()
                    raise SystemExit(0)
        if HEAD in self._exchange.lost:
            raise StageLost(f"the head {ENDED}")
        if self._following in self._exchange.lost:
            self._exchange.send(HEAD, "failed", stage=self._following, error=ENDED)
