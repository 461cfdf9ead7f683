"""Channels and links over sockets, with stages in threads of the test."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from outrider.models.llm.stages import links
from outrider.models.llm.stages.channels import Channel, Exchange, Message
from outrider.models.llm.stages.links import HeadLost, ProcessLink, RemoteStage, StageLink
from outrider.models.llm.stages.messages import Kind, StageLost, Work

LARGE = 3_000_000
"""Elements of a tensor that no socket's buffer takes at once."""


OPENED: list[Channel] = []


@pytest.fixture(autouse=True)
def close_channels() -> Iterator[None]:
    yield
    for channel in OPENED:
        channel.close()
    OPENED.clear()


def channels() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    OPENED.extend([Channel(one), Channel(two)])
    return OPENED[-2], OPENED[-1]


def received(channel: Channel, *, count: int = 1) -> list[Message]:
    exchange, messages = Exchange([channel]), []
    end = time.monotonic() + 10
    while len(messages) < count:
        assert time.monotonic() < end
        messages += [message for _, message in exchange.run(0.1)]
    return messages


class Pipeline:
    """Stages in threads, which multiply hidden states by their number."""

    def __init__(self, num_stages: int) -> None:
        controls = [channels() for _ in range(num_stages)]
        rings = [channels() for _ in range(num_stages - 1)]
        self.ring = [near for near, _ in rings]
        self.heads = [far for _, far in controls]
        stages = [RemoteStage(f"stage {number} (layer {number})", near) for number, (near, _) in enumerate(controls, start=1)]
        self.link = ProcessLink(stages)
        self.held = threading.Event()
        """While it is set, stage 2 doesn't begin its next layer."""
        self.ended: list[int] = []
        self.threads = []
        self.stages: list[StageLink] = []
        for number, head in enumerate(self.heads, start=1):
            previous = head if number == 1 else rings[number - 2][1]
            following = head if number == num_stages else rings[number - 1][0]
            neighbours = {
                channel: place for channel, place in ((previous, number - 1), (following, number + 1)) if channel is not head
            }
            stage = StageLink(head, previous, following, neighbours)
            self.stages.append(stage)
            self.threads.append(threading.Thread(target=self._serve, args=(number, stage), daemon=True))
            self.threads[-1].start()

    def _serve(self, number: int, link: StageLink) -> None:
        try:
            while (work := link.receive()) is not None:
                while number == 2 and self.held.is_set() and not link._stops:
                    time.sleep(0.01)
                    link._move(0.0)
                hidden = None if work.hidden is None or link.is_cancelled(work.number) else work.hidden * (1 + number)
                link.send(replace(work, hidden=hidden))
        except HeadLost:
            pass
        self.ended.append(number)

    def require_ended(self) -> None:
        for thread in self.threads:
            thread.join(5)
        assert len(self.ended) == len(self.threads)


@pytest.fixture
def short_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LEAST_STALL_SECONDS", 0.6)
    monkeypatch.setattr(links, "STALL_FACTOR", 0.0)


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
    return Work(number=number, kind=Kind.READ, keep=(0, 2), num_committed=1, parents=(-1, 0), num_read=1, hidden=hidden)


def ask(link: ProcessLink) -> Work:
    link.send(work(1))
    return link.receive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_tensor_of_any_type_arrives_as_it_was(dtype: torch.dtype) -> None:
    near, far = channels()
    tensor = torch.randn(1, 5, 7).to(dtype)
    near.send({"type": "a"}, tensor.transpose(1, 2))
    near.send({"type": "b", "numbers": [1, -2]})
    near.send({"type": "c"}, tensor[:, :0])
    first, second, third = received(far, count=3)
    assert first.tensor is not None
    assert torch.equal(first.tensor, tensor.transpose(1, 2))
    assert second.fields == {"type": "b", "numbers": [1, -2]}
    assert second.tensor is None
    assert third.tensor is not None
    assert third.tensor.shape == (1, 0, 7)


def test_two_processes_that_send_much_to_each_other_never_wait_for_each_other() -> None:
    near, far = channels()
    tensors = [torch.full((LARGE,), float(number)) for number in range(3)]
    for tensor in tensors:  # neither has read anything yet
        near.send({"type": "a"}, tensor)
        far.send({"type": "b"}, tensor + 1)
    assert near.has_unsent
    exchange, arrived = Exchange([near, far]), []
    end = time.monotonic() + 30
    while len(arrived) < 6:
        assert time.monotonic() < end
        arrived += exchange.run(0.1)
    for channel, change in ((far, 0), (near, 1)):
        messages = [message.tensor for receiver, message in arrived if receiver is channel]
        assert all(torch.equal(one, two + change) for one, two in zip(messages, tensors, strict=True) if one is not None)
        assert len(messages) == 3


def test_what_was_sent_before_an_end_arrives() -> None:
    near, far = channels()
    near.send({"type": "last"})
    near.close()
    assert received(far)[0].fields == {"type": "last"}
    Exchange([far]).run(1.0)
    assert far.lost
    far.send({"type": "late"})
    assert not far.has_unsent


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
        while running.stages[1]._num_received == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
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


def test_what_arrived_before_a_failed_send_is_read() -> None:
    near, far = channels()
    near.send({"type": "failed", "error": "out of memory"})
    near.close()
    for _ in range(3):
        far.send({"type": "late"})
        time.sleep(0.05)
    assert [message.fields["type"] for message in far.receive()] == ["failed"]
    far.receive()
    assert far.lost
    assert not far.has_unsent


@pytest.mark.usefixtures("short_stalls")
def test_a_pause_of_the_whole_pipeline_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z and `fg`, when no stage has answered yet."""
    with pipeline(2) as running:
        running.held.set()
        running.link.send(work(0))
        pauses = iter([2.0])
        move = running.link._move

        def moves_late(seconds: float = 0.0) -> None:
            if running.link._question and (pause := next(pauses, None)):
                time.sleep(pause)  # nobody runs, and nothing is read
                threading.Timer(0.3, running.held.clear).start()
            else:
                move(seconds)

        monkeypatch.setattr(running.link, "_move", moves_late)
        assert running.link.receive().hidden is not None


def test_a_stage_that_has_ended_is_named_and_the_others_stop() -> None:
    with pipeline(4) as running:
        running.link.send(work(0))
        assert running.link.receive().number == 0
        running.heads[2].close()
        start = time.monotonic()
        with pytest.raises(StageLost, match=r"stage 3 \(layer 3\) has ended"):
            ask(running.link)
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
        running.ring[1]._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(StageLost, match=r"stage [23] .* its connection to stage [23] .* is cut"):
            ask(running.link)


def swallow(running: Pipeline) -> None:
    running.ring[0].send = lambda fields, tensor=None: None  # type: ignore[method-assign]


def hold(running: Pipeline) -> None:
    running.held.set()


@pytest.mark.usefixtures("short_stalls")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (hold, r"stage 2 \(layer 2\) has finished no layer for 0.6 s"),
        (swallow, r"stage 2 \(layer 2\) has received nothing from stage 1 .* is cut"),
    ],
)
def test_stages_without_progress_are_lost_after_the_stall_limit(fault: Callable[[Pipeline], None], message: str) -> None:
    with pipeline(3) as running:
        running.link.send(work(0))
        running.link.receive()
        fault(running)
        running.link.send(work(1))
        start = time.monotonic()
        with pytest.raises(StageLost, match=message):
            running.link.receive()
        assert 0.6 <= time.monotonic() - start < 2


@pytest.mark.usefixtures("short_stalls")
def test_a_slow_stage_that_makes_progress_is_not_lost() -> None:
    with pipeline(2) as running:
        for number in range(4):
            running.link.send(work(number))
        running.held.set()

        def let_one_pass() -> None:
            for _ in range(4):
                time.sleep(0.5)
                running.held.clear()
                time.sleep(0.02)
                running.held.set()

        threading.Thread(target=let_one_pass, daemon=True).start()
        assert [running.link.receive().number for _ in range(4)] == [0, 1, 2, 3]
