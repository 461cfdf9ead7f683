"""Which requests are decoded together: batches by length under a KV-memory budget, after S3 (arXiv 2306.06000).

A policy says three things of a request that waits: how much room its answer is given (`Reservation`), in which order requests
are looked at (`Order`), and what a batch of them takes in memory (`Memory`). `supervise` makes batches of that until all are
answered, by first fit: filling one batch after the other with the first requests that fit is the same as putting each request
into the first batch that has room.

S3 looks at the longest first (decreasing first fit), which is right where a batch stays together until its longest row ends.
Where an evicted row goes on at no cost but that of moving its keys and values, the shortest texts go first and are given less
room than they may need: batches are as wide as short texts allow, and those that outgrow their room wait until so many have
that they fill a wide batch of longer ones. `scripts/bench_scheduling.py` compares the two on real lengths.

Nothing here reads a clock, a random number or a rank: the batches are a function of the requests and their answers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from ....models.target.hf_target import HFTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue."""

    index: int
    """Its place among all requests."""
    num_read: int
    """Tokens that it begins with: the prompt, and of an evicted request the answer so far."""
    num_reserved: int
    """New tokens that it is given room for."""
    num_written: int = 0
    """Tokens of its answer so far."""


@runtime_checkable
class Memory(Protocol):
    """How a batch lies in the KV cache."""

    def entries(self, batch: Sequence[Waiting]) -> int:
        """Entries, of one token each, that a batch takes."""

    def limits(self, batch: Sequence[Waiting]) -> list[int]:
        """New tokens that there is room for in each row."""


Order = Callable[[Sequence[Waiting]], list[Waiting]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a batch added to one of its rows' answers."""

    num_new: int
    ended: bool
    """Whether the answer is complete; if not, its reservation is used up."""


Decode = Callable[[Sequence[Waiting], Sequence[int], int], Sequence[Decoded]]
"""Decodes a batch, each row by at least one token and up to its number of new tokens, until fewer rows go on than the last
argument says."""


@runtime_checkable
class Reservation(Protocol):
    """How much room answers are given."""

    def reserve(self, indices: Sequence[int]) -> list[int]:
        """New tokens that each of these requests is given room for, at least 1."""

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        """Learn from all `lengths` of complete answers, and from how many tokens those that were evicted have so far.

        Returns whether reservations have changed, so that those of the requests that nobody has begun are asked for again.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests are made into batches."""

    reservation: Reservation
    order: Order
    memory: Memory
    may_overtake: bool
    """Whether a request that doesn't fit any more lets later ones pass it."""
    least_share: float = 0.0
    """A batch ends as soon as a smaller share of its rows goes on, if others wait: a step costs nearly as much for few rows as
    for many. Its last rows are evicted, with what is left of their reservations."""
    most_held: int | None = None
    """Tokens of evicted rows, whose keys and values wait on the host, beyond which no new request begins; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """A batch after it was decoded: what it reserved and what came of it, each in the order of its rows."""

    rows: tuple[Waiting, ...]
    decoded: tuple[Decoded, ...]
    num_entries: int
    """KV-cache entries that it took."""

    @property
    def num_steps(self) -> int:
        """Tokens of the row that was given most."""
        return max(decoded.num_new for decoded in self.decoded)

    @property
    def pairs(self) -> list[tuple[Waiting, Decoded]]:
        return list(zip(self.rows, self.decoded, strict=True))

    @property
    def num_evicted(self) -> int:
        return sum(not decoded.ended for decoded in self.decoded)


# --- memory


class Rectangle:
    """A batch as `TreeCache` has it: every row is as wide as the longest text with its reservation. A shorter text may
    therefore go on to the same end."""

    def entries(self, batch: Sequence[Waiting]) -> int:
        return len(batch) * max(row.num_read + row.num_reserved for row in batch)

    def limits(self, batch: Sequence[Waiting]) -> list[int]:
        end = max(row.num_read + row.num_reserved for row in batch)
        return [end - row.num_read for row in batch]


@torch.inference_mode()
def kv_bytes_per_token(target: HFTarget) -> int:
    """Bytes that the keys and values of one token take in all layers.

    Of ordinary attention it is layers x 2 x key-value heads x head size x bytes of an element. Measured by reading a token,
    so that it holds for layers of unlike shapes as well.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    cache = target.model(token, use_cache=True).past_key_values
    return sum(states.numel() * states.element_size() for layer in cache.layers for states in (layer.keys, layer.values))


# --- orders


def shortest_text_first(waiting: Sequence[Waiting]) -> list[Waiting]:
    """By what prompt, answer so far and reservation take together: a batch is a tight rectangle, and a wide one."""
    return sorted(waiting, key=lambda row: (row.num_read + row.num_reserved, row.index))


def next_batch(ordered: Sequence[Waiting], budget: int, memory: Memory, *, may_overtake: bool) -> list[Waiting]:
    """The first requests that fit into `budget` entries together.

    With `may_overtake`, taking batch after batch is first fit: rows of 6 5 4 4 1 entries under a budget of 10 give [6 4], [5 4
    1]; without it [6], [5 4], [4 1].
    """
    batch: list[Waiting] = []
    for row in ordered:
        if memory.entries([*batch, row]) <= budget:
            batch.append(row)
        elif not may_overtake:
            break
    assert batch, "`require_room` has seen to it that every request fits alone"
    return batch


def require_room(waiting: Sequence[Waiting], rooms: Sequence[int], budget: int, memory: Memory) -> None:
    """Raise ValueError where a request would not fit into the budget alone, should its answer fill its room."""
    for row in waiting:
        entries = memory.entries([replace(row, num_reserved=rooms[row.index])])
        if entries > budget:
            raise ValueError(
                f"the KV-memory budget holds {budget} tokens, and a request may take {entries}: a prompt of {row.num_read} and "
                f"an answer of up to {rooms[row.index]}. Raise distill.kv_budget_gib, or lower distill.max_new_tokens"
            )


# --- the supervisor


def supervise(
    prompt_lengths: Sequence[int], rooms: Sequence[int], policy: Policy, decode: Decode, *, budget: int
) -> Iterator[BatchReport]:
    """Decode all requests, batch after batch, under `budget` KV-cache entries.

    `rooms` are the most new tokens that each answer may have. A row that has used up its reservation before its answer ended
    is evicted: it waits again, to go on from its tokens so far with its reservation doubled (arXiv 2306.06000, section 3).
    Beyond the paper, the last rows of a batch are evicted as well (see `Policy.least_share`). After every batch the
    reservation is told what was seen; requests that have not begun may then get another one.
    """
    reserved = policy.reservation.reserve(range(len(rooms)))
    waiting = {
        index: Waiting(index=index, num_read=length, num_reserved=min(tokens, room))
        for index, (length, tokens, room) in enumerate(zip(prompt_lengths, reserved, rooms, strict=True))
    }
    lengths: dict[int, int] = {}
    unfinished: dict[int, int] = {}
    require_room(list(waiting.values()), rooms, budget, policy.memory)
    while waiting:
        ordered = policy.order(may_begin(list(waiting.values()), policy.most_held))
        batch = next_batch(ordered, budget, policy.memory, may_overtake=policy.may_overtake)
        limits = [
            min(limit, rooms[row.index] - row.num_written)
            for limit, row in zip(policy.memory.limits(batch), batch, strict=True)
        ]
        least = math.ceil(policy.least_share * len(batch)) if len(waiting) > len(batch) else 0
        decoded = decode(batch, limits, least)
        for row, result in zip(batch, decoded, strict=True):
            if result.ended:
                del waiting[row.index]
                unfinished.pop(row.index, None)
                lengths[row.index] = row.num_written + result.num_new
            else:
                waiting[row.index] = evict(row, result.num_new, rooms[row.index])
                unfinished[row.index] = waiting[row.index].num_written
        yield BatchReport(rows=tuple(batch), decoded=tuple(decoded), num_entries=policy.memory.entries(batch))
        if policy.reservation.observe(lengths, unfinished):
            fresh = [row for row in waiting.values() if row.num_written == 0]
            for row, tokens in zip(fresh, policy.reservation.reserve([row.index for row in fresh]), strict=True):
                waiting[row.index] = replace(row, num_reserved=min(tokens, rooms[row.index]))


def may_begin(waiting: list[Waiting], most_held: int | None) -> list[Waiting]:
    """Those that may be in the next batch: all, or those alone that have begun while more than `most_held` tokens are held."""
    begun = [row for row in waiting if row.num_written]
    if most_held is None or sum(row.num_read for row in begun) <= most_held:
        return waiting
    return begun


def evict(row: Waiting, num_new: int, room: int) -> Waiting:
    """The row with its tokens so far; where they have used up its reservation, that of the whole answer is doubled, as far as
    `room` allows."""
    num_written = row.num_written + num_new
    assert num_written < room, "an answer that fills its room has ended"
    left = row.num_reserved - num_new
    return Waiting(
        index=row.index,
        num_read=row.num_read + num_new,
        num_reserved=left if left > 0 else min(2 * num_written, room) - num_written,
        num_written=num_written,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStatistics:
    """What schedules took, in sums. A row-step is a row in a step of its batch, whose longest row says how many there are."""

    num_answers: int
    num_tokens: int
    num_batches: int
    num_steps: int
    num_row_steps: int
    num_evictions: int
    num_entries: int
    """KV-cache entries that were reserved, by every batch."""
    num_entries_written: int
    num_predicted: int
    """Answers of which a length was predicted before they began."""
    num_buckets_right: int
    """Those whose first predicted bucket was right."""
    total_bucket_distance: int
    seconds: float

    @property
    def padding_share(self) -> float:
        """Row-steps that made no token, of all: what the rows that have ended leave empty until their batch ends."""
        return 1 - self.num_tokens / max(1, self.num_row_steps)

    @property
    def unused_share(self) -> float:
        """Entries reserved in which no token was ever written, of all: over-reservation, and the rectangle's corners."""
        return 1 - self.num_entries_written / max(1, self.num_entries)

    @property
    def bucket_accuracy(self) -> float | None:
        """Share of the predicted ones whose bucket was right; None where nothing was predicted."""
        return self.num_buckets_right / self.num_predicted if self.num_predicted else None

    @property
    def mean_bucket_distance(self) -> float | None:
        return self.total_bucket_distance / self.num_predicted if self.num_predicted else None

    @property
    def sequences_per_second(self) -> float:
        return self.num_answers / max(1e-9, self.seconds)

    def record(self) -> dict[str, Any]:
        """The sums and what they say, as JSON values."""
        shares = ("padding_share", "unused_share", "bucket_accuracy", "mean_bucket_distance", "sequences_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in shares}}

    def __str__(self) -> str:
        prediction = "nothing predicted"
        if self.num_predicted:
            prediction = (
                f"of {self.num_predicted} lengths predicted {self.bucket_accuracy:.2f} in the right tenth, "
                f"{self.mean_bucket_distance:.1f} off in the mean"
            )
        return (
            f"{self.num_answers} answers in {self.num_batches} batches of {self.num_steps} steps, {self.num_evictions} "
            f"evictions, {self.padding_share:.2f} padding, {self.sequences_per_second:.1f} answers a second; {prediction}"
        )


def summarise(
    reports: Sequence[BatchReport], predicted: Sequence[int], actual: Sequence[int], seconds: float
) -> ScheduleStatistics:
    """Statistics of a schedule's batches; `predicted` and `actual` are the buckets of the answers that have a prediction."""
    distances = [abs(guess - true) for guess, true in zip(predicted, actual, strict=True)]
    return ScheduleStatistics(
        num_answers=sum(decoded.ended for report in reports for decoded in report.decoded),
        num_tokens=sum(decoded.num_new for report in reports for decoded in report.decoded),
        num_batches=len(reports),
        num_steps=sum(report.num_steps for report in reports),
        num_row_steps=sum(len(report.rows) * report.num_steps for report in reports),
        num_evictions=sum(report.num_evicted for report in reports),
        num_entries=sum(report.num_entries for report in reports),
        num_entries_written=sum(row.num_read + decoded.num_new for report in reports for row, decoded in report.pairs),
        num_predicted=len(distances),
        num_buckets_right=distances.count(0),
        total_bucket_distance=sum(distances),
        seconds=seconds,
    )
