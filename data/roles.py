"""Roles of speakers, by the names that data sets use."""

from typing import Literal

Role = Literal["system", "user", "assistant"]

ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
}
"""Names of the roles in common data sets; ShareGPT's files include names of assistants."""

TURN_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Keys of lists of turns, each with the keys of a turn's role and text."""
