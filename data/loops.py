"""Answers that run in circles: a short cycle of tokens, repeated to the end."""

from collections.abc import Sequence

LOOP_TOKENS = 64
"""Tokens at an answer's end that the cycle must fill. A shorter answer must consist of it."""
LOOP_REPEATS = 8
"""Least number of repetitions of the cycle. The longest cycle has LOOP_TOKENS / LOOP_REPEATS
tokens."""


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Return whether the last LOOP_TOKENS tokens repeat one cycle.

    The cycle must be repeated LOOP_REPEATS times or more. A shorter answer counts if all of its
    tokens are such a cycle: `a` nine times, or `a b` eight times. Repetition inside an answer, such
    as a table's rule or a row of blanks, doesn't count.
    """
    tail = list(tokens[-LOOP_TOKENS:])
    longest = len(tail) // LOOP_REPEATS
    return any(tail[cycle:] == tail[:-cycle] for cycle in range(1, longest + 1))
