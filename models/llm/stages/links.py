"""Links between the processes of a target in stages.

    head <--control--> each stage       cancellations, questions, the end
    head --> stage 1 --> ... --> stage n --> head       work

The first and the last stage use their control connection for work, too. A cancellation takes one
hop, and a stage looks for it between two layers. The end of a process closes its connections, so
the head knows at once which stage it was. A stage that stops answering is found by questions: after
the stall limit a stage that doesn't answer them, or a pipeline in which no stage has finished a
layer since the last question, is lost.
"""

import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import FrameType
from typing import Any

from .channels import Channel, Exchange, Message
from .messages import Kind, StageLost, Work

logger = logging.getLogger(__name__)

LEAST_STALL_SECONDS, STALL_FACTOR = 30.0, 10.0
"""Time without progress after which a stage counts as lost: this factor times the slowest answer, at least so long."""
QUESTIONS = 3
"""Intervals without progress that are the stall limit. At the end of each, all stages are asked."""
PAUSE_SECONDS = 1.0
"""A wait that is so much longer than its limit: this process was stopped (Ctrl-Z, a debugger)."""
REPORT_SECONDS = 0.3
"""Time between a stage's report of a lost neighbour and that neighbour's own end."""
GOODBYE_SECONDS = 2.0
"""Longest wait until the system has taken the head's last messages."""
REMEDY = "Look at the last lines that its process printed, and run the same command again: recorded answers are kept"


class Type(StrEnum):
    """What a message is."""

    WORK = "work"
    CANCEL = "cancel"
    ASK = "ask"
    PROGRESS = "progress"
    LOST = "lost"
    FAILED = "failed"
    STOP = "stop"


def send_work(channel: Channel, work: Work) -> None:
    """Send a run."""
    fields = {
        "type": Type.WORK,
        "number": work.number,
        "kind": int(work.kind),
        "keep": work.keep,
        "num_committed": work.num_committed,
        "parents": work.parents,
        "num_read": work.num_read,
        "capacity": work.capacity,
    }
    channel.send(fields, work.hidden)


def work_of(message: Message) -> Work:
    """Return the run that a message carries."""
    fields = {name: value for name, value in message.fields.items() if name != "type"}
    fields["kind"] = Kind(fields["kind"])
    fields["keep"] = None if fields["keep"] is None else tuple(fields["keep"])
    return Work(**{**fields, "parents": tuple(fields["parents"]), "hidden": message.tensor})


@dataclass(eq=False, slots=True)
class RemoteStage:
    """A stage, as the head sees it."""

    name: str
    """Its number, layers and process, for messages."""
    channel: Channel
    answered: int = 0
    """The last question that it has answered."""
    progress: tuple[int, int, int] | None = None
    """Runs received and finished, and layers begun, as it answered; None before it has."""


class ProcessLink:
    """The head's link to stages in other processes.

    It has no thread: messages move when a method is called.
    """

    def __init__(self, stages: Sequence[RemoteStage]) -> None:
        self.stages = list(stages)
        self._exchange = Exchange([stage.channel for stage in stages])
        self._by_channel = {stage.channel: stage for stage in stages}
        self._answers: deque[Work] = deque()
        self._sent_at: dict[int, float] = {}
        self._slowest = 0.0
        self._question = 0
        self._num_still = 0
        """Intervals without progress, one after the other."""
        self._lost: StageLost | None = None
        self._reported = ""
        self._reported_at = 0.0
        # Also at the end of the process, whatever ends it.
        self.close = weakref.finalize(self, _stop, [stage.channel for stage in stages])

    @property
    def num_stages(self) -> int:
        """How many stages there are, without the head."""
        return len(self.stages)

    def send(self, work: Work) -> None:
        """Send a message to the first stage, without waiting for it."""
        self._move()
        self._require_all()
        self._sent_at[work.number] = time.monotonic()
        send_work(self.stages[0].channel, work)

    def has_answer(self) -> bool:
        """Return whether `receive` wouldn't wait."""
        self._move()
        return bool(self._answers) or self._lost is not None

    def receive(self) -> Work:
        """Wait for the next message from the last stage, and return it.

        Raises StageLost if a stage has ended or doesn't answer.
        """
        self._move()
        is_first, self._num_still, begin = True, 0, time.monotonic()
        while not self._answers:
            self._require_all()
            rest = begin + self._stall_limit / QUESTIONS - time.monotonic()
            if rest > 0:
                self._move(min(rest, REPORT_SECONDS))
                continue
            # An interval is over. After a pause of this process, stages may not have answered yet.
            self._num_still = 0 if rest < -PAUSE_SECONDS else self._num_still + 1
            if self._num_still < QUESTIONS:
                self._ask(is_first=is_first)
                is_first, begin = False, time.monotonic()
            else:
                self._lose(self._stalled())
        return self._answers.popleft()

    def cancel(self, numbers: Sequence[int]) -> None:
        """Send every stage the numbers of runs that it may skip, without waiting."""
        for stage in self.stages if numbers else ():
            stage.channel.send({"type": Type.CANCEL, "numbers": list(numbers)})

    def is_lost(self, seconds: float) -> bool:
        """Wait at most so long for the loss of a stage, and return whether one is lost."""
        end = time.monotonic() + seconds
        while self._lost is None and (rest := end - time.monotonic()) > 0:
            self._move(rest)
        return self._lost is not None

    @property
    def _stall_limit(self) -> float:
        return max(LEAST_STALL_SECONDS, STALL_FACTOR * self._slowest)

    def _require_all(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _move(self, seconds: float = 0.0) -> None:
        """Send and receive what is possible, and notice losses."""
        for channel, message in self._exchange.run(seconds):
            self._handle(self._by_channel[channel], message)
        if self._lost is not None:
            return
        # The end of a stage is surer than a neighbour's report of it.
        if gone := next((stage for stage in self.stages if stage.channel.lost), None):
            self._lose(f"{gone.name} has ended ({gone.channel.lost})")
        elif self._reported and time.monotonic() - self._reported_at > REPORT_SECONDS:
            self._lose(self._reported)

    def _handle(self, stage: RemoteStage, message: Message) -> None:
        """Act on a message from a stage."""
        fields = message.fields
        match fields["type"]:
            case Type.WORK:
                self._arrived(message)
            case Type.PROGRESS:
                progress = tuple(fields["progress"])
                if stage.progress not in (None, progress):
                    self._num_still = 0
                stage.answered, stage.progress = fields["question"], progress
            case Type.LOST if not self._reported:
                other = self.stages[fields["stage"] - 1]
                self._reported = f"{other.name} has ended, or its connection to {stage.name} is cut"
                self._reported_at = time.monotonic()
            case Type.FAILED:
                self._lose(f"{stage.name} failed: {fields['error']}")

    def _arrived(self, message: Message) -> None:
        """Take an answer."""
        work = work_of(message)
        self._slowest = max(self._slowest, time.monotonic() - self._sent_at.pop(work.number))
        self._answers.append(work)

    def _lose(self, what: str) -> None:
        """Stop all stages, since none can go on without the lost one."""
        self._lost = self._lost or StageLost(f"a stage of the target is lost: {what}. {REMEDY}")
        self.close()

    def _ask(self, *, is_first: bool) -> None:
        """Ask all stages how far they are. `is_first` forgets what they answered earlier."""
        self._question += 1
        for stage in self.stages:
            stage.progress = None if is_first else stage.progress
            stage.channel.send({"type": Type.ASK, "question": self._question})

    def _stalled(self) -> str:
        """Return which stage has stalled, where nothing has moved for the stall limit."""
        limit = f"for {self._stall_limit:.3g} s"
        # 1. A stage may be silent since it waits for the one behind it, so the last silent one is the
        # cause.
        if silent := [stage for stage in self.stages if stage.answered < self._question or stage.progress is None]:
            return f"{silent[-1].name} doesn't answer {limit}: its process is stopped, or its network is cut"
        # 2. All stages answer: a run was lost between two of them, or one computes without an end.
        counts = [stage.progress for stage in self.stages if stage.progress is not None]
        for index, (here, there) in enumerate(pairwise(counts)):
            if here[1] > there[0]:
                stage, following = self.stages[index : index + 2]
                return f"{following.name} has received nothing from {stage.name} {limit}: their connection is cut"
        stuck = next((stage for stage, count in zip(self.stages, counts, strict=True) if count[0] > count[1]), self.stages[-1])
        return f"{stuck.name} has finished no layer {limit}"


def _stop(channels: Sequence[Channel]) -> None:
    """Tell all stages to stop, and close their channels."""
    for channel in channels:
        channel.send({"type": Type.STOP})
    exchange, end = Exchange([channel for channel in channels if not channel.lost]), time.monotonic() + GOODBYE_SECONDS
    while any(channel.has_unsent for channel in channels) and time.monotonic() < end:
        exchange.run(GOODBYE_SECONDS / 10)
    for channel in channels:
        channel.close()


def report_loss_on_sigterm(link: ProcessLink) -> None:
    """Let a SIGTERM raise StageLost where a stage was lost.

    Launchers end all processes as soon as one has ended, and the head is to name it first.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    remembered = weakref.ref(link)

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        link = remembered()
        if link is not None and link.is_lost(REPORT_SECONDS):
            assert link._lost is not None
            raise link._lost
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


class HeadLost(Exception):  # noqa: N818 - the name says what has happened
    """The head has ended, so the stage ends, too."""


class StageLink:
    """A stage's link to the head and to its neighbours. It has no thread either.

    The first stage's `previous`, and the last one's `following`, are the head. `neighbours` are the
    numbers of the stages before and behind.
    """

    def __init__(self, head: Channel, previous: Channel, following: Channel, neighbours: Mapping[Channel, int]) -> None:
        self._head, self._following = head, following
        self._neighbours = dict(neighbours)
        self._exchange = Exchange([*{head: 0, previous: 0, following: 0}])
        self._works: deque[Work] = deque()
        self._cancelled: set[int] = set()
        self._stops = False
        self._num_received = self._num_finished = self._num_looks = 0

    def receive(self) -> Work | None:
        """Wait for the next message and return it; None if the stage has to stop.

        Raises HeadLost if the head has ended.
        """
        while not self._works and not self._stops:
            self._move(None)
        if self._stops:
            return None
        work = self._works.popleft()
        self._cancelled = {number for number in self._cancelled if number >= work.number}
        return work

    def send(self, work: Work) -> None:
        """Send a message to the next stage, or from the last one to the head."""
        self._num_finished += 1
        send_work(self._following, work)

    def is_cancelled(self, number: int) -> bool:
        """Return whether a run may be skipped. To be called before each layer."""
        self._num_looks += 1
        self._move(0.0)
        return self._stops or number in self._cancelled

    def fail(self, error: str) -> None:
        """Report an error of this stage to the head."""
        self._head.send({"type": Type.FAILED, "error": error})
        end = time.monotonic() + GOODBYE_SECONDS
        while not self._head.lost and time.monotonic() < end:
            self._exchange.run(GOODBYE_SECONDS / 10)

    def _move(self, seconds: float | None) -> None:
        for channel, message in self._exchange.run(seconds):
            self._handle(channel, message.fields, message)
        if self._stops:
            return
        if self._head.lost:
            raise HeadLost(self._head.lost)
        for channel in [channel for channel in self._neighbours if channel.lost]:
            self._head.send({"type": Type.LOST, "stage": self._neighbours.pop(channel)})

    def _handle(self, channel: Channel, fields: dict[str, Any], message: Message) -> None:
        match fields["type"]:
            case Type.WORK:
                self._num_received += 1
                self._works.append(work_of(message))
            case Type.CANCEL:
                self._cancelled.update(fields["numbers"])
            case Type.ASK:
                progress = [self._num_received, self._num_finished, self._num_looks]
                self._head.send({"type": Type.PROGRESS, "question": fields["question"], "progress": progress})
            case Type.STOP:
                self._stops = True
