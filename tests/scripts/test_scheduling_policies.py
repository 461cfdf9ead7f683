"""Policies with which the schedule of regeneration is compared."""

import runpy
from pathlib import Path

from outrider.distill.regenerate.lengths.schedule import Waiting

POLICIES = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "scheduling_policies.py"))


def rows(*sizes: tuple[int, int]) -> list[Waiting]:
    return [Waiting(index=index, num_read=read, num_reserved=reserved) for index, (read, reserved) in enumerate(sizes)]


def test_the_orders_of_equal_requests_are_stable() -> None:
    waiting = rows((3, 7), (5, 7), (3, 9), (5, 1))
    expected = {"longest_answer_first": [2, 0, 1, 3], "longest_prompt_first": [1, 3, 0, 2], "first_come": [0, 1, 2, 3]}
    for name, order in expected.items():
        assert [row.index for row in POLICIES[name](waiting[::-1])] == order, name


def test_pages_are_allocated_as_a_whole() -> None:
    pages, batch = POLICIES["Pages"](size=4), rows((10, 5), (2, 6))
    assert pages.entries(batch) == 16 + 8
    assert pages.limits(batch) == [5, 6]
