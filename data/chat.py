"""Chat templates: the target's own or a chosen one, with options, rendered within bounds."""

import json
import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .conversations import Turn
from .files import sha256_json
from .paths import built_in_templates
from .template_options import DATE, read_template, with_options

logger = logging.getLogger(__name__)

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which chat templates look for the reasoning of a message."""
PROBED_ID = "call00000"
PROBED_CALLS = [{"type": "function", "id": PROBED_ID, "function": {"name": "CALLED", "arguments": {"x": "ARGUMENT"}}}]
THINK, THOUGHT = "<think>", "</think>"
"""Begin and end of reasoning, as models of many families write it."""

MAX_SECONDS, MAX_CHARS, MAX_BYTES = 8.0, 10_000_000, 1 << 30
"""Bounds of rendering: processor time, characters besides those of the messages, and memory."""
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    RecursionError,
)
"""Errors of a template, which is a program with expressions of Python."""
_RENDERING = threading.RLock()
"""Held while a template is rendered: the limit of the process's memory is saved, lowered and restored."""

Span = tuple[int, int]
"""Index of the first character of a piece of text, and of the character after its last."""


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short digest of the chat template with its options."""
    return sha256_json(tokenizer.chat_template)[:16]


def use_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, options: Mapping[str, Any] | None = None
) -> None:
    """Set the chat template, and its options.

    The template is a .jinja file, or the name of a built-in one; None keeps the tokenizer's. The options
    are written into its text. So every prompt of the tokenizer has them, and every digest of the
    template covers them. Raises ValueError for a template that doesn't exist, or that doesn't read an
    option.
    """
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    if options:
        own = require_template(tokenizer) if tokenizer.chat_template is None else tokenizer.chat_template
        named = with_options(own if isinstance(own, dict) else {"": own}, options)
        tokenizer.chat_template = named if isinstance(own, dict) else named[""]
    if DATE in str(tokenizer.chat_template) and not any("date" in name or name == DATE for name in options or ()):
        logger.warning(
            "the chat template may write today's date, so prompts of another day differ: data.template_options={%s: "
            '"26 Jul 2026"} fixes it',
            DATE,
        )


def encode_prompt(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> Int[torch.Tensor, "1 seq"]:
    """Return the ids of a conversation and the start of the assistant's next turn.

    Raises ValueError if the chat template rejects it, fails for it or exceeds the bounds of rendering, or as
    `require_template` does.
    """
    template = ChatTemplate(tokenizer)
    try:
        text = template.prompt(turns, tools)
    except FailedTemplateError as error:
        raise ValueError(
            f"{template} fails for a prompt of {len(turns)} turns ({error}); correct it, or set "
            "data.chat_template (--chat-template) to another"
        ) from error
    input_ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return input_ids


def require_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's chat template.

    Raises ValueError if it has none, or if the tokenizer can't locate tokens in the text.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; set data.chat_template (--chat-template) to a "
            f".jinja file, or to one that ships with outrider ({', '.join(built_in_templates())})"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} doesn't report which characters a token covers; use its fast version "
            "(a directory with tokenizer.json)"
        )
    return tokenizer.get_chat_template()


class FailedTemplateError(ValueError):
    """An error of a chat template, its rejection of a conversation, or a text that can't be used."""


class UnboundedTemplateError(ValueError):
    """A chat template that takes too much time, memory or text."""


class _OutOfTimeError(BaseException):
    """Interrupts a template. jinja ignores each Exception of an expression of constants."""


@contextmanager
def _bounded(num_turns: int, name: str) -> Iterator[None]:
    """Raise UnboundedTemplateError after MAX_SECONDS, or where the block allocates MAX_BYTES.

    Chat templates come with models of strangers. transformers' sandbox keeps them from files and
    attributes, but their loops, macros and operators have no bound. The memory that the whole
    process may have is lowered for the moment, so one thread at a time renders: a second one would
    take the lowered limit for the process's own, and restore it. Only the main thread of a process
    has signals: elsewhere the time has no bound.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise _OutOfTimeError

    try:
        with _RENDERING, ExitStack() as stack:
            with suppress(ImportError, OSError):  # Windows has no such module, and only Linux has the file
                import resource

                soft, hard = resource.getrlimit(resource.RLIMIT_AS)
                allowed = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_BYTES
                if soft == resource.RLIM_INFINITY or soft > allowed:
                    stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
                    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
            if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
                stack.callback(signal.signal, signal.SIGVTALRM, signal.signal(signal.SIGVTALRM, interrupt))
                stack.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
                signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
            yield
    except _OutOfTimeError:
        raise _unbounded(f"{MAX_SECONDS:g} seconds", num_turns, name) from None
    except MemoryError:
        raise _unbounded(f"{MAX_BYTES} bytes of memory", num_turns, name) from None


def _unbounded(bound: str, num_turns: int, name: str) -> UnboundedTemplateError:
    return UnboundedTemplateError(
        f"{name} takes more than {bound} for a conversation of {num_turns} turns; correct it, or set data.chat_template to "
        "another"
    )


def _described(error: Exception) -> str:
    """Describe an error of a template: its own words, or those of Python with the error's type."""
    try:
        text = f"{error!s:.200}"
    except RecursionError:  # of a value that a template nested deeply
        return type(error).__name__
    return text if isinstance(error, TemplateError) else f"{type(error).__name__}: {text}"


class ChatTemplate:
    """A tokenizer's chat template, which writes conversations as the template reads them.

    Templates differ in where they look for reasoning and calls. Raises ValueError as
    `require_template` does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.source = require_template(tokenizer)
        self._with_tools = tokenizer.get_chat_template(tools=[{}])
        """Some tokenizers have another template for conversations with functions."""
        self.has_markers = GENERATION_MARKER.search(self.source) is not None
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._name = str(tokenizer.name_or_path)

    def __str__(self) -> str:
        return f"the chat template of {self._name!r}, which begins {self.source[:60]!r},"

    def prompt(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of turns and the start of the assistant's next turn."""
        return self._render(turns, tools, add_generation_prompt=True)[0]

    def text(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of turns."""
        return self._render(turns, tools)[0]

    def marked(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[Span]]:
        """Return the text of turns, and the spans between its generation markers."""
        return self._render(turns, tools, return_assistant_tokens_mask=True) if self.has_markers else self._render(turns, tools)

    def _render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], **options: bool) -> tuple[str, list[Span]]:
        messages = [self._message(turn) for turn in turns]
        if any(turn.tool_calls for turn in turns) and self._names_functions_in_ids:
            _name_functions_in_ids(messages)
        return self._render_messages(messages, tools, **options)

    def _render_messages(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: bool
    ) -> tuple[str, list[Span]]:
        render: Any = render_jinja_template  # its annotations are wrong
        options |= {"tools": list(tools)} if tools else {}  # type: ignore[dict-item]
        with _bounded(len(messages), str(self)):
            source = self._with_tools if tools else self.source
            try:
                (text,), spans = render([messages], chat_template=source, **self._special_tokens, **options)
            except TEMPLATE_ERRORS as error:
                raise FailedTemplateError(_described(error)) from error
            if len(text) > MAX_CHARS + sum(len(message["content"] or "") for message in messages):
                raise _unbounded(f"{MAX_CHARS} characters", len(messages), str(self))
        return text, spans[0] if spans else []

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return a turn as the template reads it."""
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        message |= {key: value for key in ("name", "tool_call_id") if (value := getattr(turn, key)) is not None}
        reasoning, answer = reasoning_of(turn)
        if reasoning is not None:
            message["content"] = answer
            if self._reads_reasoning:
                message |= dict.fromkeys(REASONING_FIELDS, reasoning)
            elif self._writes_inline_reasoning:
                message["content"] = turn.content if turn.reasoning is None else inline(reasoning, answer)
        if turn.tool_calls:
            message |= _calls_in(self._form_of_calls, turn.tool_calls, message["content"])
        return message

    @cached_property
    def _writes_inline_reasoning(self) -> bool:
        """Whether the template writes reasoning that is in the text of the last answer."""
        return "REASONING" in self._try([{"role": "assistant", "content": inline("REASONING", "ANSWER")}])

    def closes_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt ends with a closed block of reasoning: thinking is turned off."""
        return prompt.rstrip().endswith((THOUGHT, self._closing))

    @cached_property
    def _closing(self) -> str:
        """The mark that the template writes behind the reasoning of a message's field, maybe beside calls only."""
        answer = {"role": "assistant", "content": "ANSWER", **dict.fromkeys(REASONING_FIELDS, "REASONING")}
        texts = (self._try([{**answer, **calls}]) for calls in ({}, _calls_in(self._form_of_calls, PROBED_CALLS, "ANSWER")))
        marks = (re.search(r"REASONING\s*([^>\]]*[>\]])", text) for text in texts)
        return next((mark[1] for mark in marks if mark), THOUGHT)

    @cached_property
    def _reads_reasoning(self) -> bool:
        """Whether the template writes the reasoning of a message's field."""
        fields = dict.fromkeys(REASONING_FIELDS, "REASONING")
        return "REASONING" in self._try([{"role": "assistant", "content": "ANSWER", **fields}])

    @cached_property
    def _form_of_calls(self) -> tuple[bool, bool]:
        """Whether calls have arguments as JSON in a text, and no content instead of an empty one."""
        for form in ((False, False), (False, True), (True, False), (True, True)):
            text = self._try([{"role": "assistant", **_calls_in(form, PROBED_CALLS, "")}])
            if "ARGUMENT" in text and ("CALLED" in text or PROBED_ID in text):
                return form
        return False, False

    @cached_property
    def _names_functions_in_ids(self) -> bool:
        """Whether the template writes a call's id and not its function's name, which the id has then (Kimi K2)."""
        text = self._try([{"role": "assistant", **_calls_in(self._form_of_calls, PROBED_CALLS, "")}])
        return "CALLED" not in text and PROBED_ID in text

    def _try(self, answer: list[dict[str, Any]]) -> str:
        """Return the text of a question and an answer; empty if the template rejects them."""
        with suppress(FailedTemplateError):
            return self._render_messages([{"role": "user", "content": "QUESTION"}, *answer])[0]
        return ""


def _name_functions_in_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Give all calls ids such as functions.NAME:0, counted over the conversation, and each result that of its call.

    A result belongs to the first call without a result that has its id, else its name, else any.
    """
    waiting, number = list[tuple[str, str, str]](), 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            name, given = call["function"]["name"], call["id"]
            call["id"] = f"functions.{name}:{number}"
            waiting, number = [*waiting, (given, name, call["id"])], number + 1
        if message["role"] == "tool" and waiting:
            own = message.get("tool_call_id"), message.get("name")
            found = min(waiting, key=lambda one: (one[0] != own[0], one[1] != own[1]))
            waiting.remove(found)
            message["tool_call_id"] = found[2]


def reasoning_of(turn: Turn) -> tuple[str | None, str]:
    """Return an answer's reasoning and the rest of it.

    The reasoning is in a field of its own, or stands before `</think>` at the answer's begin. Where the
    prompt ends with `<think>`, answers lack it.
    """
    if turn.role != "assistant":
        return turn.reasoning, turn.content
    before, mark, after = turn.content.partition(THOUGHT)
    if mark and (before.lstrip().startswith(THINK) or THINK not in before):
        inside = before.strip().removeprefix(THINK).strip("\n")
        if turn.reasoning is None or inside.strip() == turn.reasoning.strip():  # some exports have it twice
            return inside if turn.reasoning is None else turn.reasoning, after.lstrip("\n")
    return turn.reasoning, turn.content


def without_reasoning(turn: Turn) -> Turn:
    """Return a turn without the reasoning of its field or its text."""
    return replace(turn, reasoning=None, content=reasoning_of(turn)[1])


def inline(reasoning: str | None, answer: str) -> str:
    """Return an answer that has its reasoning in the text."""
    return answer if reasoning is None else f"{THINK}\n{reasoning}\n{THOUGHT}\n\n{answer}"


def _calls_in(form: tuple[bool, bool], calls: Sequence[Mapping[str, Any]], content: str) -> dict[str, Any]:
    """Return the calls of a message, and its content, in a form that a template reads."""
    as_text, without_content = form
    if as_text:
        calls = [
            {
                **call,
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)},
            }
            for call in calls
        ]
    return {"tool_calls": [dict(call) for call in calls], "content": content or (None if without_content else "")}
