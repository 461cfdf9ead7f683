"""Who speaks, under the names that data sets have for it."""

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
"""Names of the roles in the wild; those of ShareGPT's files include the assistants that were asked."""

TURN_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""The keys that hold lists of turns, and of a turn the keys of its role and its text."""
