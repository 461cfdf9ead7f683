"""An imaginary text and a drafter's guesses at it, as functions of all tokens before.

A guess is right with a dialled probability. All methods of a study decode the same text, and the
same guesses of it are right, so their speeds compare without noise of the text.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

VOCAB_SIZE = 64
MASK = (1 << 64) - 1
QUANTILES = 1024


def mixed(value: int) -> int:
    """Return 64 bits that look random: the finaliser of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class Language:
    """Texts of an imaginary target. A text is a number of 64 bits.

    A guess is right with the probability that comes with it. These probabilities have the mean
    `acceptance`; `spread` is 0 where they are all equal, and 1 where they are 0 or 1. `claimed` is
    the drafter's probability in place of the true one.
    """

    def __init__(self, seed: int, acceptance: float, *, spread: float = 0.0, claimed: float | None = None) -> None:
        assert 0 <= acceptance <= 1
        assert 0 <= spread < 1
        self.seed, self.acceptance, self.spread, self.claimed = seed, acceptance, spread, claimed

    def begin(self, ids: Iterable[int]) -> int:
        return self.after_all(mixed(self.seed), ids)

    def after(self, text: int, token: int) -> int:
        return mixed(text ^ (token + 1))

    def after_all(self, text: int, tokens: Iterable[int]) -> int:
        for token in tokens:
            text = self.after(text, token)
        return text

    def choice(self, text: int) -> int:
        """Return the target's next token."""
        return text % VOCAB_SIZE

    def bits(self, text: int) -> int:
        """Return the random bits of the guess after a text."""
        return mixed(text)

    def guess(self, text: int) -> tuple[int, float]:
        """Return the drafter's next token, and the probability that it is right."""
        bits = self.bits(text)
        prob = self._probs[bits % QUANTILES]
        is_right = (bits >> 32) / (1 << 32) < prob
        wrong = self.choice(text) ^ 1
        return self.choice(text) if is_right else wrong, prob if self.claimed is None else self.claimed

    @cached_property
    def _probs(self) -> list[float]:
        """Quantiles of a Beta distribution with mean `acceptance`."""
        if self.spread == 0 or not 0 < self.acceptance < 1:
            return [self.acceptance] * QUANTILES
        from scipy.stats import beta  # heavy, and few languages need it

        size = 1 / self.spread - 1  # the variance is spread * mean * (1 - mean)
        places = [(index + 0.5) / QUANTILES for index in range(QUANTILES)]
        return [float(prob) for prob in beta.ppf(places, self.acceptance * size, (1 - self.acceptance) * size)]


OFF = 1 << 63
"""Added to texts that have left the recorded one."""


class Recorded(Language):
    """The recorded answer of a real target to one prompt, and guesses at it.

    A text is the number of its tokens after the prompt, as long as it is that of the answer.
    """

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], seed: int, acceptance: float, **options: Any) -> None:
        super().__init__(seed, acceptance, **options)
        self.prompt, self.answer = list(prompt), list(answer)

    def begin(self, ids: Iterable[int]) -> int:
        assert list(ids) == self.prompt
        return 0

    def after(self, text: int, token: int) -> int:
        is_recorded = text < len(self.answer) and self.answer[text] == token
        return text + 1 if is_recorded else OFF | mixed(text ^ (token + 1))

    def choice(self, text: int) -> int:
        return self.answer[text] if text < len(self.answer) else text % VOCAB_SIZE

    def bits(self, text: int) -> int:
        return mixed(text ^ mixed(self.seed))
