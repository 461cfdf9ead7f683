"""How the processes of a target in stages meet, before anything is loaded.

The launcher's store has the head's address. Each stage connects to the head with a description of
its files, options and versions; the head compares them with its own. Then each stage connects to
the next one.

    stage --HELLO--> head --COMPARE--> stage --DIGEST--> head --GO--> stage --READY--> head

A stage on the head's machine with the same files computes no digest of them.
"""

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .channels import Channel, Exchange, Message
from .messages import StageLost

MEET_SECONDS = 600.0
"""Longest wait for the other processes. Machines are seldom started at the same time."""
LOOK_SECONDS = 1.0
"""Interval in which a waiting head notices Ctrl-C."""
HELLO_SECONDS = 10.0
"""Longest wait for the first message of a new connection; a stage sends it at once."""
KEY = "head"


class Type(StrEnum):
    """What a message is."""

    HELLO = "hello"
    COMPARE = "compare"
    DIGEST = "digest"
    GO = "go"
    READY = "ready"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What must be equal in all processes."""

    machine: str
    """The machine's name. Processes of one machine can read the same files."""
    files: list[list[Any]]
    """Of each weight file its name, size, time, device and number on that device."""
    values: dict[str, str]
    """Versions, options and digests of small files, by their names in messages."""


@dataclass(slots=True)
class Guest:
    """A stage that has come, as the head sees it."""

    rank: int
    name: str
    channel: Channel
    facts: Facts
    host: str
    port: int


def num_processes() -> int:
    """Return how many processes were launched together with this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process in the launch."""
    return int(os.environ.get("RANK", "0"))


def is_beside_head() -> bool:
    """Return whether this process is on the machine of the head, the launch's first one."""
    return os.environ.get("LOCAL_RANK") == str(rank())


def machine() -> str:
    """Return a name that differs between machines, and between containers."""
    return f"{socket.gethostname()}:{Path('/').stat().st_dev}"


def launch_store() -> Store:
    """Return the store that all processes of the launch share."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS)))
    except DistError as error:
        raise ValueError(
            f"not all processes of target.stage_layers have come within {MEET_SECONDS:.0f} s ({error}); do they run, and can "
            f"their machines reach {os.environ['MASTER_ADDR']}?"
        ) from error
    return PrefixStore("outrider/stages", store)


class HeadMeeting:
    """The head's side of a meeting. `names` are those of the stages, in order.

    A context manager: an error in the block closes the channels to the stages, which then end.
    """

    def __init__(self, names: Sequence[str], facts: Facts) -> None:
        self._names, self._facts = names, facts
        self.guests: list[Guest] = []
        self._channels: list[Channel] = []

    def __enter__(self) -> "HeadMeeting":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for channel in self._channels if kind is not None else ():
            channel.close()

    def gather(self, store: Store) -> None:
        """Wait for all stages. Raises ValueError if one of them doesn't come or can't read its files."""
        key, loopback = secrets.token_hex(16), is_loopback(os.environ["MASTER_ADDR"])
        with listening(loopback) as server:
            store.set(KEY, json.dumps([server.getsockname()[1], key]))
            end = time.monotonic() + MEET_SECONDS
            came: dict[int, Guest] = {}
            while missing := [rank for rank in range(1, 1 + len(self._names)) if rank not in came]:
                if time.monotonic() > end:
                    raise ValueError(
                        f"{self._names[missing[0] - 1]} has not come within {MEET_SECONDS:.0f} s; does its process run, and "
                        f"can its machine reach {os.environ['MASTER_ADDR']}?"
                    )
                server.settimeout(LOOK_SECONDS)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                self._channels.append(Channel(connection))
                if guest := self._welcome(self._channels[-1], key):
                    came[guest.rank] = guest
        self.guests = [came[rank] for rank in sorted(came)]

    def _welcome(self, channel: Channel, key: str) -> Guest | None:
        """Return the stage behind a new connection; None if it isn't one of ours."""
        try:
            fields = wait_for(channel, Type.HELLO, HELLO_SECONDS).fields
        except (StageLost, ValueError, KeyError):
            return None
        if not hmac.compare_digest(str(fields.get("key")), key):
            return None
        name = f"{self._names[fields['rank'] - 1]} of process {fields['process']} on {fields['machine'].partition(':')[0]}"
        if fields["error"]:
            raise ValueError(f"{name}: {fields['error']}")
        return Guest(fields["rank"], name, channel, Facts(**fields["facts"]), fields["host"], fields["port"])

    def compare(self, digest: str) -> None:
        """Raise one ValueError with all differences between the head and its stages.

        `digest` is that of the head's weights.
        """
        problems = []
        for guest in self.guests:
            is_same = (guest.facts.machine, guest.facts.files) == (self._facts.machine, self._facts.files)
            guest.channel.send({"type": Type.COMPARE, "needs_digest": not is_same})
            for name, value in self._facts.values.items():
                other = guest.facts.values.get(name, "")
                if other != value:
                    problems.append(f"{guest.name} has {other or 'no'} {name}, and the head has {value or 'none'}")
        for guest in () if problems else self.guests:
            other = wait_for(guest.channel, Type.DIGEST, name=guest.name).fields["digest"]
            if other not in ("", digest):
                problems.append(f"{guest.name} has other weights (digest {other[:12]}) than the head ({digest[:12]})")
        if problems:
            for guest in self.guests:
                guest.channel.send({"type": Type.REFUSED, "error": "; ".join(problems)})
            raise ValueError(
                "the processes of target.stage_layers must have the same model, options and versions; give all machines the "
                "same command, files and packages:\n" + "\n".join(problems)
            )

    def start(self) -> None:
        """Let the stages connect to each other, and load."""
        for guest, following in zip(self.guests, [*self.guests[1:], None], strict=True):
            address = None if following is None else [self._address(guest, following), following.port]
            guest.channel.send({"type": Type.GO, "following": address})

    def _address(self, guest: Guest, following: Guest) -> str:
        """Return the address at which a stage reaches the next one."""
        if guest.facts.machine == following.facts.machine:
            return "localhost"
        # A stage on the head's machine knows only an address that others can't use.
        return os.environ["MASTER_ADDR"] if is_loopback(following.host) else following.host

    def wait_until_ready(self) -> None:
        """Wait until all stages have loaded their layers."""
        for guest in self.guests:
            wait_for(guest.channel, Type.READY, name=guest.name)


class StageMeeting:
    """A stage's side of a meeting."""

    def __init__(self, store: Store) -> None:
        port, self._key = json.loads(store.get(KEY))
        address = os.environ["MASTER_ADDR"]
        self.head = Channel(socket.create_connection((address, port), MEET_SECONDS))
        self._server = listening(is_loopback(address))

    def greet(self, facts: Facts | None, error: str = "") -> None:
        """Send the head what this process is, or why it can't be a stage."""
        hello = {
            "type": Type.HELLO,
            "key": self._key,
            "rank": rank(),
            "process": os.getpid(),
            "machine": machine(),
            "facts": None if facts is None else {"machine": facts.machine, "files": facts.files, "values": facts.values},
            "error": error,
            "host": self.head.own_host,
            "port": self._server.getsockname()[1],
        }
        self.head.send(hello)

    def needs_digest(self) -> bool:
        """Wait for the head's question whether to compute the digest of the weights."""
        return bool(wait_for(self.head, Type.COMPARE, name="the head").fields["needs_digest"])

    def answer(self, digest: str) -> None:
        """Send the digest; empty if it wasn't needed."""
        self.head.send({"type": Type.DIGEST, "digest": digest})

    def connect(self) -> tuple[Channel, Channel]:
        """Return the channels from the previous process and to the following one."""
        address = wait_for(self.head, Type.GO, name="the head").fields["following"]
        following = self.head
        if address is not None:
            following = Channel(socket.create_connection(tuple(address), MEET_SECONDS))
            following.send({"type": Type.HELLO, "key": self._key})
        previous = self.head if rank() == 1 else self._accept()
        self._server.close()
        return previous, following

    def _accept(self) -> Channel:
        self._server.settimeout(MEET_SECONDS)
        while True:
            connection, _ = self._server.accept()
            channel = Channel(connection)
            try:
                fields = wait_for(channel, Type.HELLO, HELLO_SECONDS).fields
            except (StageLost, ValueError, KeyError):
                continue
            if hmac.compare_digest(str(fields.get("key")), self._key):
                return channel


def wait_for(channel: Channel, kind: Type, seconds: float | None = None, *, name: str = "") -> Message:
    """Wait for the next message of a process, which must be of this type.

    Raises StageLost if the process ends or fails before, or after so many seconds.
    """
    end = None if seconds is None else time.monotonic() + seconds
    exchange = Exchange([channel])
    while end is None or time.monotonic() < end:
        for _, message in exchange.run(LOOK_SECONDS):
            if message.fields["type"] == kind:
                return message
            raise StageLost(f"{name} can't go on: {message.fields.get('error', message.fields['type'])}")
        if channel.lost:
            raise StageLost(f"{name} has ended before it was ready ({channel.lost}); look at the last lines that it printed")
    raise StageLost(f"{name} doesn't answer")


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same machine can use an address."""
    return address == "localhost" or address.startswith(("127.", "::1", "::ffff:127."))


def listening(loopback: bool) -> socket.socket:
    """Return a socket that waits for connections, of this machine only with `loopback`."""
    if loopback or not socket.has_dualstack_ipv6():
        return socket.create_server(("127.0.0.1" if loopback else "", 0))
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)


def versions() -> Mapping[str, str]:
    """Return the versions on which rounding and messages depend."""
    from importlib.metadata import version

    return {"torch": torch.__version__, "transformers": transformers.__version__, "outrider": version("outrider")}
