"""A conversation that is answered turn by turn: its prompts, its examples, its early end.

An example's tokens are exactly those that the target read and wrote. The chat template renders the
next prompt with the answers so far. If the prompt begins with the example's tokens, the example
continues:

    example 0   <system> <user> question 1 <assistant> answer 1 <user> question 2 <assistant> answer

Otherwise the example ends there. This happens if a template drops earlier thinking, or if the
tokenizer merges tokens across the boundary. The prompt then begins the next example, in which the
earlier answers are read but not trained:

    example 0   <user> question 1 <assistant> <think> ... </think> answer 1
    example 1   <user> question 1 <assistant> answer 1
                <user> question 2 <assistant> <think> ... </think> answer 2
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...data.chat import ChatTemplate, FailedTemplateError
from ...data.conversations import Conversation, Turn
from ...data.loops import ends_in_a_loop
from .answers import AnsweredExample, AnswerSpan
from .engine import Answer, Limits, Request

NO_ROOM = "the prompt leaves no room for an answer"
EMPTY = "empty answer"
LOOP = "answer that ends in a loop"
AFTER_CUT = "after a cut answer"
AFTER_DROP = "after a dropped answer"
NOT_TRAINED = "answer that is read, not trained (weight 0)"
AFTER_CALL = "behind a function's result, which belongs to another answer's call"


class InTurns(ABC):
    """A conversation in progress, whose turns the target writes one after the other."""

    def __init__(self, id: str, num_turns: int, limits: Limits, seed: int) -> None:
        self.id, self.num_turns = id, num_turns
        self.num_done = 0
        """Number of written and dropped turns."""
        self.examples: list[AnsweredExample] = []
        self.dropped: Counter[str] = Counter()
        """Turns that weren't written, by reason."""
        self._limits, self._seed = limits, seed
        self._messages: list[Turn] = []
        self._tokens: list[int] = []  # of the unfinished example
        self._spans: list[AnswerSpan] = []

    @abstractmethod
    def next_request(self) -> Request | None:
        """Return the next request for the target; None if the conversation has ended."""

    @abstractmethod
    def take(self, answer: Answer) -> None:
        """Add the answer to the last request."""

    def _end(self, reason: str, later: str | None = None) -> None:
        """Drop this turn for `reason`, and all later turns for `later` (by default the same)."""
        self.dropped[reason] += 1
        if rest := self.num_turns - self.num_done - 1:
            self.dropped[later or reason] += rest
        self.num_done = self.num_turns
        self._close()

    def _close(self) -> None:
        """End the unfinished example. All ids have a number, so that no two ids are equal."""
        if self._spans:
            id = f"{self.id}#{len(self.examples)}"
            self.examples.append(AnsweredExample(id=id, input_ids=self._tokens, answers=self._spans))
        self._tokens, self._spans = [], []


class Dialogue(InTurns):
    """A conversation whose questions are known."""

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: ChatTemplate,
        limits: Limits,
        stop_ids: Collection[int],
        seed: int,
    ) -> None:
        self._questions, self._tools = questions(conversation.turns), conversation.tools
        super().__init__(conversation.id, len(self._questions), limits, seed)
        self._recorded = [turn for turn in conversation.turns if turn.role == "assistant"]
        self._tokenizer, self._template, self._stop_ids = tokenizer, template, frozenset(stop_ids)
        self._prompt: list[int] = []

    def next_request(self) -> Request | None:
        if self.num_done == self.num_turns:
            self._close()
            return None
        question = self._questions[self.num_done]
        if any(turn.role == "tool" for turn in question):
            self._end(AFTER_CALL)
            return None
        self._messages += question
        try:
            text = self._template.prompt(self._messages, self._tools)
        except FailedTemplateError as error:
            self._end(f"rejected by the chat template ({error})")
            return None
        prompt = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        if self._limits.room(len(prompt)) < 1:
            self._end(NO_ROOM)
            return None
        self._prompt = prompt.tolist()
        known_answer = self._recorded[self.num_done].content if self.num_done < len(self._recorded) else None
        return Request(
            id=f"{self.id}#{self.num_done}",
            prompt_ids=prompt,
            seed=answer_seed(self._seed, self.id, self.num_done),
            num_known_tokens=None
            if known_answer is None
            else len(self._tokenizer(known_answer, add_special_tokens=False).input_ids),
        )

    def take(self, answer: Answer) -> None:
        """Add the answer to the last request. A cut answer is the last one of the conversation.

        Later turns would refer to an incomplete answer.
        """
        # 1. Cut the answer at the room, and drop it if it is empty or ends in a loop.
        room = self._limits.room(len(self._prompt))
        tokens = answer.tokens.tolist()
        cut = answer.cut or len(tokens) > room
        tokens = tokens[:room]
        answer_tokens = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        text: Any = self._tokenizer.decode(answer_tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if reason := EMPTY if not text.strip() else LOOP if ends_in_a_loop(answer_tokens) else None:
            self._end(reason, AFTER_DROP)
            return
        # 2. Continue the example, or begin the next one.
        if self._prompt[: len(self._tokens)] != self._tokens:
            self._close()
        if self.num_done < len(self._recorded) and not self._recorded[self.num_done].trained:
            self.dropped[NOT_TRAINED] += 1
        else:
            self._spans.append(AnswerSpan(start=len(self._prompt), num_tokens=len(tokens), cut=cut))
        self._tokens = self._prompt + tokens
        self._messages.append(Turn(role="assistant", content=text))
        self.num_done += 1
        if cut and self.num_done < self.num_turns:
            self._end(AFTER_CUT)


def questions(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns before each answer. An unanswered question at the end counts, too."""
    groups: list[list[Turn]] = [[]]
    for turn in turns:
        if turn.role == "assistant":
            groups.append([])
        else:
            groups[-1].append(turn)
    return groups if groups[-1] and groups[-1][-1].role in ("user", "tool") else groups[:-1]


def answer_seed(seed: int, conversation_id: str, turn: int) -> int:
    """Return the seed of one answer.

    It doesn't depend on the order of work or on other answers. It has 31 bits, which all servers
    accept.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}/{conversation_id}".encode()).digest()[:4], "big") >> 1
