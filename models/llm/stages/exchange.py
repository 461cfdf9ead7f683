"""Messages between the processes of a launch, over ZeroMQ.

    process --outbox--> inbox of another process

A process has one inbox, and an outbox for each process that it sends to. ZeroMQ's own thread moves
the messages, so sending never waits, and messages of one process keep their order.

**Loss.** An outbox whose connection ends has lost its process. A process that ends is lost at once.
A process that is stopped, or behind a cut network, stops answering ZeroMQ's heartbeats, and is lost
after STALL_SECONDS, or a third more. ZeroMQ's thread answers them, so a process that computes is
never lost.

**Strangers.** An inbox asks for a password before it reads messages: an HMAC of the launch's key
and the inbox's port, so the key itself isn't sent, and a password opens one inbox. Until then
ZeroMQ reads at most MOST_FRAME_BYTES, and drops who takes longer than its 30 seconds. ZeroMQ's CURVE
would encrypt messages, too, but a hop of 1 MB takes seven times as long with it. So use a network
that nobody else reads.
"""

import hmac
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from .messages import StageLost

STALL_SECONDS = 30.0
"""Time after which a process that doesn't answer is lost."""
GOODBYE_SECONDS = 2.0
"""Longest wait for the others at the end."""
LOOK_SECONDS = 0.1
"""Interval in which a process that waits for all others looks at its limit."""
ENDED = "has ended, or can't be reached"
FRAME_BYTES, MOST_FRAME_BYTES = 1 << 20, 1 << 21
"""Size of a tensor's parts, and of the largest frame that ZeroMQ reads."""
OPTIONS = {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0, zmq.RECONNECT_IVL: -1, zmq.IPV6: 1, zmq.MAXMSGSIZE: MOST_FRAME_BYTES}
"""Options of all sockets: queues without a limit, and connections that end once and for all."""
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
EVENTS = CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""Events of an outbox: its connection, then its loss."""
Topic = Literal["hello", "go", "ready", "work", "cancel", "failed", "stop"]
"""What a message is."""


class Message(NamedTuple):
    """A message from another process: a mapping, and perhaps a tensor."""

    sender: int
    topic: Topic
    fields: dict[str, Any]
    tensor: torch.Tensor | None


class Exchange:
    """The inbox of a process, and its outboxes to others, by their ranks."""

    def __init__(self, rank: int, address: str, key: str) -> None:
        self._rank, self._key = rank, key
        self.lost: set[int] = set()
        """Processes whose inbox can't be reached any more."""
        self._context, self._poller = zmq.Context(), zmq.Poller()
        stall = int(1000 * STALL_SECONDS)
        for option, value in {**OPTIONS, zmq.HEARTBEAT_IVL: stall // 3, zmq.HEARTBEAT_TIMEOUT: stall}.items():
            self._context.setsockopt(option, value)
        self._outboxes: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        # A launch on one machine opens no port to others.
        own = address.replace("localhost", "127.0.0.1") if is_loopback(address) else "*"
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.plain_server = True
        self.port = self._inbox.bind_to_random_port(f"tcp://[{own}]" if ":" in own else f"tcp://{own}")
        self._poller.register(self._inbox, zmq.POLLIN)
        threading.Thread(target=_guard, args=(self._context, self._password(self.port)), daemon=True).start()

    def _password(self, port: int) -> bytes:
        return hmac.new(self._key.encode(), str(port).encode(), "sha256").hexdigest().encode()

    def connect(self, rank: int, name: str, host: str, port: int) -> str:
        """Connect to the inbox of a process, and return the address of this one on that network.

        Raises StageLost if the process can't be reached, or has another key.
        """
        outbox = self._outboxes[rank] = self._context.socket(zmq.PUSH)
        monitor = outbox.get_monitor_socket(EVENTS)
        self._monitors[monitor] = rank
        try:
            # 1. A name may have several addresses, of which ZeroMQ tries one.
            with socket.create_connection((host, port), STALL_SECONDS) as probe:
                own, other = probe.getsockname()[0], probe.getpeername()[0]
            # 2. Connect, and wait for the answer to the password.
            outbox.plain_username, outbox.plain_password = b"outrider", self._password(port)
            outbox.connect(f"tcp://[{other}]:{port}")
            if not monitor.poll(int(1000 * STALL_SECONDS)) or recv_monitor_message(monitor)["event"] != CONNECTED:
                raise ConnectionError("it has another key, or has ended")
        except OSError as error:
            self.lost.add(rank)
            raise StageLost(f"{name} can't be reached at {host}:{port} ({error})") from error
        self._poller.register(monitor, zmq.POLLIN)
        return str(own)

    def send(self, rank: int, topic: Topic, tensor: torch.Tensor | None = None, /, **fields: Any) -> None:
        """Send a message, without waiting.

        It is copied at once: ZeroMQ's way without a copy wakes a thread of Python, which takes longer.
        """
        if rank in self.lost:
            return
        payload = memoryview(b"")
        if tensor is not None:
            fields |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            payload = memoryview(tensor.cpu().contiguous().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        text = json.dumps([self._rank, topic, fields]).encode()
        parts = [payload[start : start + FRAME_BYTES] for start in range(0, len(payload), FRAME_BYTES)]
        with suppress(zmq.Again):  # the connection has just ended, as `receive` is about to notice
            self._outboxes[rank].send_multipart([text, *parts], zmq.NOBLOCK)

    def receive(self, seconds: float | None = 0.0) -> list[Message]:
        """Return the messages that have arrived.

        Waits for the first one, or for a loss, at most so many seconds (None: without a limit).
        """
        for source, _ in self._poller.poll(None if seconds is None else int(1000 * seconds)):
            if source is not self._inbox:
                self._poller.unregister(source)
                self.lost.add(self._monitors[source])
        # What a process has sent before its end has arrived before it counts as lost.
        messages = []
        with suppress(zmq.Again):
            while True:
                messages.append(_message(self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)))
        return messages

    def wait_for(self, names: Mapping[int, str], topic: Topic, seconds: float) -> dict[int, Message]:
        """Return the next message of each process, which must have this topic.

        Raises StageLost if a process ends or fails before, or after so many seconds.
        """
        messages: dict[int, Message] = {}
        end = time.monotonic() + seconds
        while missing := names.keys() - messages.keys():
            if time.monotonic() > end:
                raise StageLost(f"{names[min(missing)]} has not answered within {seconds:.0f} s; does its process run?")
            for message in self.receive(LOOK_SECONDS):
                if message.topic != topic:
                    stage = message.fields["stage"]
                    raise StageLost(f"{names.get(stage, f'stage {stage}')} {message.fields['error']}")
                messages[message.sender] = message
            if gone := self.lost & names.keys():
                raise StageLost(f"{names[min(gone)]} {ENDED}; look at the last lines that its process printed")
        return messages

    def close(self, topic: Topic | None = None, /, **fields: Any) -> None:
        """Close all connections. Others get a last message, and time to end."""
        if self._context.closed:
            return
        if topic:
            for rank in self._outboxes:
                self.send(rank, topic, **fields)
        end = time.monotonic() + (GOODBYE_SECONDS if topic else 0)
        while not self.lost >= self._outboxes.keys() and (rest := end - time.monotonic()) > 0:
            self.receive(rest)
        for each in (self._inbox, *self._monitors, *self._outboxes.values()):
            each.close()
        self._context.term()


def _guard(context: zmq.Context[zmq.Socket[bytes]], password: bytes) -> None:
    """Answer ZeroMQ's questions whether a password is right (its protocol ZAP)."""
    door = context.socket(zmq.REP)
    door.bind("inproc://zeromq.zap.01")
    try:
        while True:
            version, number, *_, given = door.recv_multipart()
            is_right = hmac.compare_digest(given, password)
            door.send_multipart([version, number, b"200" if is_right else b"400", b"", b"", b""])
    except zmq.ContextTerminated:
        door.close()


def _message(frames: list[zmq.Frame]) -> Message:
    sender, topic, fields = json.loads(frames[0].bytes)
    tensor = None
    if "shape" in fields:
        payload = frames[1].buffer if len(frames) == 2 else bytearray().join(frame.buffer for frame in frames[1:])
        tensor = torch.frombuffer(payload, dtype=getattr(torch, fields.pop("dtype"))).view(fields.pop("shape"))
        if tensor.data_ptr() % tensor.itemsize:  # frames begin at any address
            tensor = tensor.clone()
    return Message(sender, topic, fields, tensor)


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same machine can use an address."""
    return address in ("localhost", "::1") or address.startswith("127.")
