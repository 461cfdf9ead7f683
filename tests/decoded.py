"""What decode loops have written."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.decoding.types import Step


def answers_of(target: Any, drafter: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Return the greedy answers of a batch."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    return texts_of(generate(target, drafter, GreedyAcceptance(), rows, max_new_tokens=max_new_tokens), len(rows))


def texts_of(steps: Iterable[Step], num_rows: int) -> list[list[int]]:
    """Return the tokens of each row of a batch."""
    texts: list[list[int]] = [[] for _ in range(num_rows)]
    for step in steps:
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            texts[row] += tokens
    return texts
