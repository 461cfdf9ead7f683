"""Differences of two configurations, for errors that prevent mixing the work of two runs."""

from collections.abc import Mapping
from typing import Any


def name_digests(changes: dict[str, str], words: Mapping[str, str]) -> list[str]:
    """Return texts about the changes, with those of digests replaced by words.

    A name of `words` may end in `.`: it is then a prefix.
    """
    texts = []
    for name, text in changes.items():
        found = [replacement for key, replacement in words.items() if name == key or (key[-1] == "." and name.startswith(key))]
        texts.append(found[0].format(name=name.rpartition(".")[2]) if found else text)
    return list(dict.fromkeys(texts))


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Describe the values that differ, by their dotted names.

    Each description has both values: `target.dtype (was 'float32', is 'bfloat16')`. A missing value
    equals None, which means off.
    """
    texts: dict[str, str] = {}
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            texts |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            texts[f"{prefix}{key}"] = f"{prefix}{key} (was {old!r}, is {new!r})"
    return texts
