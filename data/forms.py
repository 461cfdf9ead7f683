"""The forms of records: which keys of a record are read, and how they become a conversation.

Each parser returns a conversation, or the reason to drop the record. It counts the keys that have a
value and that it doesn't use, so that nothing is lost in silence.
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .conversations import Conversation, Turn, has_surrogate, text_of
from .fields import MAX_COUNT
from .traffic import anonymous, chat_of, without_private
from .turns import MEDIA_KEYS, TOOL_KEYS, first_value, note_unused, parse_json, parse_turns, tools_of

ID_KEYS = ("id", "prompt_id")
SYSTEM_KEYS = ("system", "system_prompt")
SHARED_KEYS = (*ID_KEYS, *SYSTEM_KEYS, *TOOL_KEYS)
TEXT_RECORD_KEYS = ("text", "content")
MASK_KEYS = ("loss_mask", "assistant_masks", "labels")
IGNORED_LABEL = -100
"""Value of `labels` at a token that isn't trained."""

NOT_UNICODE = "text with half a surrogate pair, which isn't valid Unicode"
NO_OBJECT = "record is not an object"
FIRST_ANSWERS = "first turns that are answers: left out"
"""Note about conversations that are cut out of longer ones."""

Parsed = Conversation | str
"""A record's conversation, without its id; or the reason to drop the record."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of records: a value of `data.source`."""

    needs: tuple[str, ...]
    """Keys that a record must have; alternatives are joined by |."""
    uses: tuple[str, ...]
    """Further keys that are used."""
    example: str
    parser: Callable[[Any, Counter[str]], Parsed]
    """Parses a record that is an object."""

    def parse(self, record: Any, notes: Counter[str]) -> Parsed:
        """Parse a record, and count notes about it: keys that are not used, and what is left out."""
        return self.parser(record, notes) if isinstance(record, dict) else NO_OBJECT

    def fits(self, record: Any) -> bool:
        """Return whether the record has the keys of this form."""
        needs = [need.split("|") for need in self.needs]
        return isinstance(record, dict) and all(any(record.get(key) is not None for key in keys) for keys in needs)


def _checked(turns: list[Turn], record: Mapping[str, Any], used: Collection[str], notes: Counter[str], own: set[str]) -> Parsed:
    """Return the conversation of a record's turns, with its system prompt and functions."""
    # 1. What stands beside the turns.
    note_unused(record, used, "", own)
    if media := MEDIA_KEYS.intersection(key for key, value in record.items() if value):
        return f"record with {min(media)!r}, which the target can't see"
    tools = tools_of(record, own)
    if tools is None:
        return "'tools' that are no list of functions"
    system = text_of(given := first_value(record, SYSTEM_KEYS, own))
    if given is not None and system is None:
        return "'system' that is no text"
    if system and system.strip():
        if any(turn.role == "system" for turn in turns):
            own.add("a system prompt beside another one in the turns: not used")
        else:
            turns = [Turn(role="system", content=system), *turns]
    # 2. The turns.
    texts = [text for turn in turns for text in _texts(turn)]
    if any(map(has_surrogate, texts)) or (tools and has_surrogate(_json(tools))):
        return NOT_UNICODE
    kept = _usable(turns, own)
    if isinstance(kept, str):
        return kept
    notes.update(own)
    return Conversation(id="", turns=tuple(kept), tools=tools)


def _usable(turns: list[Turn], notes: set[str]) -> list[Turn] | str:
    """Return the turns from the first question on, with the system prompt; or the reason to drop them."""
    # Many data sets write an empty system message if there is none.
    turns = [turn for turn in turns if turn.role != "system" or turn.content.strip()]
    if not turns:
        return "no turns"
    if not all(turn.content.strip() or turn.tool_calls or turn.role == "tool" for turn in turns):
        return "empty turn"
    asked = next((index for index, turn in enumerate(turns) if turn.role == "user"), None)
    if asked is None:
        return "no user turn"
    if any(turn.role == "assistant" for turn in turns[:asked]):  # a piece of a long conversation
        notes.add(FIRST_ANSWERS)
        turns = [turn for turn in turns[:asked] if turn.role == "system"] + turns[asked:]
    answers = [turn for turn in turns if turn.role == "assistant"]
    if answers and not any(turn.trained for turn in answers):
        return "no answer to train ('weight' 0 or 'train' false)"
    return turns


def _texts(turn: Turn) -> list[str]:
    """Return all texts of a turn."""
    calls = [_json(turn.tool_calls)] if turn.tool_calls else []
    return [turn.content, *calls, *filter(None, (turn.reasoning, turn.name, turn.tool_call_id))]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- records


def _parse_list(key: str, record: Any, notes: Counter[str]) -> Parsed:
    """Parse a record with a list of turns."""
    turns = parse_json(record.get(key))
    if not isinstance(turns, list):
        return f"record without a list {key!r}"
    own = set[str]()
    parsed = parse_turns(turns, own)
    if isinstance(parsed, str):
        return parsed
    # UltraChat has the first message twice.
    doubled = ["prompt"] if any(turn.content == record.get("prompt") for turn in parsed[:2]) else []
    return _checked(parsed, record, (key, *SHARED_KEYS, *doubled), notes, own)


def _parse_alpaca(record: Any, notes: Counter[str]) -> Parsed:
    """Parse an instruction with its answer; input, earlier questions and answers, and a system prompt are optional."""
    instruction, context, output = record.get("instruction"), record.get("input") or "", record.get("output")
    if not (isinstance(instruction, str) and isinstance(context, str) and isinstance(output, str)):
        return "record without the texts 'instruction' and 'output'"
    history = record.get("history") or []
    if not isinstance(history, list) or not all(_is_pair(pair) for pair in history):
        return "'history' that is no list of questions with answers"
    texts = [text for pair in history for text in pair]
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    turns = [
        Turn(role="assistant" if index % 2 else "user", content=text) for index, text in enumerate([*texts, question, output])
    ]
    return _checked(turns, record, ("instruction", "input", "output", "history", *SHARED_KEYS), notes, set())


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _parse_completion(record: Any, notes: Counter[str]) -> Parsed:
    """Parse a prompt with its completion, each a text or a list of turns."""
    turns, own = list[Turn](), set[str]()
    completion_key = "completion" if "completion" in record else "response"
    for key, role in (("prompt", "user"), (completion_key, "assistant")):
        value = record.get(key)
        if isinstance(value, str):
            turns.append(Turn(role=role, content=value))  # type: ignore[arg-type]
            continue
        parsed = parse_turns(value, own) if isinstance(value, list) and value else "record without 'prompt' and 'completion'"
        if isinstance(parsed, str):
            return parsed
        # Only the completion is trained.
        turns += [replace(turn, trained=False) for turn in parsed] if role == "user" else parsed
    return _checked(turns, record, ("prompt", completion_key, *SHARED_KEYS), notes, own)


def _parse_tokens(record: Any, notes: Counter[str]) -> Parsed:
    """Parse token ids with a mask. Tokens that attention doesn't see are padding, and left out."""
    key = next((key for key in MASK_KEYS if record.get(key) is not None), MASK_KEYS[0])
    ids, mask, seen = record.get("input_ids") or [], record.get(key) or [], record.get("attention_mask")
    columns = [ids, mask] if seen is None else [ids, mask, seen]
    if not ids or not all(isinstance(column, list) and all(isinstance(n, int) for n in column) for column in columns):
        return f"record without the whole numbers 'input_ids' and {key!r}"
    if any(len(column) != len(ids) for column in columns):
        return f"'input_ids' and {key!r} of different lengths"
    if min(ids) < 0 or max(ids) >= MAX_COUNT:
        return "'input_ids' that are no token ids"
    rows = list(zip(*(columns if seen is not None else [*columns, [1] * len(ids)]), strict=True))
    if key == "labels" and any(label not in (IGNORED_LABEL, id) for id, label, _ in rows):
        return "'labels' with other tokens than 'input_ids'"
    if key != "labels" and not set(mask) <= {0, 1}:
        return f"{key!r} with other values than 0 and 1"
    note_unused(record, ("input_ids", key, "attention_mask", *ID_KEYS), "", notes)
    trained = bytes(label != IGNORED_LABEL if key == "labels" else bool(label) for _, label, is_seen in rows if is_seen)
    return Conversation(id="", tokens=(array("i", (id for id, _, is_seen in rows if is_seen)), trained))


def _parse_text(record: Any, notes: Counter[str]) -> Parsed:
    """Parse a text, which is cut into pieces later, unless a chat template has written it."""
    text = first_value(record, TEXT_RECORD_KEYS)
    if not isinstance(text, str):
        return "record without a text 'text' or 'content'"
    if has_surrogate(text):
        return NOT_UNICODE
    note_unused(record, (*TEXT_RECORD_KEYS, *ID_KEYS), "", notes)
    return Conversation(id="", text=text)


def _parse_openai(record: Any, notes: Counter[str]) -> Parsed:
    """Parse a logged chat request with its reply, without what looks private."""
    chat = chat_of(record, notes)
    if isinstance(chat, str):
        return chat
    own: Counter[str] = Counter()
    parsed = _parse_list("messages", chat, own)
    notes.update({without_private(note, set()): count for note, count in own.items()})
    if isinstance(parsed, str):
        return without_private(parsed, set())
    conversation, found = anonymous(parsed)
    notes.update(f"texts with what looks like a private {name}: replaced by [{name}]" for name in found)
    return conversation


FORMS = {
    "openai": Form(
        needs=("request|kwargs|body|messages", "response|choices|completion|output"),
        uses=SHARED_KEYS,
        example='{"request": {"messages": [{"role": "user", "content": TEXT}]}, "response": {"choices": [{"message": '
        '{"role": "assistant", "content": TEXT}}]}}',
        parser=_parse_openai,
    ),
    "messages": Form(
        needs=("messages",),
        uses=SHARED_KEYS,
        example='{"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]}',
        parser=partial(_parse_list, "messages"),
    ),
    "sharegpt": Form(
        needs=("conversations",),
        uses=SHARED_KEYS,
        example='{"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}]}',
        parser=partial(_parse_list, "conversations"),
    ),
    "alpaca": Form(
        needs=("instruction", "output"),
        uses=("input", "history", *SHARED_KEYS),
        example='{"instruction": TEXT, "input": TEXT, "output": TEXT}',
        parser=_parse_alpaca,
    ),
    "completion": Form(
        needs=("prompt", "completion|response"),
        uses=SHARED_KEYS,
        example='{"prompt": TEXT or turns, "completion": TEXT or turns}',
        parser=_parse_completion,
    ),
    "tokens": Form(
        needs=("input_ids", "|".join(MASK_KEYS)),
        uses=ID_KEYS,
        example='{"input_ids": [5, 7, 3], "loss_mask": [0, 1, 1]}',
        parser=_parse_tokens,
    ),
    "text": Form(
        needs=("text|content",),
        uses=ID_KEYS,
        example='{"text": TEXT}',
        parser=_parse_text,
    ),
}
"""The forms of records by their name in `data.source`, in the order in which they are tried."""


def form_of(records: Sequence[Any]) -> str | None:
    """Return the form of the first record that has the keys of one; None without any."""
    return next((name for record in records for name, form in FORMS.items() if form.fits(record)), None)
