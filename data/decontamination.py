"""Training prompts that the evaluation asks too, found by the words they share in a row (arXiv 2005.14165, appendix C)."""

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
    """What the prompts of the evaluation say, to be looked for in others.

    Two texts overlap where they share `num_words` words in a row, whatever their case and punctuation. A turn of fewer words is
    too short to be told by a part of it: it overlaps with its like only.
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
        """The suite that one of the conversation's prompts overlaps with, if any does."""
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
    """The conversations that the evaluation doesn't ask; the others are counted in `dropped`, by suite."""
    kept = []
    for conversation in conversations:
        if suite := overlap.suite_of(conversation):
            dropped[f"prompt that {suite} asks too ({overlap.num_words} words in a row)"] += 1
        else:
            kept.append(conversation)
    return kept
