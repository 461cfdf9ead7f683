"""Short digests of JSON-like values, and where two of them differ."""

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """Short digest of a JSON-like value; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(recorded: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two nested configs differ, a text each, such as `target.dtype (was torch.float32, is torch.bfloat16)`."""
    texts = []
    for key in dict.fromkeys([*recorded, *current]):
        old, new = recorded.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            texts += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            texts.append(f"{prefix}{key} (was {old}, is {new})")
    return texts
