"""The door of a process: strangers stay outside, and delay nobody."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from outrider.models.llm.stages import channels as doors
from outrider.models.llm.stages.channels import HELLO, PREFIX, Channel, Door, is_loopback

KEY = "the key"


@pytest.fixture(params=["127.0.0.1", "::1", "localhost"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    if request.param == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with Door(request.param, KEY) as door:
        yield door


def visitor(door: Door) -> socket.socket:
    return socket.create_connection(door._server.getsockname()[:2])


def message(fields: object, prefix: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (prefix or PREFIX.pack(0, len(text), 0.0)) + text


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100fa010000f6030307") + bytes(64),
    "list": message([1, 2]),
    "number": message(7),
    "no JSON": message(b"{no"),
    "no text": message(b"\xff\xfe\xfd"),
    "deep": message(b"[" * 200_000),
    "huge text": PREFIX.pack(0, 1 << 40, 0.0),
    "huge tensor": PREFIX.pack(1 << 40, 2, 0.0),
    "overflow": PREFIX.pack((1 << 64) - 1, (1 << 64) - 1, 0.0),
    "tensor": PREFIX.pack(8, 2, 0.0) + bytes(8) + b"{}",
    "unknown type": message({"type": HELLO, "key": KEY, "dtype": "Tensor", "shape": [1]}),
    "bad shape": message({"type": HELLO, "key": KEY, "dtype": "float32", "shape": [-3, 9]}),
    "no dtype": message({"type": HELLO, "key": KEY, "shape": [0]}),
    "wrong key": message({"type": HELLO, "key": "another"}),
    "no key": message({"type": HELLO}),
    "another type": message({"type": "ready", "key": KEY}),
    "half a message": message({"type": HELLO, "key": KEY})[:-1],
    "nothing": b"",
}


@pytest.mark.parametrize("case", GARBAGE)
def test_a_stranger_stays_outside(case: str) -> None:
    with Door("127.0.0.1", KEY) as door, visitor(door) as stranger:
        stranger.sendall(GARBAGE[case])
        stranger.shutdown(socket.SHUT_WR)
        end = time.monotonic() + 5
        guests = door.open()
        while door._strangers and time.monotonic() < end and not guests:
            guests = door.open()
        assert not guests
        if case != "another type":  # it may still say HELLO
            assert not door._strangers, "its connection is closed"


def test_a_guest_comes_in_beside_silent_strangers(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = [visitor(door) for _ in range(3)]
    with visitor(door) as connection:
        connection.sendall(message({"type": HELLO, "key": KEY, "rank": 1}))
        start = time.monotonic()
        while not (guests := door.open()):
            assert time.monotonic() - start < 5, "strangers delay it"
    ((channel, fields),) = guests
    assert fields["rank"] == 1
    assert channel.is_known
    channel.close()
    # A stranger that says nothing is sent away.
    monkeypatch.setattr(doors, "HELLO_SECONDS", 0.0)
    strangers.append(visitor(door))
    door.open()
    assert len(door._strangers) == 3
    assert strangers[-1].recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_only_a_known_process_may_send_tensors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Channel(socket.create_connection(server.getsockname()))
        far = Channel(server.accept()[0])
    far.is_known = False
    near.send({"type": "work"}, torch.zeros(3))
    time.sleep(0.1)
    assert far.receive() == []
    assert far.lost == "it sent bytes that are no message (ValueError)"
    near.close()
    far.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::1234:5", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("node0.example", False),
    ],
)
def test_a_loopback_address_is_known(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
