"""A suite of prompts that is drawn from conversations, such as one's own traffic, for evaluations.

A run that evaluates a suite keeps its prompts out of the training (see `PromptOverlap`), so this is the part that is held back.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

from .conversations import Conversation
from .questions import near_duplicates
from .suites import asked_in
from .traffic import kind_of_request


def draw_suite(conversations: Sequence[Conversation], count: int, *, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a suite of `count` prompts, or of fewer if there are fewer, and the number of repeated ones.

    A prompt has the system message, the tools and the user's turns. Of those that nearly repeat each other one is kept.
    """
    shuffled = list(_prompts(conversations))
    Random(seed).shuffle(shuffled)
    records, num_repeated = list[dict[str, Any]](), 0
    while shuffled and len(records) < count:
        some, shuffled = shuffled[: 4 * count], shuffled[4 * count :]
        earlier = [_asked(record) for record in records]
        repeated = near_duplicates([_asked(record) for record in some], earlier)
        num_repeated += sum(repeated)
        records += [record for record, is_repeated in zip(some, repeated, strict=True) if not is_repeated]
    return [{"id": number, **record} for number, record in enumerate(records[:count])], num_repeated


def _asked(record: dict[str, Any]) -> str:
    return "\n".join(record["turns"])


def _prompts(conversations: Iterable[Conversation]) -> Iterator[dict[str, Any]]:
    """Yield the prompts of conversations in which user and assistant take turns."""
    for conversation in conversations:
        system, asked = asked_in(conversation) or (None, [])
        if asked and all(text.strip() for text in asked):
            yield {
                "category": kind_of_request(bool(conversation.tools), asked[-1]),
                **({"system": system} if system else {}),
                **({"tools": list(conversation.tools)} if conversation.tools else {}),
                "turns": asked,
            }
