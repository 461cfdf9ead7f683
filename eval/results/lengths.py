"""Tokens per step over the length of an answer, in windows of its tokens.

A drafter may become better or worse while an answer grows: the target repeats itself, or the text
leaves the lengths that the drafter was trained on.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import TypedDict  # pydantic can't read typing's before Python 3.12

from ..records.records import EvalRecord

WINDOW_TOKENS = 32
"""Tokens of an answer in a window."""


class Window(TypedDict):
    """Figures of one window of the answers."""

    first_token: int
    """Index of the window's first token in the answer; the prefill's token has index 0."""
    num_answers: int
    """Answers (of all repeats) with a verify step in this window. Later windows have fewer."""
    num_steps: int
    """Verify steps that begin in this window."""
    tokens_per_step: float
    """Tokens that these steps emit, per step. The last ones may lie in the next window."""


def by_window(records: Sequence[EvalRecord]) -> list[Window] | None:
    """Compute tokens per step in each window of WINDOW_TOKENS tokens.

    A step belongs to the window of the first token that it emits. Windows without a step are left
    out. Returns None if a record lacks its steps, as those of older versions do.
    """
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for record in records:
        if record.step_tokens is None:
            return None
        visited = set()
        for window, num_tokens in _steps(record.step_tokens):
            total = counts[window]
            total[0] += window not in visited
            total[1] += 1
            total[2] += num_tokens
            visited.add(window)
    return [
        Window(
            first_token=WINDOW_TOKENS * window, num_answers=num_answers, num_steps=num_steps, tokens_per_step=tokens / num_steps
        )
        for window, (num_answers, num_steps, tokens) in sorted(counts.items())
    ]


def window_name(window: Any) -> str:
    """Name a window by its tokens, counted from 1."""
    return f"{window['first_token'] + 1} to {window['first_token'] + WINDOW_TOKENS}"


def _steps(step_tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the window in which each step begins, and its number of tokens."""
    position = 1  # the prefill has emitted the first token
    for num_tokens in step_tokens:
        yield position // WINDOW_TOKENS, num_tokens
        position += num_tokens
