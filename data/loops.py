"""Answers that run in circles: a short cycle of tokens, repeated to the end."""

from collections.abc import Sequence

LOOP_TOKENS = 64
"""Tokens at an answer's end that the cycle must fill. A shorter answer must consist of it."""
LOOP_REPEATS = 8
"""Least number of times that the cycle is run through there. The longest cycle has LOOP_TOKENS / LOOP_REPEATS tokens."""


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Return whether the last LOOP_TOKENS tokens are one cycle, repeated LOOP_REPEATS times or more.

    A shorter answer counts if all of its tokens do: `a` nine times, or `a b` eight times. A table's
    rule or a row of blanks inside an answer doesn't count.
    """
    tail = list(tokens[-LOOP_TOKENS:])
    longest = len(tail) // LOOP_REPEATS
    return any(tail[cycle:] == tail[:-cycle] for cycle in range(1, longest + 1))
