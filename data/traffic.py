"""Chat requests and their replies as servers log them, with what is private in them replaced.

Replacing is by patterns, so it is no guarantee: names, postal addresses and secrets without a known form stay.
"""

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .conversations import Conversation, Turn

BODY_KEYS = ("body", "data")
"""Keys under which logs put the body of a request or of a reply."""
REQUEST_KEYS, REPLY_KEYS = ("request", "kwargs"), ("response", "completion", "output")
OF_REQUESTS = ("messages", "tools", "functions")
NO_REPLY = "replies without a message, such as errors: not used"
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


def _is_address(match: re.Match[str]) -> bool:
    """Check that it is the address of a computer, and not of this one or of none."""
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _has_letter(match: re.Match[str]) -> bool:
    """Check that a secret's value has a letter: limits of tokens are numbers."""
    return re.search("[A-Za-z]", re.split(r"[:=>]\s*|\bis ", match[0], maxsplit=1)[-1]) is not None


def _is_mixed(match: re.Match[str]) -> bool:
    """Check that a long word has small and capital letters and digits: no word of a language has."""
    return all(re.search(kind, match[0]) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


PASSWORDS = "(?:passwords?|passwd|passphrase|pwd)"
SECRETS = "(?:secret(?:[_ -]?key)?|token|api[_ -]?key|access[_ -]?key|account[_ -]?key|private[_ -]?key|pass)"
SIGN, QUOTED = r"[\"'\\]{0,2}\s{0,3}(?:=>|[:=]|is:|>|is(?= \S*\d))\s{0,3}", r"\\?[\"'][^\"'\n]{4,200}[\"']"
NAME = "[A-Za-z0-9_-]"
PRIVATE: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], bool]], ...] = tuple(
    (name, re.compile(pattern), check or (lambda match: True))
    for name, pattern, check in (
        ("key", r"(?s)-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]{0,30}-----|\Z)", None),
        (
            "key",
            rf"\b(?:(?:sk|pk|rk|whsec)[-_](?={NAME}{{0,60}}\d)|sk-(?:ant|or|proj|svcacct)-){NAME}{{16,}}|\b(?:AKIA|ASIA)[0-9A-Z]{{16}}\b|\bAIza[\w-]{{30,}}",
            None,
        ),
        (
            "key",
            r"\b(?:gh[pousr]_|hf_|npm_)[A-Za-z0-9]{10,}|\b(?:github_pat_|glpat-|xox[abeprs]-|pypi-|ya29\.)[\w-]{10,}",
            None,
        ),
        ("key", r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|\bhooks\.slack\.com/services/[\w/]{8,}", None),
        ("key", r"(?i)(?<=\bbearer )(?=[\w.~+/-]{0,200}\d)[\w.~+/-]{12,}=*|(?<=\bAuthorization: Basic )[\w+/-]{6,}=*", None),
        ("password", rf"(?i){PASSWORDS}{SIGN}(?:{QUOTED}|[^\s\"',;()<>]{{4,}})|--password[ =]\S{{4,}}", None),
        ("password", r"(?<=\s-u )[\w.@-]{1,100}:\S{1,100}|(?i:(?<=\bcookie: )[^\n\"']{8,4000})", None),
        ("password", rf"(?i)(?<![a-z]){SECRETS}{SIGN}(?:{QUOTED}|(?=[\w+/=-]{{0,200}}\d)[\w+/=-]{{8,}})", _has_letter),
        ("address", r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{0,100}:[^\s/]{1,100}@", None),
        ("e-mail", r"[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,5}[A-Za-z]{2,24}\b(?!\()", None),
        ("address", r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)", _is_address),
        ("address", r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])", _is_address),
        ("number", r"(?ai)\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b", _is_account),
        ("number", r"(?<![\w.])[1-9](?:[ -]?\d){12,18}(?![\w.]*\d)", _is_card),
        ("number", r"(?<!\w)\+[1-9](?:[ ()./-]{0,2}\d){7,14}(?!\d)", None),
        ("key", r"(?<![0-9A-Za-z])(?:0x)?[0-9a-fA-F]{32,}+(?![0-9A-Za-z])", None),
        ("key", rf"(?<!{NAME}){NAME}{{32,}}+(?!\w)", _is_mixed),
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
            tool_calls=[_clean_call(call, found) for call in turn.tool_calls],
            name=None if turn.name is None else without_private(turn.name, found),
            tool_call_id=turn.tool_call_id,
            trained=turn.trained,
        )
        for turn in conversation.turns
    )
    # A schema's keys name what a call may have, not what it has.
    return replace(conversation, turns=turns, tools=_clean_schemas(conversation.tools, found), is_private=True), found


def _clean_schemas(value: Any, found: set[str]) -> Any:
    """Clean the texts in the schemas of functions."""
    if isinstance(value, Mapping):
        return {name: _clean_schemas(part, found) for name, part in value.items()}
    return [_clean_schemas(part, found) for part in value] if isinstance(value, list | tuple) else _clean(value, found)


def _clean(value: Any, found: set[str]) -> Any:
    """Clean the texts and numbers in a value as JSON has them, by the names of their keys, too."""
    if isinstance(value, str):
        return without_private(value, found)
    if isinstance(value, Mapping):
        return {without_private(str(name), found): _of_key(str(name), part, found) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part, found) for part in value]
    if isinstance(value, int) and not isinstance(value, bool):
        text = without_private(str(value), found)
        return value if text == str(value) else text
    return value


def _of_key(name: str, value: Any, found: set[str]) -> Any:
    """Clean the value of a key. A password has no form of its own."""
    if isinstance(value, str | int) and not isinstance(value, bool) and re.search(PASSWORDS, name, re.IGNORECASE):
        found.add("password")
        return "[password]"
    return _clean(value, found)


def _clean_call(call: Mapping[str, Any], found: set[str]) -> dict[str, Any]:
    """Clean a call; its id stays, which its result refers to."""
    return {name: part if name == "id" else _clean(part, found) for name, part in call.items()}


def chat_of(record: Mapping[str, Any], notes: Counter[str]) -> dict[str, Any] | str:
    """Return a logged request as a record of messages, with its reply as the last one; or why it is none.

    A log has the request's body under a key, or its keys beside the reply's. A request without a reply, or with an
    error for a reply, is a conversation that lacks its answer; `notes` count replies that can't be read.
    """
    # 1. The request. Anthropic's API has the system prompt beside the messages.
    request, reply = request_of(record), reply_of(record)
    if not isinstance(messages := request.get("messages"), list):
        return NO_CHAT
    chat: dict[str, Any] = {key: request[key] for key in OF_REQUESTS if request.get(key)}
    if request.get("system"):
        messages = [{"role": "system", "content": request["system"]}, *messages]
        chat["messages"] = messages
    # 2. The reply: the first of several.
    if (message := _message(reply)) is not None:
        # Servers write null for what a reply doesn't have.
        filled = {key: value for key, value in message.items() if value not in (None, [], "") or key == "content"}
        chat["messages"] = [*messages, {"role": "assistant", **filled}]
    elif any(record.get(key) for key in (*REPLY_KEYS, "choices")):
        notes[NO_REPLY] += 1
    return chat


def kind_of_request(has_tools: bool, question: str) -> str:
    """Return what a request asks for, as a category: tools, code or text."""
    return "tools" if has_tools else "code" if "```" in question or "def " in question else "text"


def request_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's body in a record of a log."""
    found = next((body for key in REQUEST_KEYS if isinstance(body := _body(record.get(key)), dict)), _body(record))
    return found if isinstance(found, dict) else {}


def reply_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply's body in a record of a log; the pieces of a streamed one are put together."""
    found = next((body for key in REPLY_KEYS if (body := _body(record.get(key))) is not None), record)
    if isinstance(found, list):
        return _whole([piece for piece in found if isinstance(piece, dict)])
    return dict(found) if isinstance(found, Mapping) else {}


def _message(reply: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the message of a reply: OpenAI's `choices[0].message`, or Anthropic's reply itself."""
    choices = reply.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0].get("message") if isinstance(choices[0].get("message"), dict) else None
    if reply.get("role") == "assistant" and reply.get("type") == "message":
        return {"content": reply.get("content")}
    return None


def _add_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any], place: int) -> None:
    """Add a piece of a call, which its index, or its place among the piece's calls, tells from others."""
    index, function = part.get("index"), part.get("function")
    index = index if isinstance(index, int) else place
    if part.get("id") and calls.get(index, part).get("id", part["id"]) != part["id"]:  # servers that give no index
        index = len(calls)
    call = calls.setdefault(index, {"type": "function", "function": {"name": "", "arguments": ""}})
    if part.get("id"):
        call["id"] = part["id"]
    for key, value in function.items() if isinstance(function, dict) else ():
        if isinstance(value, str):
            call["function"][key] = call["function"].get(key, "") + value


def _deltas(piece: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a piece of a stream adds to the first reply of several."""
    choices = piece.get("choices")
    first = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    return [delta for choice in first if choice.get("index", 0) == 0 and isinstance(delta := choice.get("delta"), dict)]


def _whole(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a streamed reply as one that wasn't. The last pieces have the counts."""
    whole, message, calls = dict[str, Any](), dict[str, Any](), dict[int, dict[str, Any]]()
    for piece in pieces:
        whole |= {key: value for key, value in piece.items() if value is not None and key != "choices"}
        for delta in _deltas(piece):
            for key, value in delta.items():
                if isinstance(value, str) and key != "role":
                    message[key] = message.get(key, "") + value
            parts = delta.get("tool_calls")
            for place, part in enumerate(parts if isinstance(parts, list) else []):
                if isinstance(part, dict):
                    _add_call(calls, part, place)
    if calls:
        message["tool_calls"] = list(calls.values())
    return {**whole, "choices": [{"message": {"content": "", **message}}]} if message else whole


def _parsed(line: str) -> Any:
    """Return the object in the line of an event; None for another one, or half of one."""
    with suppress(ValueError, RecursionError):
        return json.loads(line) if line.startswith("{") else None
    return None


def _body(value: Any) -> Any:
    """Return the body of a request or reply in a log, where it may be JSON text, or the text of a stream of events."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            if value.startswith("{"):
                return _body(json.loads(value))
            # str.splitlines would also split at U+2028 and other separators, which JSON may have inside a text.
            lines = [line[5:].strip() for line in re.split(r"[\r\n]+", value) if line.startswith("data:")]
            if lines:
                return [piece for line in lines if (piece := _parsed(line)) is not None]
    while isinstance(value, dict) and "messages" not in value and "choices" not in value:
        inner = next((value[key] for key in BODY_KEYS if isinstance(value.get(key), dict | str | list)), None)
        if inner is None:
            return value
        if not isinstance(inner, dict):
            return _body(inner)
        value = inner
    return value
