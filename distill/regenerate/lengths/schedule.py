"""Scheduling of requests: batches by length within a KV-memory budget.

After S3 (arXiv 2306.06000). A `Reservation` decides how much room an answer gets, and a `Policy` in
which order requests are considered. `supervise` forms batches until all requests are answered, by
first fit. Filling one batch after another with the first requests that fit is the same as putting
each request into the first batch that has room.

S3 considers the longest requests first, and reserves the predicted length. This is right if a batch
stays together until its longest row ends. Here an evicted row resumes at no cost except moving its
keys and values. So the shortest texts go first, with less room than they may need.
Batches are then as wide as short texts allow. Rows that exceed their room wait until there are
enough of them for a wide batch of longer texts.

Nothing here depends on a clock, a random number or a rank: the batches are a function of the
requests and their answers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

FEW_ROWS = 64
"""Rows that join a batch whatever they pad: a further batch has as many steps, and few rows take nearly the time of many."""

RESERVED_SHARE = 0.5
"""Probability that an answer fits into its predicted length."""

UNKNOWN_SHARE = 0.25
"""Share of the maximum length that is reserved before any length is known."""


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


def shortest_text_first(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Sort by the sum of prompt, answer so far and reservation.

    Batches are then wide, with little padding.
    """
    return sorted(waiting, key=lambda row: (row.num_read + row.num_reserved, row.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules by which requests form batches."""

    order: Callable[[Sequence[Waiting]], list[Waiting]]
    part: float = 1.0
    """Share of the predicted length that is reserved at first."""
    least_share: float = 0.0
    """A batch ends as soon as a smaller share of its rows continues, if other requests wait. A step
    costs nearly as much for few rows as for many. The last rows are evicted, with the rest of their
    reservations."""
    held_budgets: float | None = None
    """Most memory of evicted rows, whose keys and values wait on the host, before no new request
    begins, in KV-memory budgets; None is no limit."""
    most_padded: float | None = None
    """Largest ratio of a batch's entries to those that its rows need without padding; None is no limit. A batch of at most
    FEW_ROWS is never cut."""


SHORTEST = Policy(order=shortest_text_first, part=0.5, least_share=0.5, held_budgets=4.0, most_padded=1.25)
"""The policy of the engine `batch`.

An answer that needs more than half of its prediction is cheap, since nothing is read again. Unused
room makes batches narrow. Some long texts would make all others wide, and prompts are read with as much
padding. A greater `least_share` means fewer steps but more evictions, each of which moves a row's keys and
values to the host and back."""


def supervise(
    prompt_lengths: Sequence[int],
    rooms: Sequence[int],
    policy: Policy,
    reservation: Reservation,
    decode: Decode,
    *,
    budget: int,
) -> Iterator[list[tuple[Waiting, Decoded]]]:
    """Decode all requests, batch after batch, within `budget` KV-cache entries.

    `rooms` are the most new tokens of each answer. A row that uses up its reservation before its
    answer ends is evicted. It waits again, and resumes from its tokens so far with a doubled
    reservation (arXiv 2306.06000, section 3). Unlike in the paper, the last rows of a batch are
    evicted as well (see `Policy.least_share`). After every batch `Reservation.observe` gets the
    known lengths; requests that haven't begun may then get another reservation.
    """
    # 1. Reserve room for all requests.
    reserved = reservation.reserve(range(len(rooms)))
    waiting = {
        index: Waiting(index=index, num_read=length, num_reserved=min(tokens, room))
        for index, (length, tokens, room) in enumerate(zip(prompt_lengths, reserved, rooms, strict=True))
    }
    lengths: dict[int, int] = {}
    unfinished: dict[int, int] = {}
    while waiting:
        # 2. Form a batch, and decode it.
        most_held = None if policy.held_budgets is None else policy.held_budgets * budget
        batch = next_batch(policy.order(may_begin(list(waiting.values()), most_held)), budget, policy.most_padded)
        limits = [min(width(batch) - row.num_read, rooms[row.index] - row.num_written) for row in batch]
        least = math.ceil(policy.least_share * len(batch)) if len(waiting) > len(batch) else 0
        decoded = list(zip(batch, decode(batch, limits, least), strict=True))
        # 3. Finish complete answers, and evict the other rows.
        for row, result in decoded:
            if result.ended:
                del waiting[row.index]
                unfinished.pop(row.index, None)
                lengths[row.index] = row.num_written + result.num_new
            else:
                waiting[row.index] = evict(row, result.num_new, rooms[row.index])
                unfinished[row.index] = waiting[row.index].num_written
        yield decoded
        # 4. Learn the lengths.
        if reservation.observe(lengths, unfinished):
            fresh = [row for row in waiting.values() if row.num_written == 0]
            for row, tokens in zip(fresh, reservation.reserve([row.index for row in fresh]), strict=True):
                waiting[row.index] = replace(row, num_reserved=min(tokens, rooms[row.index]))


def width(batch: Sequence[Waiting]) -> int:
    """Return the KV-cache entries of each row of a batch: those of its longest text with its room.

    All rows of a `TreeCache` are equally wide. A shorter text may therefore continue up to the same
    width.
    """
    return max(row.num_read + row.num_reserved for row in batch)


def next_batch(ordered: Sequence[Waiting], budget: int, most_padded: float | None = None) -> list[Waiting]:
    """Return the first requests that fit into `budget` entries together; later ones may overtake.

    Taking batch after batch is then first fit. Example: equally long prompts with reservations of
    6 5 4 4 1 entries and a budget of 12 give [6 5], [4 4 1]. For `most_padded` see `Policy`.
    """
    batch: list[Waiting] = []
    widest = needed = 0
    for row in ordered:
        row_width = width([row])
        wider = max(widest, row_width)
        entries, most = (len(batch) + 1) * wider, budget
        if most_padded is not None and len(batch) >= FEW_ROWS:
            most = min(budget, int(most_padded * (needed + row_width)))
        if entries <= most:
            batch.append(row)
            widest, needed = wider, needed + row_width
    assert batch, "each request fits alone, with its longest answer"
    return batch


def may_begin(waiting: list[Waiting], most_held: float | None) -> list[Waiting]:
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
