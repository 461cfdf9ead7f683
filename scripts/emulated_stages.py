"""Real processes as stages whose seconds are emulated: the wall clock of `Costs` on a small machine.

A stage computes its real layers of a small target, then sleeps until the emulated time of the run is
over, and looks for cancellations between emulated layers. The receiver of a message holds it for the
emulated time of the hop. So processes, sockets, the decode loop and all races are real, and only the
speeds of layers and links aren't. Every figure of it is named "emulated stages".
"""

import heapq
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from pipeline_clock import Costs
from transformers import PreTrainedModel

from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.stages.channels import Channel, Exchange, Message
from outrider.models.llm.stages.links import ProcessLink, RemoteStage, StageLink, Type
from outrider.models.llm.stages.messages import Kind, Work
from outrider.models.llm.stages.serve import leave_interrupts_to_the_head, serve
from outrider.models.llm.stages.slices import EndSlice, LayerSlice
from outrider.models.llm.stages.stage import Stage
from outrider.models.llm.stages.staged_target import StagedTarget

EMULATED = "emulated stages, wall clock"
SHORT_SECONDS = 0.002
"""Waits below this sleep, since `poll` counts whole milliseconds."""


class RealClock:
    """Wall clock with the interface of `Clock`: a draft pass sleeps."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def draft(self, seconds: float) -> None:
        time.sleep(seconds)


class SleepingStage(Stage):
    """A stage that takes its emulated time for each run."""

    def __init__(self, layers: LayerSlice, costs: Costs, index: int, arrivals: dict[int, float]) -> None:
        super().__init__(layers)
        self.costs, self.index, self.arrivals = costs, index, arrivals
        self._free = 0.0
        """When the last run was over."""

    def handle(self, work: Work, is_cancelled: Callable[[int], bool]) -> Work:
        # A run begins when it has arrived and the stage is free, not when a busy machine wakes the
        # process up.
        start = max(self._free, self.arrivals.pop(work.number, 0.0))
        done = super().handle(work, is_cancelled)
        if done.hidden is None or work.hidden is None:
            return done
        layers, seconds = self.costs.layers, self.costs.seconds(self.index, work.hidden.shape[1])
        for layer in range(1, layers + 1):
            time.sleep(max(start + seconds * layer / layers - time.monotonic(), 0.0))
            if work.kind is Kind.READ and layer < layers and is_cancelled(work.number):
                self._free = time.monotonic()
                return replace(done, hidden=None)
        self._free = start + seconds
        return done


class DelayedExchange:
    """The channels of a process, whose messages arrive after an emulated hop.

    Runs need the link for their bytes, one after the other. Control messages take the latency only.
    """

    def __init__(self, inner: Exchange, costs: Costs) -> None:
        self.inner, self.costs = inner, costs
        self._held: list[tuple[float, int, Channel, Message]] = []
        self._free: dict[Channel, float] = {}
        self._count = 0
        self.arrivals: dict[int, float] = {}
        """When each run has arrived, by its number."""

    def run(self, seconds: float | None = 0.0) -> list[tuple[Channel, Message]]:
        """Return the messages that have arrived; wait at most so long for the first one."""
        end = float("inf") if seconds is None else time.monotonic() + seconds
        self._hold(self.inner.run(0.0))
        while not (due := self._due()) and (now := time.monotonic()) < end:
            rest = min([end, *(first[0] for first in self._held[:1])]) - now
            if rest < SHORT_SECONDS:
                time.sleep(max(rest, 0.0))
                self._hold(self.inner.run(0.0))
                continue
            messages = self.inner.run(None if rest == float("inf") else int(1000 * rest) / 1000)
            self._hold(messages)
            if not messages and rest > SHORT_SECONDS and seconds is not None and time.monotonic() < end - SHORT_SECONDS:
                break  # a channel was lost, or a queue is empty
        return due or self._due()

    def _hold(self, messages: Sequence[tuple[Channel, Message]]) -> None:
        for channel, message in messages:
            size = 0
            if message.fields["type"] == Type.WORK:
                size = self.costs.message_bytes(0 if message.tensor is None else message.tensor.shape[1])
            start = max(message.sent_at, self._free.get(channel, 0.0)) if size else message.sent_at
            sent = start + size / self.costs.bytes_per_second
            if size:
                self._free[channel] = sent
                self.arrivals[message.fields["number"]] = sent + self.costs.hop_seconds
            self._count += 1
            heapq.heappush(self._held, (sent + self.costs.hop_seconds, self._count, channel, message))

    def _due(self) -> list[tuple[Channel, Message]]:
        now, due = time.monotonic(), []
        while self._held and self._held[0][0] <= now:
            due.append(heapq.heappop(self._held)[2:])
        return due


@contextmanager
def in_processes(target: HFTarget, count: int, costs: Costs | None = None) -> Iterator[StagedTarget]:
    """Yield a target whose layers are in so many processes, which take the emulated time of `costs`.

    Without `costs` they take their own time, with the fastest linear layers. The processes share
    the target's memory, so this process must not have computed with several threads.
    """
    # 1. Layers are split evenly: emulated seconds have nothing to do with them.
    num_layers = target.model.config.get_text_config().num_hidden_layers
    if num_layers < count:
        raise ValueError(f"the target has {num_layers} layers for {count} stages; grow it, so that each stage has a layer")
    bounds = [round(num_layers * index / count) for index in range(count + 1)]
    # 2. A socket between the head and each stage, and one between neighbours. The first and the
    # last stage use theirs for runs, too.
    control = [connected() for _ in range(count)]
    links = [connected() for _ in range(count - 1)]
    every = [end for pair in (*control, *links) for end in pair]
    context, processes = multiprocessing.get_context("fork"), []
    for index, (first, last) in enumerate(pairwise(bounds)):
        ends = [control[index][1], links[index - 1][1] if index else None, links[index][0] if index + 1 < count else None]
        processes.append(context.Process(target=stage_process, args=(target, costs, index, range(first, last), ends, every)))
        processes[-1].daemon = True
        processes[-1].start()
    # 3. The head keeps its own ends only, so that the end of a stage closes the connection.
    for end in every:
        if end not in [pair[0] for pair in control]:
            end.close()
    stages = [RemoteStage(f"stage {index + 1}", Channel(pair[0])) for index, pair in enumerate(control)]
    link = ProcessLink(stages)
    if costs is not None:
        link._exchange = DelayedExchange(link._exchange, costs)  # type: ignore[assignment]
    try:
        ends_of_model, counts = EndSlice.cut(copy_sharing_weights(target)), [last - first for first, last in pairwise(bounds)]
        is_fast = costs is None
        yield StagedTarget(ends_of_model, target.tokenizer, target.identity, link, stage_layers=counts, fast_linears=is_fast)
    finally:
        link.close()
        for process in processes:
            process.join(10.0)
            process.kill()


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    return first, second


def copy_sharing_weights(target: HFTarget) -> PreTrainedModel:
    """Return a copy of the target's modules with the same parameters and buffers."""
    target.release_hooks()
    model = target.model
    return deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def stage_process(
    target: HFTarget, costs: Costs | None, index: int, layers: range, ends: Sequence[Any], every: Sequence[socket.socket]
) -> None:
    """Be a stage until the head stops it."""
    leave_interrupts_to_the_head()
    for end in every:
        if not any(end is used for used in ends):
            end.close()
    head = Channel(ends[0])
    previous, following = (head if end is None else Channel(end) for end in ends[1:])
    neighbours = {channel: number for channel, number in ((previous, index), (following, index + 2)) if channel is not head}
    link = StageLink(head, previous, following, neighbours)
    target.release_hooks()
    part = LayerSlice.cut(target.model, layers)
    if costs is None:
        serve(Stage(part), link, fast_linears=True)
    delayed = DelayedExchange(link._exchange, costs)
    link._exchange = delayed  # type: ignore[assignment]
    serve(SleepingStage(part, costs, index, delayed.arrivals), link, fast_linears=False)
