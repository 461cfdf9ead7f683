"""Links over ZeroMQ, with stages in threads of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from outrider.models.llm.stages.exchange import Exchange
from outrider.models.llm.stages.links import ProcessLink, StageLink
from outrider.models.llm.stages.messages import HEAD, StageLost, Work

LOCAL = "127.0.0.1"


class Pipeline:
    """Stages in threads, which multiply hidden states by their number."""

    def __init__(self, num_stages: int) -> None:
        head, *others = self.exchanges = [Exchange(rank, LOCAL, "the key") for rank in range(num_stages + 1)]
        self.held = threading.Event()
        """While it is set, stage 2 doesn't begin its next layer."""
        self.ending: set[int] = set()
        """Stages that end after their next run."""
        self.ended: list[int] = []
        self.stages: list[StageLink] = []
        names = {number: f"stage {number} (layer {number})" for number in range(1, num_stages + 1)}
        for number, (own, following) in enumerate(zip(others, [*others[1:], head], strict=True), start=1):
            own.connect(HEAD, "the head", LOCAL, head.port)
            head.connect(number, names[number], LOCAL, own.port)
            if following is not head:
                own.connect(number + 1, names[number + 1], LOCAL, following.port)
            self.stages.append(StageLink(own, HEAD if following is head else number + 1))
        self.link = ProcessLink(head, names)
        self.threads = [
            threading.Thread(target=self._serve, args=item, daemon=True) for item in enumerate(self.stages, start=1)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, number: int, link: StageLink) -> None:
        with suppress(StageLost, SystemExit):
            while number not in self.ending:
                work = link.receive()
                while number == 2 and self.held.is_set():
                    time.sleep(0.01)
                    link._move(0.0)
                hidden = None if work.hidden is None or link.is_cancelled(work.number) else work.hidden * (1 + number)
                link.send(replace(work, hidden=hidden))
        self.exchanges[number].close()
        self.ended.append(number)

    def require_ended(self) -> None:
        for thread in self.threads:
            thread.join(5)
        assert len(self.ended) == len(self.threads)


@contextmanager
def pipeline(num_stages: int) -> Iterator[Pipeline]:
    running = Pipeline(num_stages)
    try:
        yield running
    finally:
        running.held.clear()
        running.link.close()
        running.require_ended()


def work(number: int, size: int = 3) -> Work:
    hidden = torch.arange(size, dtype=torch.float64).view(1, 1, size)
    return Work(number=number, keep=(0, 2), num_committed=1, parents=(-1, 0), num_read=1, hidden=hidden)


def ask(link: ProcessLink) -> Work:
    link.send(work(1))
    return link.receive()


def ask_twice(link: ProcessLink) -> None:
    ask(link)
    ask(link)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_runs_pass_all_stages_in_order(num_stages: int) -> None:
    with pipeline(num_stages) as running:
        for number in range(20):
            running.link.send(work(number, size=1 + number))
        for number in range(20):
            answer = running.link.receive()
            factor = torch.arange(2, 2 + num_stages).prod()
            expected = work(number, size=1 + number)
            assert expected.hidden is not None
            assert answer.hidden is not None
            assert torch.equal(answer.hidden, expected.hidden * factor)
            assert replace(answer, hidden=None) == replace(expected, hidden=None)
        assert not running.link.has_answer()


def test_a_cancelled_run_is_answered_without_hidden_states() -> None:
    with pipeline(3) as running:
        running.held.set()
        for number in range(4):
            running.link.send(work(number))
        running.link.cancel([2, 3])
        running.link.cancel([2])
        running.held.clear()
        answers = [running.link.receive() for _ in range(4)]
        assert [answer.number for answer in answers] == [0, 1, 2, 3]
        assert [answer.hidden is None for answer in answers] == [False, False, True, True]
        running.link.cancel([0, 3])  # too late
        running.link.send(work(4))
        assert running.link.receive().hidden is not None


def test_a_cancellation_takes_one_hop() -> None:
    """The first stages have passed the run on, so the last one learns of it from the head."""
    with pipeline(2) as running:
        running.held.set()
        running.link.send(work(0))
        deadline = time.monotonic() + 5
        running.link.cancel([0])
        while not running.stages[1]._cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.held.clear()
        assert running.link.receive().hidden is None


def test_numbers_of_cancelled_runs_are_forgotten() -> None:
    with pipeline(2) as running:
        for number in range(0, 20, 2):
            running.link.send(work(number))
            running.link.cancel([number])
            running.link.send(work(number + 1))
            running.link.receive()
            running.link.receive()
        assert all(len(stage._cancelled) <= 1 for stage in running.stages)


def test_a_stage_that_has_ended_is_named_and_the_others_stop() -> None:
    with pipeline(4) as running:
        running.link.send(work(0))
        assert running.link.receive().number == 0
        running.ending.add(3)
        start = time.monotonic()
        with pytest.raises(StageLost, match=r"stage 3 \(layer 3\) has ended"):
            ask_twice(running.link)
        assert time.monotonic() - start < 2
        assert running.link.has_answer(), "waiting for it would be in vain"
        for act in (running.link.receive, lambda: running.link.send(work(2))):
            with pytest.raises(StageLost, match="layer 3"):
                act()
        running.require_ended()


def test_a_cut_connection_between_two_stages_is_named() -> None:
    with pipeline(3) as running:
        running.link.send(work(0))
        running.link.receive()
        running.exchanges[1].lost.add(2)
        with pytest.raises(StageLost, match=r"stage 2 \(layer 2\) .* can't be reached"):
            ask(running.link)
