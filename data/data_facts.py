"""Facts about the data of a folder of shards, by option, beside its manifest.

With them, an error names the option that changed, and no digest.
"""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .config import DataConfig
from .files import sha256_file
from .manifest import TargetIdentity
from .sources import PromptOverlap

FACTS_FILE = "data.json"
DIGEST_LENGTH = 12
"""Digits of a digest that a message has."""
TARGET_PARTS = {
    "target.weights_sha256": "its weights",
    "target.config_sha256": "its config.json",
    "target.tokenizer_sha256": "its tokenizer",
}
"""What the digests of a target are of."""
FILE_CONTENT, TEMPLATE, SUITES, PYTHON = "content of data.path", "chat template", "eval.suites", "Python"


def describe_data(data: DataConfig, chat_template: object, overlap: PromptOverlap | None = None) -> dict[str, Any]:
    """Return the data's options, and digests of the files behind them, as JSON values."""
    facts: dict[str, Any] = {f"data.{name}": value for name, value in asdict(data).items()}
    if data.path is not None and Path(data.path).is_file():
        facts[FILE_CONTENT] = sha256_file(Path(data.path))
    if data.source == "stdlib":
        facts[PYTHON] = platform.python_version()
    facts[TEMPLATE] = hashlib.sha256(str(chat_template).encode()).hexdigest()
    return facts | ({} if overlap is None else {SUITES: overlap.suites})


def describe_change(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Name the options that changed, such as `data.limit was 20 and is 30`.

    `before` is None where nothing was recorded.
    """
    if before is None:
        return "the conversations are others than those that it was made from (its options weren't recorded)"
    changes = [
        _describe_fact(name, before, now)
        for name in before
        if name in now and before[name] != now[name] and name != "data.chat_template"  # the template itself is compared
    ]
    return "; ".join(changes) or "the conversations (or the target's answers to them) changed, though no option of the data did"


def _describe_fact(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the change of one fact, by the option that the user can change."""
    earlier, current = before[name], now[name]
    if name == FILE_CONTENT:
        digests = f"{earlier[:DIGEST_LENGTH]}... to {current[:DIGEST_LENGTH]}..."
        return f"data.path {now.get('data.path')}: its conversations changed, sha256 {digests}"
    if name == TEMPLATE:
        return describe_template_change(before, now)
    if name == PYTHON:
        return f"data.source is stdlib, and Python was {earlier} and is {current}, which has other files"
    if name == SUITES:
        return "eval.suites changed, whose prompts are left out of the data (data.overlap_words)"
    return f"{name} was {_quoted(earlier)} and is {_quoted(current)}"


def describe_template_change(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Name the option that changed the chat template.

    `before` is None where nothing was recorded.
    """
    old, new = ((facts or {}).get("data.chat_template") for facts in (before, now))
    words = ["the one of the target's tokenizer" if name is None else repr(name) for name in (old, new)]
    if before is None:
        return f"data.chat_template changed (it is {words[1]}; what it was wasn't recorded)"
    if old != new:
        return f"data.chat_template changed (it was {words[0]} and is {words[1]})"
    digests = [str(facts.get(TEMPLATE, "unknown"))[:DIGEST_LENGTH] for facts in (before, now)]
    return f"data.chat_template changed (it is {words[1]} as before, and its sha256 was {digests[0]}... and is {digests[1]}...)"


def describe_target_change(changes: Mapping[str, str], before: TargetIdentity, now: TargetIdentity) -> dict[str, str]:
    """Return the changes, with those of the target's digests in one text.

    That text names the option that changed.
    """
    digests = [name for name in changes if name in TARGET_PARTS]
    if not digests:
        return dict(changes)
    parts = " and ".join(TARGET_PARTS[name] for name in digests)
    if before.name != now.name:
        text = f"target.name_or_path was {before.name!r} and is {now.name!r}, with other {parts.replace('its ', '')}"
    elif before.revision != now.revision:
        earlier, revision = _quoted(before.revision), _quoted(now.revision)
        text = f"target.revision was {earlier} and is {revision}, with other {parts.replace('its ', '')}"
    else:
        text = f"target.name_or_path {now.name}: {parts} changed"
    return {"target.name_or_path": text} | {name: change for name, change in changes.items() if name not in digests}


def _quoted(value: Any) -> str:
    """Return a value as in a message: null for None."""
    return "null" if value is None else repr(value)
