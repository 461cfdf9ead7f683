"""The door of a process: a socket that lets in the other processes of its launch, and nobody else."""

import hmac
import ipaddress
import socket
import time
from typing import Any

from .channels import Channel, Exchange

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
