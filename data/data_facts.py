"""The data of a folder of shards by option, beside its manifest: so that an error names what changed, and no digest."""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .config import DataConfig
from .decontamination import PromptOverlap
from .files import sha256_file

FACTS_FILE = "data.json"
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
    """Name the options that changed, such as `data.limit was 20 and is 30`. `before` is None where nothing was recorded."""
    if before is None:
        return "the conversations are others than those that it was made from (its options weren't recorded)"
    path = now.get("data.path")
    words = {
        FILE_CONTENT: f"data.path {path}: its conversations changed, sha256 {{0:.12}}... to {{1:.12}}...",
        TEMPLATE: "the chat template changed (data.chat_template, or the one of the target's tokenizer)",
        PYTHON: "data.source is stdlib, and Python was {0} and is {1}, which has other files",
        SUITES: "eval.suites changed, whose prompts are left out of the data (data.overlap_words)",
    }
    changes = [
        words.get(name, f"{name} was {{0!r}} and is {{1!r}}").format(before[name], now[name])
        for name in before
        if name in now and before[name] != now[name]
    ]
    return "; ".join(changes) or "the conversations (or the target's answers to them) changed, though no option of the data did"
