"""Stop rules: an answer ends where plain decoding ends it, even inside an accepted path."""

from collections.abc import Collection, Sequence
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

BYTES_PER_CHAR = 4
"""Most bytes of a character in UTF-8; a token of a byte-level vocabulary may be one byte."""


class Finish(StrEnum):
    """Why an answer ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"


class Stopping:
    """The stop rules of a batch, and the answers so far.

    A stop token is emitted and ends the answer. A stop string ends the answer with the token whose
    text completes the string; it needs the tokenizer. `max_new_tokens` (one limit, or one per
    prompt) and the context window bound the answer's length in tokens.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        max_new_tokens: int | Sequence[int],
        context_length: int,
        stop_ids: Collection[int] = (),
        stop_strings: Collection[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        # 1. Check the rules.
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompt_lengths)
        if len(max_new_tokens) != len(prompt_lengths):
            raise ValueError(
                f"{len(max_new_tokens)} limits of new tokens for {len(prompt_lengths)} prompts; give one per prompt"
            )
        if min(max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens is {min(max_new_tokens)}; it must be at least 1")
        if stop_strings and tokenizer is None:
            raise ValueError("stop_strings are matched in the decoded text; give the tokenizer too")
        if isinstance(stop_strings, str):
            raise ValueError(f"stop_strings is {stop_strings!r}; give a list of texts: [{stop_strings!r}]")
        if "" in stop_strings:
            raise ValueError("one of the stop_strings is empty, and would end every answer; leave it out")
        # 2. Store them, with the room of each answer.
        self.answers: list[list[int]] = [[] for _ in prompt_lengths]
        self._room = [min(limit, context_length - length) for limit, length in zip(max_new_tokens, prompt_lengths, strict=True)]
        self.max_new_tokens = tuple(max_new_tokens)
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        # Decode only the last tokens: a string that ends with the newest token lies in the last
        # `_tail` tokens. The constant is for special tokens, which have no text.
        self._tail = BYTES_PER_CHAR * max(map(len, stop_strings), default=0) + 8

    def add(self, row: int, tokens: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
        """Append a row's new tokens up to the answer's end. Return them, and why the answer ended.

        The reason is None if the answer continues.
        """
        answer = self.answers[row]
        for index, token in enumerate(tokens):
            answer.append(token)
            if finish := self._finish(row, token):
                return tuple(tokens[: index + 1]), finish
        return tuple(tokens), None

    def left(self, row: int) -> int:
        """Return the most tokens by which a row's answer can still grow."""
        return self._room[row] - len(self.answers[row])

    def _finish(self, row: int, token: int) -> Finish | None:
        if token in self._stop_ids:
            return Finish.STOP_TOKEN
        if self._stop_strings and self._completes_a_string(self.answers[row]):
            return Finish.STOP_STRING
        if len(self.answers[row]) >= self._room[row]:
            return Finish.LENGTH if self._room[row] == self.max_new_tokens[row] else Finish.CONTEXT
        return None

    def _completes_a_string(self, answer: list[int]) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(answer[-self._tail :])
        return any(string in text for string in self._stop_strings)
