"""Conversations as data sets have them, before a chat template writes them. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str
    reasoning: str | None = None
    """The assistant's reasoning before its answer, from a field of its own."""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """The assistant's calls: {"type": "function", "id": TEXT, "function": {"name": TEXT, "arguments":
    {NAME: VALUE}}}."""
    name: str | None = None
    """Name of the function whose result this is."""
    tool_call_id: str | None = None
    """Id of the call whose result this is."""
    trained: bool = True
    """False for an answer that is read, not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation of a data set: turns, or a text or tokens that have been made of them.

    `id` is unique within the data set and is the same in every stage.
    """

    id: str
    turns: tuple[Turn, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the assistant may call."""
    text: str | None = None
    """A conversation that a chat template has written already."""
    tokens: tuple[Sequence[int], bytes] | None = None
    """Token ids, and 1 for each one that is trained, else 0."""
    is_private: bool = False
    """Whether it is logged traffic, of which nothing is shown."""


NO_ANSWER = "no assistant turn"


def is_unanswered(conversation: Conversation) -> bool:
    """Return whether a conversation only asks: only a target that answers it can use it."""
    return bool(conversation.turns) and all(turn.role != "assistant" for turn in conversation.turns)


def text_of(value: Any) -> str | None:
    """Return a text, or the texts of a list of parts of type text; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(_is_text_part(part) for part in value):
        return "".join(part["text"] for part in value)
    return None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def has_surrogate(text: str) -> bool:
    """Return whether a text has half a surrogate pair: JSON allows it, but it isn't valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
