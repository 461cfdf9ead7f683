"""An index of the n-grams of a text."""

from array import array
from collections.abc import Sequence

SEPARATOR = -1
"""Stands between texts in an index of several texts."""
NOWHERE = -1
TOKEN_BITS = 24
"""More than any vocabulary has."""


class NgramIndex:
    """The positions of every n-gram of a text, for n from 1 to `max_ngram`.

    An n-gram's position is that of its last token. The latest of each n-gram is in a dict;
    `earlier[n - 1][p]` is the position before p of the n-gram that ends at p, or NOWHERE. So a
    token costs one look-up for each n, however long the text is.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.text: list[int] = []
        self.latest: dict[int, int] = {}
        self.earlier = [array("i") for _ in range(max_ngram)]

    def add(self, entry: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, latest = self.text, self.latest
        for token in entry:
            text.append(token)
            for n, key in enumerate(ngram_keys(text, self.max_ngram)):
                self.earlier[n].append(latest.get(key, NOWHERE))
                latest[key] = len(text) - 1
            for n in range(len(text), self.max_ngram):
                self.earlier[n].append(NOWHERE)


def ngram_keys(text: Sequence[int], max_ngram: int) -> list[int]:
    """Return a number for each n-gram at the end of the text, n from 1 to `max_ngram`.

    Different n-grams, also of different n, have different numbers: the tokens are the digits,
    the last token first.
    """
    keys, key = [], 0
    for token in text[: -max_ngram - 1 : -1]:
        key = key << TOKEN_BITS | token + 2  # no digit is 0, not even the separator's
        keys.append(key)
    return keys


def continuation(text: Sequence[int], position: int, tokens: Sequence[int], length: int) -> list[int]:
    """Return `length` tokens after `position`, where the last of some tokens occurred before.

    The tokens follow the text. After them the text is taken to repeat what followed `position`:

        a b c d e b + c | d e b c d e ...    b c occurred before, with c at position 2
    """
    period = [*text[position + 1 : position + 1 + length], *tokens]
    return (period * (length // len(period) + 1))[:length]
