"""Messages over sockets, without threads: one poll sends and receives for all of a process.

A message is a mapping (as JSON) and perhaps a tensor. `Channel.send` never waits: what the system's
buffers don't take is sent by a later `Exchange.run`. `Exchange.run` returns the messages that have
arrived in full, and never waits for the rest of one. So no two processes can wait for each other to
read. The end of a process closes its sockets at once, which the other side sees as `Channel.lost`.
A process has a `Door`, which lets in the other processes of its launch only.
"""

import hmac
import ipaddress
import json
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

PREFIX = struct.Struct("<QQd")
"""Bytes of the tensor, bytes of the mapping, and the sender's clock."""
MOST_UNKNOWN_BYTES = 1 << 20
"""Largest message of a process that hasn't shown that it belongs to this launch."""
NO_MESSAGE = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, OverflowError)
"""Errors of reading bytes that are no message."""
MOST_PARTS = 16
"""Buffers that one system call sends."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds of silence, seconds between questions, and their number, after which the system drops a
connection to a machine that is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    """A mapping and perhaps a tensor, from another process."""

    fields: dict[str, Any]
    tensor: torch.Tensor | None
    sent_at: float
    """`time.monotonic` of the sender. Only processes of one machine share this clock."""


class Channel:
    """One end of a connection between two processes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._body: torch.Tensor | None = None
        self._expect(bytearray(PREFIX.size))
        self.is_known = True
        """Whether the other process belongs to this launch. Before that is known, only small messages
        without a tensor are read."""
        self.early: deque[Message] = deque()
        """Messages that have arrived before somebody waits for them."""
        self.lost = ""
        """Why no more messages arrive or leave; empty while the connection holds."""

    @property
    def has_unsent(self) -> bool:
        """Whether the system's buffers had no room for all of the messages."""
        return bool(self._unsent) and not self.lost

    @property
    def own_host(self) -> str:
        """The address of this process, as the other one sees it."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        """Return the number of the socket's file, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        self.lost = self.lost or "closed"

    def send(self, fields: dict[str, Any], tensor: torch.Tensor | None = None) -> None:
        """Send a message, or queue what the system doesn't take at once.

        The tensor must not be written afterwards.
        """
        payload = memoryview(b"")
        data: Any
        if tensor is not None:
            fields = {**fields, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            payload = memoryview(data)
        text = json.dumps(fields, separators=(",", ":")).encode()
        prefix = PREFIX.pack(len(payload), len(text), time.monotonic())
        self._unsent += [part for part in (memoryview(prefix), payload, memoryview(text)) if len(part)]
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the system takes."""
        try:
            while self._unsent and not self.lost:
                self._drop(self._socket.sendmsg(list(islice(self._unsent, MOST_PARTS))))
        except BlockingIOError:
            return
        except OSError:
            # What arrived before the end is still to be read. Then `receive` notes the loss.
            self._unsent.clear()

    def _drop(self, num_bytes: int) -> None:
        """Remove what was sent from the queue."""
        while num_bytes:
            first = self._unsent.popleft()
            if num_bytes < len(first):
                self._unsent.appendleft(first[num_bytes:])
                return
            num_bytes -= len(first)

    def receive(self) -> list[Message]:
        """Return all messages that have arrived in full; don't wait for others."""
        messages: list[Message] = []
        try:
            while not self.lost:
                num_bytes = self._socket.recv_into(self._room[self._filled :])
                self._filled += num_bytes
                if not num_bytes:
                    self.lost = "the connection was closed"
                elif self._filled == len(self._room):
                    messages += self._take()
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost = str(error.strerror)
        except NO_MESSAGE as error:
            self.lost = f"it sent bytes that are no message ({type(error).__name__})"
        return messages

    def _expect(self, room: Any) -> None:
        self._room, self._filled = memoryview(room), 0

    def _take(self) -> list[Message]:
        """Take the part of a message that is complete; return the message if that was its end."""
        # 1. After the prefix follow the tensor and the mapping. The tensor comes first: its memory
        # is used as it is, and must begin at an address that suits its type.
        if self._body is None:
            self._tensor_bytes, text_bytes, self._sent_at = PREFIX.unpack(self._room)
            if not self.is_known and (self._tensor_bytes or text_bytes > MOST_UNKNOWN_BYTES):
                raise ValueError("too large for the first message")
            self._body = torch.empty(self._tensor_bytes + text_bytes, dtype=torch.uint8)
            self._expect(self._body.numpy())
            return []
        # 2. The message is complete.
        body, self._body = self._body, None
        fields = json.loads(bytes(self._room[self._tensor_bytes :]))
        if not isinstance(fields, dict):
            raise TypeError("a message is a mapping")
        self._expect(bytearray(PREFIX.size))
        tensor = None
        if "shape" in fields:
            tensor = body[: self._tensor_bytes].view(getattr(torch, fields.pop("dtype"))).reshape(fields.pop("shape"))
        return [Message(fields, tensor, self._sent_at)]


class Exchange:
    """All channels of a process, which one poll serves."""

    def __init__(self, channels: Sequence[Channel] = ()) -> None:
        self._poll = select.poll()
        self._channels: dict[int, Channel] = {}
        self._waiting: set[int] = set()
        for channel in channels:
            self.add(channel)

    def add(self, channel: Channel) -> None:
        """Serve one more channel."""
        self._channels[channel.fileno()] = channel
        self._poll.register(channel.fileno(), select.POLLIN)

    def remove(self, channel: Channel) -> None:
        """Serve a channel no more."""
        for number in [number for number, other in self._channels.items() if other is channel]:
            self._poll.unregister(number)
            del self._channels[number]
            self._waiting.discard(number)

    def run(self, seconds: float | None = 0.0) -> list[tuple[Channel, Message]]:
        """Send what is queued, and return the messages that have arrived.

        Waits for the first one, or for the loss of a channel, or until a queue is empty, at most so
        many seconds (None: without a limit).
        """
        for number, channel in self._channels.items():
            if channel.has_unsent != (number in self._waiting):
                self._waiting ^= {number}
                self._poll.modify(number, select.POLLIN | (select.POLLOUT if channel.has_unsent else 0))
        arrived: list[tuple[Channel, Message]] = []
        for number, event in self._poll.poll(None if seconds is None else 1000 * seconds):
            channel = self._channels[number]
            if event & select.POLLOUT:
                channel.flush()
            if event & ~select.POLLOUT:
                arrived += [(channel, message) for message in channel.receive()]
        for number in [number for number, channel in self._channels.items() if channel.lost]:
            self._poll.unregister(number)
            del self._channels[number]
        return arrived


HELLO = "hello"
"""Type of the first message."""
HELLO_SECONDS = 10.0
"""Longest wait for the first message of a new connection; a stage sends it at once."""
LOOK_SECONDS = 0.1
"""Interval in which a waiting process notices new connections, lost ones and Ctrl-C."""


class Door:
    """A socket that lets those in whose first message is a HELLO with the key.

    A context manager, which closes the socket.
    """

    def __init__(self, address: str, key: str) -> None:
        self.key = key
        self._server = listening(address)
        self._strangers: dict[Channel, float] = {}
        """Connections without a first message, and until when it may come."""
        self._exchange = Exchange()

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for channel in self._strangers:
            channel.close()

    def open(self) -> list[tuple[Channel, dict[str, Any]]]:
        """Return those who have come with the key, and their first messages. Waits for a moment."""
        # 1. A new connection.
        self._server.settimeout(LOOK_SECONDS)
        try:
            channel = Channel(self._server.accept()[0])
        except TimeoutError:
            pass
        else:
            channel.is_known = False
            self._strangers[channel] = time.monotonic() + HELLO_SECONDS
            self._exchange.add(channel)
        # 2. First messages.
        guests = []
        for channel, message in self._exchange.run():
            fields = message.fields
            if fields.get("type") == HELLO and hmac.compare_digest(str(fields.get("key")).encode(), self.key.encode()):
                channel.is_known = True
                guests.append((channel, fields))
                self._strangers.pop(channel, None)
                self._exchange.remove(channel)
        # 3. All others go.
        for channel in [one for one, end in self._strangers.items() if one.lost or time.monotonic() > end]:
            del self._strangers[channel]
            self._exchange.remove(channel)
            channel.close()
        return guests


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same machine can use an address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def listening(address: str) -> socket.socket:
    """Return a socket that waits for connections of a launch; its first process has this address."""
    if is_loopback(address):
        host, family = ("::1", socket.AF_INET6) if ":" in address else ("127.0.0.1", socket.AF_INET)
        return socket.create_server((host, 0), family=family)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", 0))
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
