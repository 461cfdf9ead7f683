"""Decontamination: training prompts that share consecutive words with evaluation prompts.

Source: arXiv 2005.14165, appendix C.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .suites import PromptSet
from .types import Conversation

SCRIPTS_WITHOUT_SPACES = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Thai and Lao, kana, Chinese characters, Hangul: each character counts as a word."""
WORD = re.compile(f"[{SCRIPTS_WITHOUT_SPACES}]|[^\\W{SCRIPTS_WITHOUT_SPACES}]+")

Words = tuple[str, ...]


class PromptOverlap:
    """Index of the evaluation prompts' words, to find overlaps with other prompts.

    Two texts overlap if they share `num_words` consecutive words, ignoring case and punctuation. A
    turn with fewer words overlaps only with a turn of exactly the same words.
    """

    def __init__(self, suites: Iterable[PromptSet], num_words: int) -> None:
        self.num_words = num_words
        self._suites: dict[Words, str] = {}
        self.suites: dict[str, str] = {}
        """Digest of the prompts, by suite."""
        for suite in suites:
            self.suites[suite.name] = suite.revision
            for prompt in suite.prompts:
                for turn in prompt.turns:
                    for words in self._pieces(turn):
                        self._suites.setdefault(words, suite.name)

    def suite_of(self, conversation: Conversation) -> str | None:
        """Return the suite that a prompt of the conversation overlaps with, or None."""
        for turn in conversation.turns:
            if turn.role != "assistant":
                for words in self._pieces(turn.content):
                    if words in self._suites:
                        return self._suites[words]
        return None

    def _pieces(self, text: str) -> Iterator[Words]:
        words = WORD.findall(text.lower())
        if words:
            for start in range(max(1, len(words) - self.num_words + 1)):
                yield tuple(words[start : start + self.num_words])


def without_overlap(conversations: Sequence[Conversation], overlap: PromptOverlap, dropped: Counter[str]) -> list[Conversation]:
    """Drop conversations that overlap with the evaluation; `dropped` counts them by suite."""
    kept = []
    for conversation in conversations:
        if suite := overlap.suite_of(conversation):
            dropped[f"prompt that {suite} asks too ({overlap.num_words} words in a row)"] += 1
        else:
            kept.append(conversation)
    return kept
