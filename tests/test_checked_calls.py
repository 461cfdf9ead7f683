"""The checks of annotations at run time: they catch a wrong shape, and cover the calls that they promise."""

from collections.abc import Callable

import torch
from jaxtyping import TypeCheckError

from outrider.models.decoding.tree import chain_tree

from .checked_calls import EVERY, FIRST, sometimes


def test_a_wrong_shape_given_to_the_library_is_an_error() -> None:
    errors = set()
    for _ in range(EVERY):
        try:
            chain_tree(torch.zeros(3, dtype=torch.long))
        except (TypeCheckError, IndexError, ValueError, RuntimeError) as error:
            errors.add(type(error))
    assert TypeCheckError in errors


def test_the_first_calls_and_later_ones_at_intervals_are_checked() -> None:
    checked = []

    def check(function: Callable[[int], int]) -> Callable[[int], int]:
        def call(number: int) -> int:
            checked.append(number)
            return function(number)

        return call

    @sometimes(check)
    def double(number: int) -> int:
        return 2 * number

    assert [double(number) for number in range(1, FIRST + 3 * EVERY)] == [2 * n for n in range(1, FIRST + 3 * EVERY)]
    assert checked[:FIRST] == list(range(1, FIRST + 1))
    assert len(checked) == FIRST + 3
    assert double.__name__ == "double"
