"""Messages between processes over ZeroMQ: what arrives, who is lost, and that strangers stay outside."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import zmq

from outrider.models.llm.stages import exchange
from outrider.models.llm.stages.exchange import MOST_FRAME_BYTES, Exchange, Message, is_loopback
from outrider.models.llm.stages.messages import StageLost

from ....forks import CONTEXT

LARGE = 3_000_000
"""Elements of a tensor that no socket's buffer takes at once."""
LOCAL = "127.0.0.1"
Connect = Callable[..., tuple[Exchange, Exchange]]


@pytest.fixture
def connected() -> Iterator[Connect]:
    """Return a function that makes the exchanges of processes 0 and 1, which are connected."""
    with ExitStack() as stack:

        def connect(address: str = LOCAL) -> tuple[Exchange, Exchange]:
            one, two = (stack.enter_context(closing(Exchange(rank, address, "the key"))) for rank in (0, 1))
            two.connect(0, "the head", address, one.port)
            one.connect(1, "stage 1", address, two.port)
            return one, two

        yield connect


def received(source: Exchange, *, count: int = 1) -> list[Message]:
    messages: list[Message] = []
    end = time.monotonic() + 10
    while len(messages) < count:
        assert time.monotonic() < end
        messages += source.receive(0.1)
    return messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_tensor_of_any_type_and_size_arrives_as_it_was(dtype: torch.dtype, connected: Connect) -> None:
    one, two = connected()
    tensor = torch.randn(1, 5, 7).to(dtype)
    large = torch.randn(LARGE).to(dtype)
    one.send(1, "work", tensor.transpose(1, 2))
    one.send(1, "cancel", numbers=[1, -2])
    one.send(1, "work", large)
    first, second, third = received(two, count=3)
    assert first.tensor is not None
    assert torch.equal(first.tensor, tensor.transpose(1, 2))
    assert second == (0, "cancel", {"numbers": [1, -2]}, None)
    assert third.tensor is not None
    assert torch.equal(third.tensor, large)


def test_two_processes_that_send_much_to_each_other_never_wait_for_each_other(connected: Connect) -> None:
    pair, tensor = connected(), torch.ones(LARGE)
    start = time.monotonic()
    for _ in range(3):  # neither has read anything yet
        for rank in (0, 1):
            pair[1 - rank].send(rank, "work", tensor)
    assert time.monotonic() - start < 2
    for one in pair:
        assert len(received(one, count=3)) == 3


def test_what_was_sent_before_an_end_arrives(connected: Connect) -> None:
    one, two = connected()
    one.send(1, "failed", error="out of memory")
    one.receive(0.1)
    one.close()
    assert received(two)[0].fields == {"error": "out of memory"}
    two.receive(1.0)
    assert two.lost == {0}
    two.send(0, "stop")  # nobody reads it


@pytest.mark.parametrize("address", [LOCAL, "::1", "localhost", socket.gethostname()])
def test_processes_meet_at_names_and_addresses_of_both_kinds(address: str, connected: Connect) -> None:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"this machine has no such address: {error}")
    one, two = connected(address)
    two.send(0, "ready")
    assert received(one)[0].sender == 1


ZMTP = bytes.fromhex("ff00000000000000017f03") + b"\x01"
"""The beginning of ZeroMQ's protocol 3.1, without the name of a mechanism."""
GREETING = ZMTP + b"PLAIN".ljust(20, b"\0") + bytes(32)
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100fa010000f6030307") + bytes(64),
    "old protocol": bytes.fromhex("0100") + b"\x02\x00hi",
    "no mechanism": ZMTP + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x06\x05READY",
    "huge": GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"),
    "a message instead of a password": GREETING + b"\x00\x02hi",
    "bytes": bytes(range(256)),
    "nothing": b"",
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_stays_outside_and_stops_nothing(case: str, connected: Connect) -> None:
    one, two = connected()
    with socket.create_connection((LOCAL, one.port)) as stranger:
        stranger.sendall(GARBAGE[case])
        stranger.settimeout(5)
        if case == "huge":
            while stranger.recv(4096):  # until the connection is closed, and not for as long as the bytes
                pass
        two.send(0, "ready")
        assert [message.topic for message in received(one)] == ["ready"]
    assert one.receive(0.1) == []
    assert not one.lost


@pytest.mark.parametrize("options", [{}, {"plain_username": b"outrider", "plain_password": b"the key"}])
def test_who_lacks_the_key_stays_outside(options: dict[str, Any], connected: Connect) -> None:
    one, _ = connected()
    context = zmq.Context()
    with context.socket(zmq.PUSH) as stranger:
        for name, value in {"linger": 0, **options}.items():
            setattr(stranger, name, value)
        stranger.connect(f"tcp://{LOCAL}:{one.port}")
        stranger.send(b'[1, "ready", {}]')
        assert one.receive(0.3) == []
    context.term()


def test_another_key_is_an_error_and_no_key_is_sent() -> None:
    with closing(Exchange(0, LOCAL, "one")) as one, closing(Exchange(1, LOCAL, "another")) as two:
        with pytest.raises(StageLost, match=r"the head can't be reached at 127.0.0.1:\d+ .*another key"):
            two.connect(0, "the head", LOCAL, one.port)
        assert one.receive(0.1) == []
        assert b"another" not in two._password(one.port)
        assert two._password(one.port) != two._password(two.port)


def test_slow_strangers_delay_nobody(connected: Connect) -> None:
    one, two = connected()
    with ExitStack() as stack:
        for length in range(8):
            stranger = stack.enter_context(socket.create_connection((LOCAL, one.port)))
            stranger.sendall(GREETING[:length])
        start = time.monotonic()
        with closing(Exchange(2, LOCAL, "the key")) as three:
            three.connect(0, "the head", LOCAL, one.port)
            three.send(0, "ready")
            assert received(one)[0].sender == 2
        two.send(0, "ready")
        assert received(one)[0].sender == 1
        assert time.monotonic() - start < 2
    assert not one.lost


def be_neighbour(port: int, answers: "Connection[Any, Any]", stall_seconds: float) -> None:
    """Connect to a process (0: to another exchange of this one), and answer questions who is lost."""
    exchange.STALL_SECONDS = stall_seconds
    with closing(Exchange(0, LOCAL, "the key")) as head, closing(Exchange(1, LOCAL, "the key")) as own:
        own.connect(0, "the head", LOCAL, port or head.port)
        answers.send(own.port)
        while answers.recv() != "end":
            own.receive(0.0)
            answers.send(sorted(own.lost))


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Exchange, Any, "Connection[Any, Any]"]]:
    """Yield an exchange of this process, the process of its neighbour, and a connection to it."""
    monkeypatch.setattr(exchange, "STALL_SECONDS", 0.6)
    with closing(Exchange(0, LOCAL, "the key")) as own, neighbour(own.port) as (process, answers):
        own.connect(1, "stage 1", LOCAL, answers.recv())
        yield own, process, answers


@contextmanager
def neighbour(port: int) -> Iterator[tuple[Any, "Connection[Any, Any]"]]:
    near, far = CONTEXT.Pipe()
    process = CONTEXT.Process(target=be_neighbour, args=(port, far, 0.6), daemon=True)
    process.start()
    yield process, near
    process.kill()
    process.join()


def test_a_pause_of_all_processes_is_no_loss() -> None:
    """As after Ctrl-Z and `fg`."""
    with neighbour(0) as (process, answers):
        answers.recv()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
        answers.send("look")
        assert answers.recv() == []


def test_a_process_that_is_stopped_is_lost_after_the_stall_limit(neighbours: Any) -> None:
    own, process, _ = neighbours
    start = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    own.receive(5.0)
    assert own.lost == {1}
    assert 0.4 < time.monotonic() - start < 2


def test_a_process_that_computes_is_not_lost(neighbours: Any) -> None:
    """It reads nothing for several stall limits, and neither does this one."""
    own, _, connection = neighbours
    time.sleep(2)
    own.receive(0.0)
    connection.send("look")
    assert connection.recv() == []
    assert not own.lost


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::1234:5", False),
        ("10.0.0.1", False),
        ("node0.example", False),
    ],
)
def test_a_loopback_address_is_known(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_the_largest_frame_of_ours_is_read() -> None:
    assert exchange.FRAME_BYTES < MOST_FRAME_BYTES
