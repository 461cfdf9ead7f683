"""Plain text and source code as conversations: the start of a piece, then its rest."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from .types import Conversation, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Sizes of the pieces in characters, rounded up to whole lines.

    The same seed and text id give the same cuts.
    """

    seed: int
    prompt_chars: tuple[int, int] = (200, 900)
    """Range that a prompt's length is sampled from."""
    answer_chars: int = 1500


def cut_text(text: str, cuts: Cuts, *, id: str, source: str, task: str) -> Iterator[Conversation]:
    """Cut a text at line ends into conversations of one question and one answer.

    A conversation's id is `id` and the number of its first line, counted from 1. A last piece too
    short for an answer is left out.
    """
    rng = Random(f"{cuts.seed}:{id}")
    # str.splitlines would also split at form feeds and other separators inside a line.
    lines = list(io.StringIO(text, newline="\n"))
    position = 0
    while position < len(lines):
        start = position
        prompt, position = _take_lines(lines, position, rng.randint(*cuts.prompt_chars))
        answer, position = _take_lines(lines, position, cuts.answer_chars)
        if prompt.strip() and answer.strip():
            turns = (Turn(role="user", content=f"{task}\n\n{prompt}"), Turn(role="assistant", content=answer))
            yield Conversation(id=f"{id}:{start + 1}", source=source, turns=turns)


def _take_lines(lines: list[str], position: int, num_chars: int) -> tuple[str, int]:
    start, num_taken = position, 0
    while position < len(lines) and num_taken < num_chars:
        num_taken += len(lines[position])
        position += 1
    return "".join(lines[start:position]), position
