"""Plain text and source code as conversations: a task with the beginning of a piece, and the text that follows it."""

import io
from collections.abc import Iterator
from random import Random

from .types import Conversation, Turn

PROMPT_CHARS = (200, 900)
ANSWER_CHARS = 1500


def cut_text(
    text: str, *, id: str, source: str, task: str, seed: int, prompt_chars: tuple[int, int], answer_chars: int
) -> Iterator[Conversation]:
    """Cut a text at line ends, from its start to its end, into conversations of one question and one answer.

    `prompt_chars` is the range that a prompt's length is drawn from, `answer_chars` the length of an answer, both in
    characters and rounded up to whole lines. A conversation's id is `id` and the number of its first line, counted from 1. The
    same seed and id give the same cuts. A last piece too short for an answer is left out.
    """
    rng = Random(f"{seed}:{id}")
    # str.splitlines would also cut at form feeds and other separators inside a line.
    lines = list(io.StringIO(text, newline="\n"))
    position = 0
    while position < len(lines):
        start = position
        prompt, position = _take_lines(lines, position, rng.randint(*prompt_chars))
        answer, position = _take_lines(lines, position, answer_chars)
        if prompt.strip() and answer.strip():
            turns = (Turn(role="user", content=f"{task}\n\n{prompt}"), Turn(role="assistant", content=answer))
            yield Conversation(id=f"{id}:{start + 1}", source=source, turns=turns)


def _take_lines(lines: list[str], position: int, num_chars: int) -> tuple[str, int]:
    start, taken = position, 0
    while position < len(lines) and taken < num_chars:
        taken += len(lines[position])
        position += 1
    return "".join(lines[start:position]), position
