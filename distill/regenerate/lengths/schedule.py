"""Scheduling of requests: batches by length within a KV-memory budget.

After S3 (arXiv 2306.06000). A policy decides three things about a waiting request: how much room
its answer gets (`Reservation`), in which order requests are considered (`Order`), and how much
memory a batch takes (`Memory`). `supervise` forms batches until all requests are answered, by first
fit. Filling one batch after another with the first requests that fit is the same as putting each
request into the first batch that has room.

`policies` has the two policies of the engine `batch`.

Nothing here depends on a clock, a random number or a rank: the batches are a function of the
requests and their answers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from ....models.llm.hf_target import HFTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue."""

    index: int
    """Index among all requests."""
    num_read: int
    """Tokens that it begins with: the prompt, and an evicted request's answer so far."""
    num_reserved: int
    """New tokens that it has room for."""
    num_written: int = 0
    """Tokens of its answer so far."""


@runtime_checkable
class Memory(Protocol):
    """The layout of a batch in the KV cache."""

    def entries(self, batch: Sequence[Waiting]) -> int:
        """Return the number of entries, of one token each, that a batch takes."""

    def limits(self, batch: Sequence[Waiting]) -> list[int]:
        """Return the number of new tokens that each row has room for."""


Order = Callable[[Sequence[Waiting]], list[Waiting]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """New tokens of one row of a decoded batch."""

    num_new: int
    ended: bool
    """Whether the answer is complete; if not, its reservation may be used up."""


Decode = Callable[[Sequence[Waiting], Sequence[int], int], Sequence[Decoded]]
"""Function that decodes a batch, each row by at least one token and at most its number of new
tokens.

It stops when fewer rows continue than its last argument."""


@runtime_checkable
class Reservation(Protocol):
    """Decides how much room answers get."""

    def reserve(self, indices: Sequence[int]) -> list[int]:
        """Return the number of new tokens that each of these requests gets room for, at least 1."""

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        """Learn from complete answers' `lengths`, and from the tokens so far of evicted answers.

        Returns whether reservations have changed. If so, `reserve` is called again for all requests
        that haven't begun.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules by which requests form batches."""

    reservation: Reservation
    order: Order
    memory: Memory
    may_overtake: bool
    """Whether a request that doesn't fit lets later ones overtake it."""
    least_share: float = 0.0
    """A batch ends as soon as a smaller share of its rows continues, if other requests wait. A step
    costs nearly as much for few rows as for many. The last rows are evicted, with the rest of their
    reservations."""
    most_held: int | None = None
    """Most tokens of evicted rows, whose keys and values wait on the host, before no new request
    begins; None is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """A decoded batch: its reservations and results, in the order of its rows."""

    rows: tuple[Waiting, ...]
    decoded: tuple[Decoded, ...]
    num_entries: int
    """KV-cache entries of the batch."""

    @property
    def num_steps(self) -> int:
        """Number of new tokens of the row that got the most."""
        return max(decoded.num_new for decoded in self.decoded)

    @property
    def pairs(self) -> list[tuple[Waiting, Decoded]]:
        return list(zip(self.rows, self.decoded, strict=True))

    @property
    def num_evicted(self) -> int:
        return sum(not decoded.ended for decoded in self.decoded)


# --- memory


class Rectangle:
    """Layout of `TreeCache`: every row is as wide as the longest text with its reservation.

    A shorter text may therefore continue up to the same width.
    """

    def entries(self, batch: Sequence[Waiting]) -> int:
        return len(batch) * max(row.num_read + row.num_reserved for row in batch)

    def limits(self, batch: Sequence[Waiting]) -> list[int]:
        end = max(row.num_read + row.num_reserved for row in batch)
        return [end - row.num_read for row in batch]


@torch.inference_mode()
def kv_bytes_per_token(target: HFTarget) -> int:
    """Return the bytes of one token's keys and values in all layers.

    For ordinary attention this is layers x 2 x KV heads x head size x bytes of an element. It is
    measured by reading a token, so it is also right for layers of different shapes.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    cache = target.model(token, use_cache=True).past_key_values
    return sum(states.numel() * states.element_size() for layer in cache.layers for states in (layer.keys, layer.values))


# --- batches


def next_batch(ordered: Sequence[Waiting], budget: int, memory: Memory, *, may_overtake: bool) -> list[Waiting]:
    """Return the first requests that fit into `budget` entries together.

    With `may_overtake`, taking batch after batch is first fit. Example: rows of 6 5 4 4 1 entries
    with a budget of 10 give [6 4], [5 4 1]; without it [6], [5 4], [4 1].
    """
    batch: list[Waiting] = []
    for row in ordered:
        if memory.entries([*batch, row]) <= budget:
            batch.append(row)
        elif not may_overtake:
            break
    assert batch, "`require_room` has checked that every request fits alone"
    return batch


def require_room(waiting: Sequence[Waiting], rooms: Sequence[int], budget: int, memory: Memory) -> None:
    """Raise ValueError if a request doesn't fit into the budget alone with its longest answer."""
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
    """Decode all requests, batch after batch, within `budget` KV-cache entries.

    `rooms` are the most new tokens of each answer. A row that uses up its reservation before its
    answer ends is evicted. It waits again, and resumes from its tokens so far with a doubled
    reservation (arXiv 2306.06000, section 3). Unlike in the paper, the last rows of a batch are
    evicted as well (see `Policy.least_share`). After every batch `Reservation.observe` gets the
    known lengths; requests that haven't begun may then get another reservation.
    """
    # 1. Reserve room for all requests.
    reserved = policy.reservation.reserve(range(len(rooms)))
    waiting = {
        index: Waiting(index=index, num_read=length, num_reserved=min(tokens, room))
        for index, (length, tokens, room) in enumerate(zip(prompt_lengths, reserved, rooms, strict=True))
    }
    lengths: dict[int, int] = {}
    unfinished: dict[int, int] = {}
    require_room(list(waiting.values()), rooms, budget, policy.memory)
    while waiting:
        # 2. Form a batch, and decode it.
        ordered = policy.order(may_begin(list(waiting.values()), policy.most_held))
        batch = next_batch(ordered, budget, policy.memory, may_overtake=policy.may_overtake)
        limits = [
            min(limit, rooms[row.index] - row.num_written)
            for limit, row in zip(policy.memory.limits(batch), batch, strict=True)
        ]
        least = math.ceil(policy.least_share * len(batch)) if len(waiting) > len(batch) else 0
        decoded = decode(batch, limits, least)
        # 3. Finish complete answers, and evict the other rows.
        for row, result in zip(batch, decoded, strict=True):
            if result.ended:
                del waiting[row.index]
                unfinished.pop(row.index, None)
                lengths[row.index] = row.num_written + result.num_new
            else:
                waiting[row.index] = evict(row, result.num_new, rooms[row.index])
                unfinished[row.index] = waiting[row.index].num_written
        yield BatchReport(rows=tuple(batch), decoded=tuple(decoded), num_entries=policy.memory.entries(batch))
        # 4. Learn the lengths.
        if policy.reservation.observe(lengths, unfinished):
            fresh = [row for row in waiting.values() if row.num_written == 0]
            for row, tokens in zip(fresh, policy.reservation.reserve([row.index for row in fresh]), strict=True):
                waiting[row.index] = replace(row, num_reserved=min(tokens, rooms[row.index]))


def may_begin(waiting: list[Waiting], most_held: int | None) -> list[Waiting]:
    """Return the requests that may join the next batch.

    These are all, or only those that have begun, while more than `most_held` tokens are held.
    """
    begun = [row for row in waiting if row.num_written]
    if most_held is None or sum(row.num_read for row in begun) <= most_held:
        return waiting
    return begun


def evict(row: Waiting, num_new: int, room: int) -> Waiting:
    """Return the row with its tokens so far.

    If they have used up its reservation, the reservation of the whole answer is doubled, up to
    `room`.
    """
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
    """Sums over schedules. A row-step is a row in a step of its batch."""

    num_answers: int
    num_tokens: int
    num_batches: int
    num_steps: int
    num_row_steps: int
    num_evictions: int
    num_moved_tokens: int
    """KV-cache entries of evicted rows, which go to the host and return."""
    num_entries: int
    """KV-cache entries reserved by all batches."""
    num_entries_written: int
    num_predicted: int
    """Answers whose length was predicted before they began."""
    num_buckets_right: int
    """Answers whose first predicted bucket was right."""
    total_bucket_distance: int
    seconds: float
    moving_seconds: float
    """Seconds in which evicted rows' keys and values moved to the host and back."""
    learning_seconds: float
    """Seconds of learning and predicting lengths."""

    @property
    def generation_seconds(self) -> float:
        """All other seconds: the target's, and those of forming batches."""
        return self.seconds - self.moving_seconds - self.learning_seconds

    @property
    def mean_rows(self) -> float:
        """Mean number of rows that get a token in a step (S3, Table 2)."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def padding_share(self) -> float:
        """Share of row-steps without a token: finished rows are idle until their batch ends."""
        return 1 - self.num_tokens / max(1, self.num_row_steps)

    @property
    def unused_share(self) -> float:
        """Share of reserved entries without a token: over-reservation, and padding."""
        return 1 - self.num_entries_written / max(1, self.num_entries)

    @property
    def bucket_accuracy(self) -> float | None:
        """Share of predicted answers whose bucket was right; None if nothing was predicted."""
        return self.num_buckets_right / self.num_predicted if self.num_predicted else None

    @property
    def mean_bucket_distance(self) -> float | None:
        return self.total_bucket_distance / self.num_predicted if self.num_predicted else None

    @property
    def sequences_per_second(self) -> float:
        return self.num_answers / max(1e-9, self.seconds)

    def record(self) -> dict[str, Any]:
        """Return the sums and derived values as JSON values."""
        derived = (
            *("mean_rows", "generation_seconds", "padding_share", "unused_share"),
            *("bucket_accuracy", "mean_bucket_distance", "sequences_per_second"),
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        prediction = "nothing predicted"
        if self.num_predicted:
            prediction = (
                f"{self.num_predicted} predicted lengths, {self.bucket_accuracy:.2f} of them in the right tenth, "
                f"{self.mean_bucket_distance:.1f} buckets off on average"
            )
        return (
            f"{self.num_answers} answers in {self.num_batches} batches of {self.num_steps} steps, {self.mean_rows:.1f} rows in "
            f"a step, {self.num_evictions} evictions, {self.padding_share:.2f} padding, {self.sequences_per_second:.1f} "
            f"answers per second; {self.generation_seconds:.1f} s of generation, {self.moving_seconds:.1f} s of moving evicted "
            f"rows, {self.learning_seconds:.1f} s of learning and predicting lengths; {prediction}"
        )


def summarise(
    reports: Sequence[BatchReport],
    predicted: Sequence[int],
    actual: Sequence[int],
    seconds: float,
    *,
    moving_seconds: float = 0.0,
    learning_seconds: float = 0.0,
) -> ScheduleStatistics:
    """Compute the statistics of a schedule's batches.

    `predicted` and `actual` are the buckets of the answers with a prediction. `seconds` are all,
    split as in Figure 6 of S3: generation is what moving and learning leave.
    """
    distances = [abs(guess - true) for guess, true in zip(predicted, actual, strict=True)]
    return ScheduleStatistics(
        num_answers=sum(decoded.ended for report in reports for decoded in report.decoded),
        num_tokens=sum(decoded.num_new for report in reports for decoded in report.decoded),
        num_batches=len(reports),
        num_steps=sum(report.num_steps for report in reports),
        num_row_steps=sum(len(report.rows) * report.num_steps for report in reports),
        num_evictions=sum(report.num_evicted for report in reports),
        num_moved_tokens=sum(
            row.num_read + decoded.num_new for report in reports for row, decoded in report.pairs if not decoded.ended
        ),
        num_entries=sum(report.num_entries for report in reports),
        num_entries_written=sum(row.num_read + decoded.num_new for report in reports for row, decoded in report.pairs),
        num_predicted=len(distances),
        num_buckets_right=distances.count(0),
        total_bucket_distance=sum(distances),
        seconds=seconds,
        moving_seconds=moving_seconds,
        learning_seconds=learning_seconds,
    )
