"""Questions that a target wrote itself: which of them can be used. Imports no torch."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from .sources import OTHER_MARKS, WORD, word_runs

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
