"""What decode loops have written."""

from collections.abc import Iterable

from outrider.models.decoding.types import Step


def texts_of(steps: Iterable[Step], num_rows: int) -> list[list[int]]:
    """Return the tokens of each row of a batch."""
    texts: list[list[int]] = [[] for _ in range(num_rows)]
    for step in steps:
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            texts[row] += tokens
    return texts
