"""Chat templates: conversations as token ids, with a mask of the assistant's tokens.

All spans are computed on characters of the rendered text. The text is then tokenized once, as a
whole. A token belongs to the assistant if it covers a character of an answer. (transformers' mask
fails for an answer whose first character no token covers, such as a space under a tokenizer that
trims its offsets.)
"""

import logging
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .paths import TEMPLATES, built_in_templates
from .types import Conversation, Example, Turn

logger = logging.getLogger(__name__)

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
LARGE_LOSS = 0.1
"""Share of tokens lost to `max_length` above which drafters hardly see the ends of answers."""
BATCH_SIZE = 256
"""Conversations per call of the tokenizer."""
MAX_TURNS = 1000
"""Most turns of a conversation: a template renders the text before each answer again."""

MAX_SECONDS, MAX_CHARS, MAX_BYTES = 8.0, 10_000_000, 1 << 30
"""Bounds of rendering one conversation: processor time, characters besides those of its messages, and
memory."""
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    RecursionError,
)
"""Errors of a template, which is a program with expressions of Python."""
_RENDERING = threading.RLock()
"""Held while a template is rendered: the limit of the process's memory is saved, lowered and restored."""

Span = tuple[int, int]
"""Index of the first character of a piece of text, and of the character after its last."""


def use_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Set the chat template: a .jinja file, or the name of a built-in one; None keeps it."""
    if chat_template is None:
        return
    is_built_in = chat_template in built_in_templates()
    path = TEMPLATES / f"{chat_template}.jinja" if is_built_in else Path(chat_template)
    if not path.is_file():
        raise ValueError(
            f"data.chat_template is {chat_template!r}; give the path of a .jinja file, or one of "
            f"{', '.join(built_in_templates())}"
        )
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.chat_template is {chat_template!r}, which is not UTF-8 text ({error}); convert it") from error


class RejectedPromptError(ValueError):
    """A prompt for which the chat template raises an error of its own, `reason`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_prompt(messages: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Int[torch.Tensor, "1 seq"]:
    """Return the ids of a conversation and the start of the assistant's next turn.

    Raises RejectedPromptError if the chat template rejects it. Raises ValueError if the template fails
    for it or exceeds the bounds of rendering, or as `require_template` does.
    """
    template = require_template(tokenizer)
    try:
        with _bounded(len(messages), tokenizer):
            text, _ = _render([asdict(turn) for turn in messages], tokenizer, add_generation_prompt=True)
    except UnboundedTemplateError:
        raise
    except TEMPLATE_ERRORS as error:
        message = (
            f"{_described(template, tokenizer)} fails for a prompt of {len(messages)} turns ({_reason(error)}); correct it, or "
            "set data.chat_template to another"
        )
        raise (RejectedPromptError(message, str(error)) if isinstance(error, TemplateError) else ValueError(message)) from error
    input_ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return input_ids


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Example], Counter[str]]:
    """Encode conversations with a mask of the assistant's tokens.

    Also counts dropped conversations by reason. The mask includes end tokens. Turns after the last
    answer are left out; tokens after `max_length` are cut. Raises ValueError if the tokenizer lacks
    a requirement, if its template exceeds the bounds of rendering, or if no example is left: a mask
    of zeros would train on nothing.
    """
    # 1. Render and tokenize the conversations, in batches.
    template = require_template(tokenizer)
    examples: list[Example] = []
    dropped: Counter[str] = Counter()
    lost: list[int] = []  # tokens that each example loses
    for start in range(0, len(conversations), BATCH_SIZE):
        rendered: list[tuple[str, str, list[Span]]] = []
        for conversation in conversations[start : start + BATCH_SIZE]:
            messages = _until_last_answer(conversation.turns)
            result = _render_answers(messages, tokenizer, template)
            if isinstance(result, str):
                dropped[result] += 1
            else:
                rendered.append((conversation.id, *result))
        examples += _tokenize(rendered, tokenizer, max_length, dropped, lost)
    # 2. Check that there are examples, and report cuts.
    if not examples:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common())
        num_cut = dropped[_no_token_within(max_length)]
        if num_cut > len(conversations) / 2:
            raise ValueError(
                f"data.max_length is {max_length}, and {num_cut} of {len(conversations)} conversations have no token of the "
                f"assistant before it, so no example is left; raise data.max_length. Dropped: {reasons}"
            )
        raise ValueError(
            f"none of {len(conversations)} conversations has a token of the assistant under the chat template of "
            f"{tokenizer.name_or_path!r}, which begins {template[:60]!r}; dropped: {reasons}. Check the template, above all "
            "the text between its generation markers, or set data.chat_template to another"
        )
    _log_cuts(lost, sum(len(example.input_ids) for example in examples), max_length)
    return examples, dropped


def _no_token_within(max_length: int) -> str:
    return f"no token of the assistant within max_length {max_length}"


def _log_cuts(lost: Sequence[int], num_kept: int, max_length: int) -> None:
    """Log how many examples are cut at `max_length`, and the share of lost tokens."""
    num_cut, share = sum(map(bool, lost)), sum(lost) / max(1, num_kept + sum(lost))
    logger.log(
        logging.WARNING if share > LARGE_LOSS else logging.INFO,
        "%d of %d examples are cut at data.max_length %d, which loses %.1f %% of all tokens%s",
        *(num_cut, len(lost), max_length, 100 * share),
        f": raise data.max_length (the longest has {max_length + max(lost)} tokens)" if share > LARGE_LOSS else "",
    )


def require_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's chat template.

    Raises ValueError if it has none, or if the tokenizer can't locate tokens in the text.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; set data.chat_template to a .jinja file, or to "
            f"one that ships with outrider ({', '.join(built_in_templates())})"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} doesn't report which characters a token covers; use its fast version "
            "(a directory with tokenizer.json)"
        )
    return tokenizer.get_chat_template()


class UnboundedTemplateError(ValueError):
    """A chat template that takes too much time, memory or text."""


class _OutOfTimeError(BaseException):
    """Interrupts a template. jinja ignores each Exception of an expression of constants."""


@contextmanager
def _bounded(num_turns: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
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
        raise _unbounded(f"{MAX_SECONDS:g} seconds", num_turns, tokenizer) from None
    except MemoryError:
        raise _unbounded(f"{MAX_BYTES} bytes of memory", num_turns, tokenizer) from None


def _unbounded(bound: str, num_turns: int, tokenizer: PreTrainedTokenizerBase) -> UnboundedTemplateError:
    return UnboundedTemplateError(
        f"{_described(tokenizer.get_chat_template(), tokenizer)} takes more than {bound} for a conversation of {num_turns} "
        "turns; correct it, or set data.chat_template to another"
    )


def _described(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return f"the chat template of {tokenizer.name_or_path!r}, which begins {template[:60]!r},"


def _reason(error: BaseException) -> str:
    text = f"{error!s:.200}"
    return text if isinstance(error, TemplateError) else f"{type(error).__name__}: {text}"


def _until_last_answer(turns: Sequence[Turn]) -> list[dict[str, str]]:
    last = max((index for index, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    return [asdict(turn) for turn in turns[: last + 1]]


def _render(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, **options: bool) -> tuple[str, list[Span]]:
    """Return the text of messages, and the spans between generation markers if `options` ask for them."""
    render: Any = render_jinja_template  # its annotations are wrong
    template = tokenizer.get_chat_template()
    (text,), spans = render([messages], chat_template=template, **tokenizer.special_tokens_map, **options)
    if len(text) > MAX_CHARS + sum(len(message["content"]) for message in messages):
        raise _unbounded(f"{MAX_CHARS} characters", len(messages), tokenizer)
    return text, spans[0] if spans else []


def _render_answers(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[str, list[Span]] | str:
    """Render messages, and locate the answers; or return the reason to drop the conversation."""
    if not messages:
        return "no assistant turn"
    if len(messages) > MAX_TURNS:
        return f"more than {MAX_TURNS} turns"
    try:
        with _bounded(len(messages), tokenizer):
            if GENERATION_MARKER.search(template):
                return _render(messages, tokenizer, return_assistant_tokens_mask=True)
            return _render_located(messages, tokenizer)
    except UnboundedTemplateError:
        raise
    except TEMPLATE_ERRORS as error:
        return f"rejected by the chat template ({_reason(error)})"


def _render_located(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]] | str:
    """Render messages with a template without markers, and locate the answers.

    Returns the reason to drop the conversation if the answers can't be located.

    An answer begins where its prompt ends, that is, the text up to its turn with the generation
    prompt. So a space or an empty thinking block that the template puts before the answer is
    trained, too. If that prompt is no prefix of the whole text (some templates drop earlier
    thinking), the answer begins with its first character. It ends with the text that the template
    writes after the last answer, its end token, without white space after it.
    """
    # 1. Locate the answers' own characters.
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    text, _ = _render(messages, tokenizer)
    located = _locate_answers(text, messages, answers, tokenizer)
    prompts = [_render(messages[:index], tokenizer, add_generation_prompt=True)[0] for index in answers]
    if located is None:
        return "the chat template changes the answers, so that they cannot be found in its text"
    # 2. Extend each answer to its prompt's end, and by the end token.
    end_text = text[located[-1][1] :].rstrip()
    spans = []
    for prompt, (start, end) in zip(prompts, located, strict=True):
        if text.startswith(prompt) and len(prompt) <= start:
            start = len(prompt)
        spans.append((start, end + len(end_text) if text.startswith(end_text, end) else end))
    return text, spans


def _locate_answers(
    text: str, messages: list[dict[str, str]], answers: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[Span] | None:
    """Locate the answers in `text` by rendering the conversation again with placeholders.

    Returns None if the rest of the text differs. A template may strip white space from an answer,
    but change nothing else.
    """
    # 1. Render with placeholders. Normal text contains no private-use characters, so they are
    # unique.
    placeholders = {index: f"\ue000{index}\ue001" for index in answers}
    blank, _ = _render([{**m, "content": placeholders.get(i, m["content"])} for i, m in enumerate(messages)], tokenizer)
    pieces = re.split("|".join(placeholders.values()), blank)
    if len(pieces) != len(answers) + 1 or not text.startswith(pieces[0]):
        return None
    # 2. Walk through the text: each answer must be followed by the next piece.
    spans = []
    position = len(pieces[0])
    for index, following in zip(answers, pieces[1:], strict=True):
        answer = messages[index]["content"]
        fitting = [form for form in (answer, answer.strip()) if text.startswith(form + following, position)]
        if not fitting:
            return None
        end = position + len(fitting[0])
        spans.append((position, end))
        position = end + len(following)
    return spans if position == len(text) else None


def _tokenize(
    rendered: list[tuple[str, str, list[Span]]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    dropped: Counter[str],
    lost: list[int],
) -> list[Example]:
    if not rendered:
        return []
    # The template has written the special tokens. `verbose` would warn of long texts, which are cut
    # below.
    encoded = tokenizer([text for _, text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    examples = []
    for (id, _, spans), ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        mask = _covered(torch.tensor(offsets), spans)
        if not mask.any():
            dropped["no token of the assistant"] += 1
        elif not mask[1:max_length].any():
            dropped[_no_token_within(max_length)] += 1
        else:
            lost.append(max(0, len(ids) - max_length))
            examples.append(Example(id=id, input_ids=torch.tensor(ids[:max_length]), loss_mask=mask[:max_length].clone()))
    return examples


def _covered(offsets: Int[torch.Tensor, "seq 2"], spans: list[Span]) -> Bool[torch.Tensor, " seq"]:
    covered = torch.zeros(len(offsets), dtype=torch.bool)
    for start, end in spans:
        covered |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return covered
