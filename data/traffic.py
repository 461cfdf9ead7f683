"""Chat requests and their replies as servers log them, with what is private in them replaced.

Replacing is by patterns, so it is no guarantee: names, postal addresses and secrets without a known form stay.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .conversations import Conversation, Turn

BODY_KEYS = ("body", "data")
"""Keys under which logs put the body of a request or of a reply."""
REQUEST_KEYS, REPLY_KEYS = ("request", "kwargs"), ("response", "completion", "output")
OF_REQUESTS = ("messages", "tools", "functions")
NO_CHAT = "record without a chat request ('messages', maybe under 'request' or 'body')"


def _is_card(match: re.Match[str]) -> bool:
    """Check the last digit of a number by Luhn's rule (ISO/IEC 7812-1), as those of payment cards have it."""
    digits = [int(digit) for digit in match[0] if digit.isdigit()]
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_account(match: re.Match[str]) -> bool:
    """Check the two digits of an account's number by ISO 13616."""
    text = match[0].replace(" ", "")
    return int("".join(str(int(letter, 36)) for letter in text[4:] + text[:4])) % 97 == 1


def _is_mixed(match: re.Match[str]) -> bool:
    """Check that a long word has small and capital letters and digits: no word of a language has."""
    return all(re.search(kind, match[0]) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


SECRET_WORDS, SPACE = "(?:password|passwd|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key)", r"\s{0,3}"
QUOTED, WITH_DIGIT = r"[\"'][^\s\"']{4,}[\"']", r"(?=[^\s\"',;]{0,200}\d)[^\s\"',;()]{4,}"
PRIVATE: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], bool]], ...] = tuple(
    (name, re.compile(pattern), check or (lambda match: True))
    for name, pattern, check in (
        ("key", r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z ]{0,20}PRIVATE KEY-----)?", None),
        ("key", r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}", None),
        ("key", r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|xox[abeprs]-|npm_|pypi-)[\w-]{10,}", None),
        ("key", r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", None),
        ("key", r"(?i)(?<=\bbearer )[\w.~+/-]{12,}=*", None),
        (
            "password",
            f"(?i)(?<![a-z]){SECRET_WORDS}[\"']?(?:{SPACE}[:=]| is){SPACE}(?:{QUOTED}|{WITH_DIGIT})",
            None,
        ),
        ("address", r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/@:]{1,100}:[^\s/@]{1,100}@", None),
        ("e-mail", r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,5}", None),
        ("address", r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]*\d)", None),
        ("address", r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{0,4}(?![\w:])", None),
        ("number", r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b", _is_account),
        ("number", r"(?<![\w.])\d(?:[ -]?\d){12,18}(?![\w.]*\d)", _is_card),
        ("number", r"(?<!\w)\+\d(?:[ ()./-]{0,2}\d){7,14}(?!\d)", None),
        ("key", r"\b[0-9a-fA-F]{32,}\b", None),
        ("key", r"\b[A-Za-z0-9_-]{32,}(?![\w-])", _is_mixed),
    )
)
"""What looks private: a name, a pattern whose time is linear in the text, and a check of what it finds."""


def without_private(text: str, found: set[str]) -> str:
    """Return a text with `[key]`, `[e-mail]` and so on in place of what looks private; their names join `found`."""

    def replaced(name: str, check: Callable[[re.Match[str]], bool], match: re.Match[str]) -> str:
        if not check(match):
            return match[0]
        found.add(name)
        return f"[{name}]"

    for name, pattern, check in PRIVATE:
        text = pattern.sub(lambda match, name=name, check=check: replaced(name, check, match), text)  # type: ignore[misc]
    return text


def anonymous(conversation: Conversation) -> tuple[Conversation, set[str]]:
    """Return a conversation without what looks private, and what was found, for example {"e-mail"}."""
    found = set[str]()
    turns = tuple(
        Turn(
            role=turn.role,
            content=without_private(turn.content, found),
            reasoning=None if turn.reasoning is None else without_private(turn.reasoning, found),
            tool_calls=_clean(turn.tool_calls, found),
            name=turn.name,
            tool_call_id=turn.tool_call_id,
            trained=turn.trained,
        )
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns, tools=_clean(conversation.tools, found)), found


def _clean(value: Any, found: set[str]) -> Any:
    """Clean the texts in a value as JSON has them. The ids of calls stay, which results refer to."""
    if isinstance(value, str):
        return without_private(value, found)
    if isinstance(value, Mapping):
        return {name: part if name == "id" else _clean(part, found) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part, found) for part in value]
    return value


def chat_of(record: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return a logged request as a record of messages, with its reply as the last one; or why it is none.

    A log has the request's body under a key, or its keys beside the reply's. A request without a reply, or with an
    error for a reply, is a conversation that lacks its answer.
    """
    # 1. The request.
    request = next((body for key in REQUEST_KEYS if isinstance(body := _body(record.get(key)), dict)), _body(record))
    if not isinstance(request, dict) or not isinstance(messages := request.get("messages"), list):
        return NO_CHAT
    chat: dict[str, Any] = {key: request[key] for key in OF_REQUESTS if request.get(key)}
    # 2. The reply: the first of several.
    reply = next((body for key in REPLY_KEYS if (body := _body(record.get(key))) is not None), record)
    choices = reply.get("choices") if isinstance(reply, dict) else None
    message = choices[0].get("message") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    if isinstance(message, dict):
        # Servers write null for what a reply doesn't have.
        filled = {key: value for key, value in message.items() if value not in (None, [], "") or key == "content"}
        chat["messages"] = [*messages, {"role": "assistant", **filled}]
    return chat


def _body(value: Any) -> Any:
    """Return the body of a request or reply in a log."""
    while isinstance(value, dict) and "messages" not in value and "choices" not in value:
        inner = next((value[key] for key in BODY_KEYS if isinstance(value.get(key), dict)), None)
        if inner is None:
            return value
        value = inner
    return value
