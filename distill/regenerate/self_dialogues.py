"""A conversation whose questions the target writes, too: where a question begins and ends, and its turns."""

import re
from collections.abc import Sequence
from typing import Any

from ...data.chat import ChatTemplate, FailedTemplateError
from ...data.config import SELF, DataSource
from ...data.conversations import Conversation, Turn
from ...data.loops import ends_in_a_loop
from ...data.questions import fault_of
from ...models.llm.hf_target import HFTarget
from .answers import AnswerSpan
from .dialogues import AFTER_CUT, EMPTY, LOOP, InTurns, answer_seed
from .engine import Answer, Limits, Request

QUESTION_TOKENS = 256
"""Most tokens of a question. One that is longer has lost its way, and is left out."""
QUESTION = "qZ7vX3k"
"""Stands in the place of a question when the template is tried."""
FIRST_WORD = re.compile(r"\W*\w+[^\w\s<\[]*")
"""First word, with marks before it: of `### Response: ` that is `### Response:`."""
UNENDED = f"question that doesn't end within {QUESTION_TOKENS} tokens"
LOOPED = "question that ends in a loop"
LATER = "behind a question or an answer that can't be used"


class Opening:
    """What the chat template writes before a user's question, and behind it."""

    def __init__(self, target: HFTarget) -> None:
        self.template, self._tokenizer = ChatTemplate(target.tokenizer), target.tokenizer
        try:
            first, behind = self._parts([])
        except FailedTemplateError as error:
            raise ValueError(
                f"data.source is {SELF}, and {self.template} fails for a question ({error}); set data.chat_template to "
                "another, or give data"
            ) from error
        if not first.strip() or not behind.strip():
            side = "before" if not first.strip() else "behind"
            raise ValueError(
                f"data.source is {SELF}, and {self.template} writes nothing {side} a user's question, so the target can't see "
                f"where it {'begins' if side == 'before' else 'ends'}; set data.chat_template to another, or give data"
            )
        added = {str(token) for token in target.tokenizer.added_tokens_decoder.values() if token.special}
        self._marks = sorted({*added, *target.tokenizer.all_special_tokens})
        behind = behind.strip()
        starts = [mark for mark in map(str, target.tokenizer.added_tokens_decoder.values()) if mark and behind.startswith(mark)]
        first_word = FIRST_WORD.match(behind)
        self.end = max(starts, key=len) if starts else first_word[0] if first_word else behind
        """What ends a question where the target writes on: the beginning of what stands behind it."""

    def require_prefix(self, prefix: str) -> None:
        """Raise ValueError for a beginning of questions with a mark that no question may have."""
        if mark := next((mark for mark in [self.end, *self._marks] if mark in prefix), None):
            raise ValueError(
                f"data.prefix is {prefix!r}, and {mark!r} is a special token or a mark of the chat template, which no question "
                "may have; leave it out of the prefix"
            )

    def _parts(self, turns: Sequence[Turn]) -> tuple[str, str]:
        text = self.template.prompt([*turns, Turn(role="user", content=QUESTION)])
        if (number := text.count(QUESTION)) != 1:
            raise FailedTemplateError(f"a question must stand in its text once, unchanged; it stands there {number} times")
        before, _, behind = text.partition(QUESTION)
        return before, behind

    def text(self, turns: Sequence[Turn], prefix: str) -> str:
        """Return the text up to a question that begins with `prefix`. Raises FailedTemplateError."""
        # A blank at the end would be a token of its own, which the target has rarely read there.
        return (self._parts(turns)[0] + prefix).rstrip(" ")

    def question(self, written: Sequence[int], prefix: str, *, cut: bool) -> tuple[str, str | None]:
        """Return a question of the tokens that the target wrote behind its prefix, and why it can't be used."""
        # Decoded with the prefix: some tokenizers leave out a blank at the beginning.
        begun = self._tokenizer(prefix.rstrip(" "), add_special_tokens=False).input_ids
        text: Any = self._tokenizer.decode([*begun, *written], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text, end, _ = text.partition(self.end)
        question = text.strip()
        if not end and ends_in_a_loop(written):
            return question, LOOPED
        if cut and not end:
            return question, UNENDED
        if any(mark in question for mark in self._marks):
            return question, "question with a special token"
        return question, fault_of(question, prefix)


class Writer(InTurns):
    """A conversation whose questions and answers the target writes in turn.

    Its one example holds the tokens of all turns, one span each; the prompts between them aren't kept.
    """

    def __init__(
        self, conversation: Conversation, target: HFTarget, opening: Opening, source: DataSource, limits: Limits, seed: int
    ) -> None:
        super().__init__(conversation.id, 2 * source.turns - 1, limits, seed)
        self._target, self._opening, self._prefix = target, opening, source.prefix

    def next_request(self) -> Request | None:
        if self.num_done == self.num_turns:
            return None
        try:
            if self.num_done % 2:
                text = self._opening.template.prompt(self._messages)
            else:
                text = self._opening.text(self._messages, self._prefix)
        except FailedTemplateError as error:
            self._end(f"rejected by the chat template ({error})", LATER)
            return None
        prompt = self._target.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        if self._limits.room(len(prompt)) < 1:
            self._end("no room for another turn", LATER)
            return None
        # An answer has the seed with which it is regenerated, so that the next question fits it.
        name = self.id if self.num_done % 2 else f"{self.id} asks"
        seed = answer_seed(self._seed, name, self.num_done // 2)
        return Request(id=f"{self.id}#{self.num_done}", prompt_ids=prompt, seed=seed)

    def take(self, answer: Answer) -> None:
        tokens = answer.tokens.tolist()
        written = tokens[:-1] if tokens and tokens[-1] in self._target.stop_ids else tokens
        fault: str | None
        if self.num_done % 2:
            decoded: Any = self._target.tokenizer.decode(written, clean_up_tokenization_spaces=False)
            text, looped = str(decoded), ends_in_a_loop(written)
            fault = EMPTY if not text.strip() else LOOP if looped else AFTER_CUT if answer.cut else None
        else:
            text, fault = self._opening.question(written, self._prefix, cut=answer.cut)
        if fault:
            self._end(fault, LATER)
            return
        self._spans.append(AnswerSpan(start=len(self._tokens), num_tokens=len(tokens), cut=answer.cut))
        self._tokens += tokens
        self._messages.append(Turn(role="assistant" if self.num_done % 2 else "user", content=text))
        self.num_done += 1
        if self.num_done == self.num_turns:
            self._close()
