"""How the processes of a target in stages meet, before anything is loaded.

The launcher's store has the head's address. Each stage connects to the head with a description of
its files, options and versions; the head compares them with its own. Then each stage connects to
the next one.

    stage --HELLO--> head --COMPARE--> stage --DIGEST--> head --GO--> stage --READY--> head

A stage on the head's machine with the same files computes no digest of them.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .channels import HELLO, LOOK_SECONDS, Channel, Door, Exchange, Message, is_loopback
from .messages import StageLost

logger = logging.getLogger(__name__)

MEET_SECONDS = 600.0
"""Longest wait for the other processes. Machines are seldom started at the same time."""
LOAD_SECONDS = 3600.0
"""Longest wait until all stages have read their weights."""
TELL_SECONDS = 30.0
"""Interval in which a waiting head says for whom it waits."""
KEY = "head"


class Type(StrEnum):
    """What a message is."""

    HELLO = HELLO
    COMPARE = "compare"
    DIGEST = "digest"
    GO = "go"
    READY = "ready"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
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
    facts: StageFacts
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

    def __init__(self, names: Sequence[str], facts: StageFacts) -> None:
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
        key, address = secrets.token_hex(16), os.environ["MASTER_ADDR"]
        with Door(address, key) as door:
            store.set(KEY, json.dumps([door.port, key]))
            end, tell = time.monotonic() + MEET_SECONDS, teller("to come")
            came: dict[int, Guest] = {}
            while missing := [name for rank, name in enumerate(self._names, start=1) if rank not in came]:
                if time.monotonic() > end:
                    raise ValueError(
                        f"{missing[0]} has not come within {MEET_SECONDS:.0f} s; does its process run, and can its machine "
                        f"reach {address}?"
                    )
                tell(missing)
                for channel, fields in door.open():
                    self._channels.append(channel)
                    guest = self._guest(channel, fields)
                    came[guest.rank] = guest
        self.guests = [came[rank] for rank in sorted(came)]

    def _guest(self, channel: Channel, fields: dict[str, Any]) -> Guest:
        """Return the stage that a first message describes."""
        name = f"{self._names[fields['rank'] - 1]} of process {fields['process']} on {fields['machine'].partition(':')[0]}"
        if fields["error"]:
            raise ValueError(f"{name}: {fields['error']}")
        return Guest(fields["rank"], name, channel, StageFacts(**fields["facts"]), fields["host"], fields["port"])

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
        answers = {} if problems else wait_for_all(self._names_of_channels(), Type.DIGEST, LOAD_SECONDS, "to compare weights")
        for guest in self.guests if answers else ():
            other = answers[guest.channel].fields["digest"]
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
        wait_for_all(self._names_of_channels(), Type.READY, LOAD_SECONDS, "to load its layers")

    def _names_of_channels(self) -> dict[Channel, str]:
        return {guest.channel: guest.name for guest in self.guests}


class StageMeeting:
    """A stage's side of a meeting."""

    def __init__(self, store: Store) -> None:
        port, key = json.loads(store.get(KEY))
        self.head = connected(os.environ["MASTER_ADDR"], port, "the head")
        self._door = Door(os.environ["MASTER_ADDR"], key)

    def greet(self, facts: StageFacts | None, error: str = "") -> None:
        """Send the head what this process is, or why it can't be a stage."""
        hello = {
            "type": Type.HELLO,
            "key": self._door.key,
            "rank": rank(),
            "process": os.getpid(),
            "machine": machine(),
            "facts": None if facts is None else {"machine": facts.machine, "files": facts.files, "values": facts.values},
            "error": error,
            "host": self.head.own_host,
            "port": self._door.port,
        }
        self.head.send(hello)

    def needs_digest(self) -> bool:
        """Wait for the head's question whether to compute the digest of the weights."""
        return bool(self._wait_for(Type.COMPARE).fields["needs_digest"])

    def answer(self, digest: str) -> None:
        """Send the digest; empty if it wasn't needed."""
        self.head.send({"type": Type.DIGEST, "digest": digest})

    def connect(self) -> tuple[Channel, Channel]:
        """Return the channels from the previous process and to the following one.

        Raises StageLost if one of them can't be reached, or if the head ends.
        """
        address = self._wait_for(Type.GO).fields["following"]
        following = self.head
        if address is not None:
            following = connected(str(address[0]), int(address[1]), f"stage {rank() + 1}")
            following.send({"type": Type.HELLO, "key": self._door.key})
        with self._door as door:
            previous = self.head if rank() == 1 else self._let_in(door)
        return previous, following

    def _let_in(self, door: Door) -> Channel:
        """Return the channel from the previous stage."""
        exchange, end = Exchange([self.head]), time.monotonic() + MEET_SECONDS
        while not (guests := door.open()):
            exchange.run()
            require(self.head, "the head")
            if time.monotonic() > end:
                raise StageLost(f"stage {rank() - 1} has not connected to it within {MEET_SECONDS:.0f} s")
        return guests[0][0]

    def _wait_for(self, kind: Type) -> Message:
        return wait_for_all({self.head: "the head"}, kind)[self.head]


def wait_for_all(
    names: Mapping[Channel, str], kind: Type, seconds: float | None = None, purpose: str = ""
) -> dict[Channel, Message]:
    """Wait for the next message of each process, which must be of this type.

    Raises StageLost if a process ends or fails before, or after so many seconds. Says from time to
    time for whom it waits, if it has a `purpose`.
    """
    messages: dict[Channel, Message] = {}
    exchange, tell = Exchange([*names]), teller(purpose)
    end = None if seconds is None else time.monotonic() + seconds
    while missing := [channel for channel in names if channel not in messages]:
        if end is not None and time.monotonic() > end:
            raise StageLost(f"{names[missing[0]]} has not answered within {seconds:.0f} s")
        if purpose:
            tell([names[channel] for channel in missing])
        for channel, message in exchange.run(0.0 if any(channel.early for channel in missing) else LOOK_SECONDS):
            channel.early.append(message)
        for channel in missing:
            if channel.early:
                fields = channel.early[0].fields
                if fields["type"] != kind:
                    raise StageLost(f"{names[channel]} can't go on: {fields.get('error', fields['type'])}")
                messages[channel] = channel.early.popleft()
        for channel, name in names.items():
            if not channel.early:
                require(channel, name)
    return messages


def require(channel: Channel, name: str) -> None:
    """Raise StageLost if a process has ended."""
    if channel.lost:
        raise StageLost(f"{name} has ended before it was ready ({channel.lost}); look at the last lines that it printed")


def teller(purpose: str) -> Callable[[Sequence[str]], None]:
    """Return a function that logs for whom the head waits, at most once per TELL_SECONDS."""
    last = time.monotonic()

    def tell(names: Sequence[str]) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_SECONDS:
            last = time.monotonic()
            logger.info("waiting for %s %s", ", ".join(names), purpose)

    return tell


def connected(host: str, port: int, name: str) -> Channel:
    """Connect to another process. Raises StageLost if it can't be reached."""
    try:
        return Channel(socket.create_connection((host, port), MEET_SECONDS))
    except OSError as error:
        raise StageLost(f"it can't reach {name} at {host}:{port} ({error})") from error


def versions() -> Mapping[str, str]:
    """Return the versions on which rounding and messages depend."""
    from importlib.metadata import version

    return {"torch": torch.__version__, "transformers": transformers.__version__, "outrider": version("outrider")}
