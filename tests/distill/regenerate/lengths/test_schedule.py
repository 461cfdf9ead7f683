"""The schedule: first fit, budgets, evictions that keep tokens, and no randomness."""

import random
from collections.abc import Sequence

import pytest

from outrider.distill.regenerate.lengths.schedule import (
    FEW_ROWS,
    SHORTEST,
    Decoded,
    Policy,
    Waiting,
    evict,
    next_batch,
    shortest_text_first,
    supervise,
)


class Known:
    """Reservations that are fixed."""

    def __init__(self, num_tokens: Sequence[int]) -> None:
        self.num_tokens = num_tokens

    def reserve(self, indices: Sequence[int]) -> list[int]:
        return [self.num_tokens[index] for index in indices]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        return False


class EndsAtOnce:
    """Decoder whose answers end with their first token. It records what it is asked for."""

    def __init__(self) -> None:
        self.indices: list[list[int]] = []
        self.limits: list[list[int]] = []
        self.sizes: list[tuple[int, int]] = []
        """Rows of each batch, and the fewest that must continue."""

    def __call__(self, batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
        self.indices.append([row.index for row in batch])
        self.limits.append(list(limits))
        self.sizes.append((len(batch), least))
        return [Decoded(num_new=1, ended=True) for _ in batch]


def rows(*sizes: tuple[int, int]) -> list[Waiting]:
    return [Waiting(index=index, num_read=read, num_reserved=reserved) for index, (read, reserved) in enumerate(sizes)]


def all_batches(ordered: list[Waiting], budget: int) -> list[list[tuple[int, int]]]:
    batches = []
    while ordered:
        batch = next_batch(ordered, budget)
        batches.append([(row.num_read, row.num_reserved) for row in batch])
        ordered = [row for row in ordered if row not in batch]
    return batches


def first_fit_decreasing(sizes: list[tuple[int, int]], budget: int) -> list[list[tuple[int, int]]]:
    """Put every row into the first batch with enough memory, the largest reservations first.

    All rows of a batch are as wide as its widest row.
    """
    bins: list[list[tuple[int, int]]] = []
    for size in sorted(sizes, key=lambda size: -size[1]):
        for content in bins:
            if (len(content) + 1) * max(sum(row) for row in [*content, size]) <= budget:
                content.append(size)
                break
        else:
            bins.append([size])
    return bins


def test_filling_batch_after_batch_is_decreasing_first_fit():
    draw = random.Random(0)
    num_overtaking = 0
    for _ in range(50):
        sizes = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(30)]
        batches = all_batches(sorted(rows(*sizes), key=lambda row: -row.num_reserved), 160)
        assert batches == first_fit_decreasing(sizes, 160)
        num_overtaking += [size for batch in batches for size in batch] != sorted(sizes, key=lambda size: -size[1])
    assert num_overtaking > 20  # requests that don't fit let later ones overtake


def test_a_long_text_doesnt_widen_a_large_batch_of_short_ones():
    short = [(2, 3 + index % 2) for index in range(FEW_ROWS)]
    waiting = rows(*short, (40, 3), (2, 3), (39, 3))
    assert len(next_batch(waiting, 10_000)) == FEW_ROWS + 3
    decode, policy, rooms = EndsAtOnce(), Policy(order=list, most_padded=1.25), [row.num_reserved for row in waiting]
    list(supervise([row.num_read for row in waiting], rooms, policy, Known(rooms), decode, budget=10_000))
    assert decode.indices == [[*range(FEW_ROWS), FEW_ROWS + 1], [FEW_ROWS, FEW_ROWS + 2]]
    assert len(next_batch(waiting[2:], 10_000, most_padded=1.25)) == FEW_ROWS, "few rows may be padded"


def test_the_order_of_equal_requests_is_stable():
    waiting = rows((3, 7), (5, 7), (3, 9), (5, 1))
    assert [row.index for row in shortest_text_first(waiting[::-1])] == [3, 0, 1, 2]


def test_a_short_text_may_use_the_padding_of_its_batch():
    decode = EndsAtOnce()
    list(supervise([10, 2], [20, 20], Policy(order=list), Known([5, 6]), decode, budget=30))
    assert decode.limits == [[5, 13]]


def test_an_evicted_row_keeps_its_tokens_and_doubles_its_reservation():
    row = evict(Waiting(index=0, num_read=10, num_reserved=6), 6, room=100)
    assert row == Waiting(index=0, num_read=16, num_reserved=6, num_written=6)
    row = evict(row, 6, room=100)
    assert (row.num_written, row.num_written + row.num_reserved) == (12, 24)
    assert evict(row, 12, room=30).num_reserved == 30 - 24  # no more than the answer may have


def test_a_row_that_leaves_with_its_batch_keeps_the_rest_of_its_reservation():
    row = evict(Waiting(index=0, num_read=10, num_reserved=6), 2, room=100)
    assert (row.num_written, row.num_reserved) == (2, 4)


class Script:
    """Decoder of answers with known lengths that checks its arguments."""

    def __init__(self, prompts: list[int], lengths: list[int], budget: int) -> None:
        self.prompts, self.lengths, self.budget = prompts, lengths, budget
        self.written = [0] * len(lengths)
        self.batches: list[list[int]] = []

    def __call__(self, batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
        self.batches.append([row.index for row in batch])
        decoded = []
        for row, limit in zip(batch, limits, strict=True):
            assert row.num_written == self.written[row.index]
            assert row.num_read == self.prompts[row.index] + row.num_written
            num_new = min(limit, self.lengths[row.index] - row.num_written)
            assert num_new >= 1
            self.written[row.index] += num_new
            decoded.append(Decoded(num_new=num_new, ended=self.written[row.index] == self.lengths[row.index]))
        width = max(row.num_read + limit for row, limit in zip(batch, limits, strict=True))
        assert len(batch) * width <= self.budget
        return decoded


@pytest.mark.parametrize("policy", [SHORTEST, Policy(order=list), Policy(order=shortest_text_first, held_budgets=2 / 3)])
def test_all_requests_are_answered_within_the_budget_with_wrong_reservations(policy):
    draw = random.Random(1)
    prompts = [draw.randint(1, 20) for _ in range(60)]
    lengths = [draw.randint(1, 64) for _ in range(60)]
    script = Script(prompts, lengths, budget=300)
    reservation = Known([draw.randint(1, 64) for _ in lengths])
    batches = list(supervise(prompts, [64] * 60, policy, reservation, script, budget=300))
    assert script.written == lengths
    decoded = [result for batch in batches for _, result in batch]
    assert sum(result.ended for result in decoded) == 60
    assert sum(result.num_new for result in decoded) == sum(lengths)
    assert len(decoded) > 60  # some rows were evicted


def test_the_last_rows_are_evicted_early_only_if_others_wait():
    decode = EndsAtOnce()
    list(supervise([1] * 5, [10] * 5, Policy(order=list, least_share=0.75), Known([10] * 5), decode, budget=34))
    assert decode.sizes == [(3, 3), (2, 0)]


def test_no_request_starts_while_too_much_is_held_on_the_host():
    prompts, lengths = [10] * 40, [32] * 40
    held: list[int] = []

    class Watched(Script):
        def __call__(self, batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
            waiting = sum(10 + written for written in self.written if 0 < written < 32)
            if any(row.num_written == 0 for row in batch):
                held.append(waiting)
            return super().__call__(batch, limits, least)

    def run(held_budgets: float | None) -> int:
        held.clear()
        policy = Policy(order=shortest_text_first, held_budgets=held_budgets)
        list(supervise(prompts, [64] * 40, policy, Known([8] * 40), Watched(prompts, lengths, 100), budget=100))
        return max(held)

    assert run(1.5) <= 150 < run(None)
