"""Texts of conversations, and the spans of the answers in them.

An answer is read and trained as it was when it was written: behind the prompt that asked for it, up to
its stop token. Most templates only append. Then a conversation is one text, in which all answers are
trained:

    <user> question 1 <assistant> [answer 1 <end>] <user> question 2 <assistant> [answer 2 <end>]

Others rewrite earlier turns: they leave out earlier reasoning, or end the last answer in another way.
Then the conversation is several texts, as in the regeneration (see `distill.regenerate.dialogues`):

    <user> question 1 <assistant> [<think> ... </think> answer 1 <end>]
    <user> question 1 <assistant> answer 1 <end> <user> question 2 <assistant> [<think> ... </think> answer 2 <end>]
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chat import (
    THINK,
    ChatTemplate,
    FailedTemplateError,
    Span,
    inline,
    reasoning_of,
    without_reasoning,
)
from .conversations import NO_ANSWER, Conversation, Turn

MAX_TURNS = 1000
"""Most turns of a conversation: a template renders the text before each answer again."""
MIN_SHARED_CHARS = 8
"""Fewest characters by which the end of a prompt is found in a text: more than the end of one mark."""
CHANGED = "the chat template changes the answers, so that they cannot be found in its text"
WITHOUT_CALLS = "the chat template leaves out calls of functions"
STOPPED = "an answer has a stop token of the target in its text"
SPLIT = "the chat template ends answers in their middle"
THINKING_IS_OFF = "reasoning of answers, which the prompt turns off: not used"
QUESTION, ANSWER, NEXT = "\ue000", "\ue001", "\ue002"
"""Placeholders of turns. Normal text contains no private-use characters."""


@dataclass(slots=True)
class Text:
    """A text, and its spans to train."""

    text: str
    spans: list[Span] = field(default_factory=list)


class AnswerFinder:
    """Writes conversations by a chat template, and finds the answers with their ends.

    `notes` counts what the template leaves out of the conversations.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> None:
        self.tokenizer, self.template = tokenizer, ChatTemplate(tokenizer)
        decoded = [tokenizer.decode([id], skip_special_tokens=False) for id in sorted(stop_ids) if id < len(tokenizer)]
        self.stops = [str(stop) for stop in decoded if stop]
        """Texts of the target's stop tokens."""
        self.notes: Counter[str] = Counter()
        self.has_ends = True
        """Whether the template writes a stop token behind all answers so far."""

    def texts(self, conversation: Conversation, train_on: str) -> list[Text] | str:
        """Return the texts of a conversation, or the reason to drop it.

        Turns after the last answer are left out.
        """
        if conversation.text is not None:
            return [self._rendered(conversation.text, train_on)]
        turns, tools = conversation.turns, conversation.tools
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if not answers:
            return NO_ANSWER
        if answers[-1] >= MAX_TURNS:
            return f"more than {MAX_TURNS} turns"
        words = [f"{turn.reasoning}{turn.content}{json.dumps(turn.tool_calls, ensure_ascii=False)}" for turn in turns]
        if any(stop in words[index] for index in answers for stop in self.stops):
            return STOPPED
        texts, end = list[Text](), 0
        last = max((index for index in answers if turns[index].trained), default=-1)
        for index in answers:
            try:
                found = self._answer(turns[: index + 1], tools)
            except FailedTemplateError as error:
                return f"rejected by the chat template ({error})"
            if isinstance(found, str):
                return found
            # A text goes on where the template has only appended to it.
            if not texts or not found.text.startswith(texts[-1].text[:end]):
                texts.append(Text(""))
            texts[-1].text, end = found.text, found.spans[-1][1]
            if turns[index].trained and (train_on != "last" or index == last):
                texts[-1].spans += found.spans
        self._note_missing(conversation, texts[-1].text)
        if train_on == "every token":
            # What a text shares with the one before is trained there.
            starts = [0, *(shared_length(before.text, text.text) for before, text in pairwise(texts))]
            return [Text(text.text, [(start, len(text.text))]) for start, text in zip(starts, texts, strict=True)]
        return [text for text in texts if text.spans]

    def _answer(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> Text | str:
        """Return the text of turns up to an answer, with the answer's spans; or the reason to drop it."""
        prompt, answer = self.template.prompt(turns[:-1], tools), turns[-1]
        reasoning, own = reasoning_of(answer)
        # 1. With thinking turned off, a prompt ends with a closed block of reasoning.
        is_closed = self.template.closes_reasoning(prompt)
        if is_closed and any(reasoning_of(turn)[0] is not None for turn in turns):
            self.notes[THINKING_IS_OFF] += bool(reasoning and reasoning.strip())
            turns, reasoning = [without_reasoning(turn) for turn in turns], None
            prompt, answer = self.template.prompt(turns[:-1], tools), turns[-1]
        text, marks = self.template.marked(turns, tools)
        # 2. Find the parts of the answer, from its end.
        shared = len(prompt) if text.startswith(prompt) else shared_length(prompt, text)
        places = self._places(text, shared, turns, tools, own)
        if isinstance(places, str):
            return places
        first, end = places
        shared, is_call = min(shared, first), bool(answer.tool_calls)
        lost = ""
        without = replace(answer, content="", reasoning=reasoning), replace(answer, content=own, reasoning=None)
        for part, rest in zip((own if is_call else "", reasoning or ""), without, strict=True):
            if not part.strip():
                continue
            place = text.rfind(part.strip(), shared, first)
            behind = self._behind_call(part.strip(), text, end, (*turns[:-1], rest), tools) if is_call else -1
            if behind >= 0:
                end = behind + len(part.strip())
            elif place >= 0:
                first = place
            else:
                lost = inline(reasoning, lost if is_call else own) if part is reasoning else own
        # 3. The answer begins behind its prompt, however the text writes the turns before it.
        start = self._behind_prompt(text, prompt, shared, first)
        before = prompt if start is not None or reasoning or is_closed else text[:shared]
        start = shared if start is None else start
        if any(stop in text[start:end] for stop in self.stops):
            return SPLIT
        # 4. What the template leaves out of each answer, the last one's too, stands before the rest.
        if lost:
            start = start if is_call else end
            before = prompt
            if prompt.rstrip().endswith(THINK):
                lost = lost.removeprefix(THINK).removeprefix("\n")
        text, shift = before + lost + text[start:], len(before) + len(lost) - start
        text, end = self._ended(text, end + shift, is_call=is_call)
        if not self.template.has_markers:
            return Text(text, [(len(before), end)])
        marks = [(max(len(before), mark + shift), min(last + shift, end)) for mark, last in marks if last > start]
        if marks and text[marks[-1][1] : end] in self.stops:
            marks[-1] = marks[-1][0], end
        return Text(text, [mark for mark in marks if mark[0] < mark[1]] or [(end, end)])

    def _behind_call(self, part: str, text: str, end: int, others: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> int:
        """Return the index of a part of an answer behind its calls and before a stop token; -1 if it isn't there.

        An argument may have the same words. Then the text is the same for `others`, turns without this part.
        """
        stop, has_stop = self._first_stop(text[end:])
        place = text.rfind(part, end, end + stop if has_stop else len(text))
        if place >= 0 and part in json.dumps(others[-1].tool_calls, ensure_ascii=False):
            return -1 if self.template.text(others, tools) == text else place
        return place

    def _places(
        self, text: str, start: int, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], own: str
    ) -> tuple[int, int] | str:
        """Return the indexes of the own words of an answer that ends a text: the first, and behind the last.

        They are its text, or the names of its calls. Returns the reason to drop the answer if it isn't there.
        """
        names = [call["function"]["name"] for call in turns[-1].tool_calls]
        if names:
            place = len(text)
            for name in reversed(names):
                place = text.rfind(name, start, place) if place > start else -1
            return (place, text.rfind(names[-1]) + len(names[-1])) if place >= 0 else WITHOUT_CALLS
        probed = (*turns[:-1], replace(turns[-1], content=ANSWER))
        for write in (lambda: self._answered, lambda: self.template.text(probed, tools)):
            behind = write().rpartition(ANSWER)[2]
            end = len(text) - len(behind)
            place = len(text[:end].rstrip()) - len(own.strip())
            if text.endswith(behind) and text.startswith(own.strip(), place):
                return place, end
        return CHANGED

    def _behind_prompt(self, text: str, prompt: str, shared: int, first: int) -> int | None:
        """Return the index in a text behind the end of its prompt; None if only its begin is there.

        A text that writes earlier turns in another way has the prompt's end behind them.
        """
        if shared == len(prompt):
            return shared
        length = len(prompt) - shared
        while length >= MIN_SHARED_CHARS:
            place = text.find(prompt[-length:], shared, first)
            if place >= 0:
                return place + length
            length //= 2
        return None

    def _ended(self, text: str, end: int, *, is_call: bool) -> tuple[str, int]:
        """Return the text, and the index after the first stop token behind an answer.

        Without one, the answer may end with the token that begins the next turn. Else it ends with what the
        template writes behind it.
        """
        if stop := self._first_stop(text[end:])[1]:
            return text, end + stop
        following = self._before_result if is_call else self._before_next
        place, stop = self._first_stop(following)
        if stop:
            text = text + following[len(following[:place].rstrip()) : stop] if is_call else text[:end] + following[:stop]
            return text, len(text)
        self.has_ends = False
        return text, end + len(text[end:].rstrip())

    def _first_stop(self, text: str) -> Span:
        """Return the span of the first stop token of a text; (0, 0) without one."""
        places = [(place, place + len(stop)) for stop in self.stops if (place := text.find(stop)) >= 0]
        return min(places, default=(0, 0))

    # --- what the template writes around answers

    @cached_property
    def _answered(self) -> str:
        """Text of a question and its answer."""
        return self._probe(Turn(role="assistant", content=ANSWER))

    @cached_property
    def _before_next(self) -> str:
        """What the template writes between an answer and the next question."""
        text = self._probe(Turn(role="assistant", content=ANSWER), Turn(role="user", content=NEXT))
        return text.rpartition(NEXT)[0].rpartition(ANSWER)[2]

    @cached_property
    def _before_result(self) -> str:
        """What the template writes between a call and its result."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": ANSWER}}}
        called = Turn(role="assistant", content="", tool_calls=(call,))
        text = self._probe(called, Turn(role="tool", content=NEXT, name="f", tool_call_id="call00000"))
        return text.rpartition(NEXT)[0].rpartition(ANSWER)[2]

    @cached_property
    def _header(self) -> str:
        """What the template writes before an answer, as far as it is the same with and without reasoning."""
        question, text = self._probe(), self._answered
        prompt = self._probe(is_prompt=True)
        between = text.rpartition(ANSWER)[0].rpartition(QUESTION)[2]
        if question and prompt.startswith(question):
            written = text[len(question) :].rpartition(ANSWER)[0]
            between = written[: shared_length(prompt[len(question) :], written)] or between
        return between

    def _probe(self, *answers: Turn, is_prompt: bool = False) -> str:
        """Return the text of a question and further turns; empty if the template rejects them."""
        turns = (Turn(role="user", content=QUESTION), *answers)
        with suppress(FailedTemplateError):
            return self.template.prompt(turns) if is_prompt else self.template.text(turns)
        return ""

    # --- texts that a template has written already

    def is_rendered(self, text: str) -> bool:
        """Return whether this chat template has written a text: it has the marks of both roles."""
        question = self._probe().partition(QUESTION)[0].strip()
        mark = (self._before_next[self._first_stop(self._before_next)[1] :] or question).strip() or question
        return bool(mark) and bool(self._header.strip()) and 0 <= text.find(mark) < text.find(self._header.strip())

    def _rendered(self, text: str, train_on: str) -> Text:
        """Return the spans of the answers in such a text."""
        spans = list[Span]()
        place = text.find(self._header)
        while place >= 0:
            start = place + len(self._header)
            end = start + (self._first_stop(text[start:])[1] or len(text) - start)
            spans.append((start, end))
            place = text.find(self._header, end)
        if train_on == "every token":
            spans = [(0, len(text))]
        return Text(text, spans[-1:] if train_on == "last" else spans)

    def _note_missing(self, conversation: Conversation, text: str) -> None:
        """Note what a template leaves out without an error."""
        missing = {
            f"{turn.role} turns that the chat template leaves out"
            for turn in conversation.turns
            if turn.role in ("system", "user") and turn.content.strip() not in text
        }
        if conversation.tools and str(conversation.tools[0].get("function", {}).get("name")) not in text:
            missing.add("'tools' that the chat template leaves out")
        self.notes.update(missing)


def shared_length(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin, without the begin of a mark such as <x>."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first.startswith(second[:middle]) else (low, middle - 1)
    mark = re.search(r"<[^\s<>]*$", first[:low])
    return mark.start() if mark else low
