"""Questions: which of those that a target wrote can be used, and a suite of those in conversations. Imports no torch."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

from .conversations import Conversation
from .sources import OTHER_MARKS, WORD, word_runs
from .suites import asked_in
from .traffic import kind_of_request

MIN_WORDS = 3
"""Fewest words of a question."""
REPEATING_FROM, LEAST_DISTINCT = 24, 0.35
"""A question of so many words may not repeat them so often that fewer than this share are different."""
LEAST_IN_ONE_SCRIPT = 0.7
"""Share of the letters that must belong to one script."""
RUN_WORDS, LARGEST_SHARED, MOST_PLACES = 3, 0.7, 256
"""A near-duplicate shares more than this part of its runs of three words with one earlier question. Of
a run that very many questions have, such as `can you explain`, the first ones are compared."""
NO_TEXT = ("Cc", "Co", "Cn")
"""Unicode categories of control characters, and of characters that mean nothing."""
EAST_ASIAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "KATAKANA-HIRAGANA", "BOPOMOFO"})
"""Scripts that one text mixes."""


def fault_of(question: str, prefix: str = "") -> str | None:
    """Return why a question can't be used; None if it can. With a `prefix` it must be in its script."""
    words = WORD.findall(question.lower())
    if len(words) < MIN_WORDS:
        return f"question of fewer than {MIN_WORDS} words"
    if OTHER_MARKS.search(question):
        return "question with a chat template's mark"
    if "\ufffd" in question or any(unicodedata.category(char) in NO_TEXT for char in question if char not in "\n\t"):
        return "question with characters that are no text"
    if len(words) >= REPEATING_FROM and len(set(words)) < LEAST_DISTINCT * len(words):
        return "question that repeats itself"
    scripts, wanted = scripts_of(question), scripts_of(prefix)
    script, most = max(scripts.items(), key=lambda item: item[1], default=("", 0))
    if most < LEAST_IN_ONE_SCRIPT * scripts.total():
        return "question in several scripts"
    if wanted and script != max(wanted, key=lambda name: wanted[name]):
        return "question in another script than its prefix"
    return None


def near_duplicates(questions: Sequence[str], earlier: Sequence[str] = ()) -> list[bool]:
    """Return for each question whether it nearly repeats one before it that isn't such itself.

    The `earlier` ones, which repeat nothing, come before all.
    """
    places: dict[tuple[str, ...], list[int]] = {}
    repeated = list[bool]()
    for number, question in enumerate([*earlier, *questions]):
        runs = {*word_runs(question, RUN_WORDS)}
        shared = Counter(place for run in runs for place in places.get(run, ()))
        repeated.append(bool(shared) and shared.most_common(1)[0][1] > LARGEST_SHARED * len(runs))
        for run in () if repeated[-1] else runs:
            if len(known := places.setdefault(run, [])) < MOST_PLACES:
                known.append(number)
    return repeated[len(earlier) :]


def scripts_of(text: str) -> Counter[str]:
    """Count letters by script, which is the first word of their Unicode names."""
    names = (unicodedata.name(char, "").partition(" ")[0] for char in text if char.isalpha())
    return Counter("EAST ASIAN" if name in EAST_ASIAN else name for name in names)


def draw_suite(conversations: Sequence[Conversation], count: int, *, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a suite of `count` prompts, or of fewer if there are fewer, and the number of repeated ones.

    A prompt has the system message, the tools and the user's turns. Of those that nearly repeat each other one is kept.
    A run that evaluates a suite keeps its prompts out of the training (see `PromptOverlap`), so this is the part of the
    conversations, such as one's own traffic, that is held back.
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
