"""The turns of records: roles, texts, calls of functions and reasoning, by the keys that data sets use.

Each parser returns a turn, or the reason to drop the record. It notes the keys that have a value and
that it doesn't use, so that nothing is lost in silence.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .conversations import Role, Turn, text_of

ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"),
}
"""Roles by their names in data sets, in small letters. ShareGPT's files have names of assistants, and
other files roles for calls of functions and their results."""
CALL_ROLES = ("function_call", "tool_call")
"""Roles whose text is the JSON of a call."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")
CALL_KEYS, WEIGHT_KEYS = ("tool_calls", "function_call"), ("weight", "train")
OFF, ON = ("0", "0.0", "false"), ("1", "1.0", "true")
"""Values of `weight` and `train`, as texts in small letters."""
TURN_KEYS = {
    "system": (),
    "user": (),
    "assistant": (*REASONING_KEYS, *CALL_KEYS, *WEIGHT_KEYS),
    "tool": ("name", "tool_call_id"),
}
"""Keys of turns beside role and text, by role."""
TOOL_KEYS = ("tools", "functions")
MEDIA_KEYS = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Keys without which a record's text would be about something that the target never sees."""

EMPTY: tuple[Any, ...] = (None, "", [], {})


def first_value(record: Mapping[str, Any], keys: Sequence[str], notes: set[str] | None = None) -> Any:
    """Return the value of the first of these keys that has one; None without any. Notes the others."""
    filled = [key for key in keys if record.get(key) not in EMPTY]
    if notes is not None and filled[1:]:
        notes.update(f"{key!r} beside {filled[0]!r}: not used" for key in filled[1:] if record[key] != record[filled[0]])
    return record[filled[0]] if filled else None


def note_unused(record: Mapping[str, Any], used: Collection[str], where: str, notes: set[str] | Counter[str]) -> None:
    """Note the keys of a record that have a value, and that aren't used."""
    notes.update(f"{key!r}{where}: not used" for key in record if key not in used and record[key] not in EMPTY)


def parse_json(value: Any) -> Any:
    """Parse the JSON in a text; return other values, and texts that are no JSON, as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def tools_of(record: Mapping[str, Any], notes: set[str] | None = None) -> Sequence[Mapping[str, Any]] | None:
    """Return the schemas of a record's functions; None if they can't be read."""
    tools = parse_json(first_value(record, TOOL_KEYS, notes)) or []
    tools = [parse_json(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _calls_of(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return an assistant's calls; None if they can't be read.

    They are a list or a single call, each with its name and arguments, maybe under `function`, or as
    JSON in a text.
    """
    calls = []
    for number, call in enumerate(value if isinstance(value, list) else [value]):
        call = parse_json(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = parse_json(function.get("arguments", function.get("parameters")))
        arguments = None if isinstance(arguments, str) and not arguments.strip() else arguments
        if not isinstance(arguments, dict | None):
            return None
        # Some templates want an id of nine letters and digits.
        id = call["id"] if isinstance(call.get("id"), str) else f"call{number:05d}"
        calls.append({"type": "function", "id": id, "function": {"name": function["name"], "arguments": arguments or {}}})
    return calls


def _parse_turn(turn: Any, notes: set[str]) -> Turn | str:
    if not isinstance(turn, dict):
        return "turn that is not an object"
    # 1. The role and the text.
    name, value = first_value(turn, ROLE_KEYS, notes), first_value(turn, TEXT_KEYS, notes)
    if not isinstance(name, str):
        return "turn without a role ('role' or 'from')"
    name = name.strip().lower()
    role = ROLES.get(name)
    if role is None:
        return f"unknown role {name!r:.40}"
    if role == "tool" and text_of(value) is None and not _has_parts(value) and any(key in turn for key in TEXT_KEYS):
        value = "" if value is None else json.dumps(value, ensure_ascii=False)
    # An empty text is one, too.
    text = text_of(value) if value is not None else "" if any(turn.get(key) == "" for key in TEXT_KEYS) else None
    if MEDIA_KEYS.intersection(key for key, media in turn.items() if media) or (isinstance(value, list) and text is None):
        return "turn with other parts than text"
    # 2. What only answers have.
    calls, reasoning, trained = None, None, True
    if role == "assistant":
        call = parse_json(first_value(turn, CALL_KEYS, notes) or (text if name in CALL_ROLES else None))
        if call and (calls := _calls_of(call)) is None:
            return "tool calls that can't be read"
        if name in CALL_ROLES:
            text = ""
        reasoning = text_of(given := first_value(turn, REASONING_KEYS, notes))
        if given is not None and reasoning is None:
            return "reasoning that is no text"
        weights = {str(turn[key]).strip().lower() for key in WEIGHT_KEYS if turn.get(key) is not None}
        trained = weights.isdisjoint(OFF)
        if not weights <= {*OFF, *ON}:
            notes.add("weights of turns other than 0 and 1: taken as 1")
    if text is None and not calls and reasoning is None:
        return "turn without a text ('content' or 'value')"
    off = [key for key in WEIGHT_KEYS if str(turn.get(key)).lower() in OFF]  # of turns that nobody trains
    note_unused(turn, (*ROLE_KEYS, *TEXT_KEYS, *TURN_KEYS[role], *off), f" of {role} turns", notes)
    is_result, call_id = role == "tool", turn.get("tool_call_id")
    return Turn(
        role=role,
        content=text or "",
        reasoning=reasoning or None,
        tool_calls=calls or (),
        name=turn["name"] if is_result and isinstance(turn.get("name"), str) else None,
        tool_call_id=str(call_id) if is_result and call_id is not None else None,
        trained=trained,
    )


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) and "type" in part for part in value)


def parse_turns(turns: Any, notes: set[str]) -> list[Turn] | str:
    """Parse a list of turns; return the first reason to drop the record, if there is one."""
    parsed = [_parse_turn(turn, notes) for turn in turns]
    return next((turn for turn in parsed if isinstance(turn, str)), None) or parsed  # type: ignore[return-value]
