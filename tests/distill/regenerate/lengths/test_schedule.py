"""The schedule: first fit, budgets, evictions that keep tokens, and no randomness."""

import random
from collections.abc import Sequence

import pytest
import torch

from outrider.distill.regenerate.lengths.policies import longest_answer_first, shortest_text_first
from outrider.distill.regenerate.lengths.schedule import (
    Decoded,
    Policy,
    Rectangle,
    Waiting,
    evict,
    kv_bytes_per_token,
    next_batch,
    summarise,
    supervise,
)


class Sum:
    """Memory whose size is the sum of the rows, without padding."""

    def entries(self, batch: Sequence[Waiting]) -> int:
        return sum(row.num_read + row.num_reserved for row in batch)

    def limits(self, batch: Sequence[Waiting]) -> list[int]:
        return [row.num_reserved for row in batch]


class Known:
    """Reservations that are fixed."""

    def __init__(self, num_tokens: Sequence[int]) -> None:
        self.num_tokens = num_tokens

    def reserve(self, indices: Sequence[int]) -> list[int]:
        return [self.num_tokens[index] for index in indices]

    def observe(self, lengths: dict[int, int], unfinished: dict[int, int]) -> bool:
        return False


def rows(*sizes: tuple[int, int]) -> list[Waiting]:
    return [Waiting(index=index, num_read=read, num_reserved=reserved) for index, (read, reserved) in enumerate(sizes)]


def all_batches(ordered: list[Waiting], budget: int, *, may_overtake: bool) -> list[list[int]]:
    batches = []
    while ordered:
        batch = next_batch(ordered, budget, Sum(), may_overtake=may_overtake)
        batches.append([row.num_reserved for row in batch])
        ordered = [row for row in ordered if row not in batch]
    return batches


def first_fit_decreasing(sizes: list[int], budget: int) -> list[list[int]]:
    """Put every item into the first bin with enough space, the largest items first."""
    bins: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        for content in bins:
            if sum(content) + size <= budget:
                content.append(size)
                break
        else:
            bins.append([size])
    return bins


def test_filling_batch_after_batch_is_decreasing_first_fit():
    draw = random.Random(0)
    for _ in range(50):
        sizes = [draw.randint(1, 40) for _ in range(30)]
        ordered = longest_answer_first(rows(*((0, size) for size in sizes)))
        assert all_batches(ordered, 50, may_overtake=True) == first_fit_decreasing(sizes, 50)


def test_without_overtaking_a_batch_ends_at_the_first_request_that_does_not_fit():
    waiting = rows((0, 6), (0, 5), (0, 4), (0, 4), (0, 1))
    assert all_batches(waiting, 10, may_overtake=False) == [[6], [5, 4], [4, 1]]
    assert all_batches(waiting, 10, may_overtake=True) == [[6, 4], [5, 4, 1]]


def test_the_order_of_equal_requests_is_stable():
    waiting = rows((3, 7), (5, 7), (3, 9), (5, 1))
    assert [row.index for row in shortest_text_first(waiting[::-1])] == [3, 0, 1, 2]


def test_a_rectangle_counts_padding_and_lets_short_texts_use_it():
    batch = rows((10, 5), (2, 6))
    assert Rectangle().entries(batch) == 2 * 15
    assert Rectangle().limits(batch) == [5, 13]


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


@pytest.mark.parametrize(
    ("order", "most_held"), [(longest_answer_first, None), (shortest_text_first, None), (shortest_text_first, 200)]
)
def test_all_requests_are_answered_within_the_budget_with_wrong_reservations(order, most_held):
    draw = random.Random(1)
    prompts = [draw.randint(1, 20) for _ in range(60)]
    lengths = [draw.randint(1, 64) for _ in range(60)]
    script = Script(prompts, lengths, budget=300)
    policy = Policy(
        reservation=Known([draw.randint(1, 64) for _ in lengths]),
        order=order,
        memory=Rectangle(),
        may_overtake=True,
        most_held=most_held,
    )
    reports = list(supervise(prompts, [64] * 60, policy, script, budget=300))
    assert script.written == lengths
    statistics = summarise(reports, [], [], seconds=2.0)
    assert statistics.num_answers == 60
    assert statistics.sequences_per_second == 30
    assert statistics.num_tokens == sum(lengths)
    assert statistics.num_evictions == sum(map(len, script.batches)) - 60 > 0
    assert statistics.bucket_accuracy is None
    assert statistics.mean_rows == sum(lengths) / statistics.num_steps
    ended = [max(index for index, report in enumerate(reports) if row in [r.index for r in report.rows]) for row in range(60)]
    moved = [
        row.num_read + decoded.num_new
        for index, report in enumerate(reports)
        for row, decoded in report.pairs
        if index < ended[row.index]
    ]
    assert statistics.num_moved_tokens == sum(moved) > 0


def test_padding_and_unused_memory_equal_their_definitions():
    script = Script([2, 4], [3, 5], budget=100)
    policy = Policy(reservation=Known([6, 6]), order=list, memory=Rectangle(), may_overtake=False)
    statistics = summarise(list(supervise([2, 4], [6, 6], policy, script, budget=100)), [1, 4], [1, 7], seconds=1.0)
    assert statistics.padding_share == 1 - 8 / 10  # two rows, five steps
    assert statistics.unused_share == 1 - (2 + 3 + 4 + 5) / (2 * 10)
    assert (statistics.bucket_accuracy, statistics.mean_bucket_distance) == (0.5, 1.5)


def test_the_last_rows_are_evicted_early_only_if_others_wait():
    seen: list[tuple[int, int]] = []

    def decode(batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
        seen.append((len(batch), least))
        return [Decoded(num_new=1, ended=True) for _ in batch]

    policy = Policy(reservation=Known([10] * 5), order=list, memory=Rectangle(), may_overtake=True, least_share=0.75)
    list(supervise([1] * 5, [10] * 5, policy, decode, budget=34))
    assert seen == [(3, 3), (2, 0)]


def test_no_request_starts_while_too_much_is_held_on_the_host():
    prompts, lengths = [10] * 40, [32] * 40
    held: list[int] = []

    class Watched(Script):
        def __call__(self, batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
            waiting = sum(10 + written for written in self.written if 0 < written < 32)
            if any(row.num_written == 0 for row in batch):
                held.append(waiting)
            return super().__call__(batch, limits, least)

    def run(most_held: int | None) -> int:
        held.clear()
        order = shortest_text_first
        policy = Policy(reservation=Known([8] * 40), order=order, memory=Rectangle(), may_overtake=True, most_held=most_held)
        list(supervise(prompts, [64] * 40, policy, Watched(prompts, lengths, 100), budget=100))
        return max(held)

    assert run(150) <= 150 < run(None)


def test_a_request_that_may_exceed_the_budget_is_an_error_before_any_work():
    policy = Policy(reservation=Known([2, 2]), order=list, memory=Rectangle(), may_overtake=False)
    with pytest.raises(ValueError, match="holds 20 tokens, and a request may take 25.*kv_budget_gib"):
        next(supervise([3, 9], [16, 16], policy, Script([], [], 0), budget=20))


def test_kv_bytes_per_token_follow_from_the_configuration(target):
    config = target.model.config
    expected = (
        config.num_hidden_layers * 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4
    )
    assert kv_bytes_per_token(target) == expected
    target.model.to(torch.float16)
    assert kv_bytes_per_token(target) == expected / 2
