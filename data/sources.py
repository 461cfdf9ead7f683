"""Conversations from data sets, without evaluation prompts, and a count of dropped records by reason."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from .config import DataConfig, Split
from .raw_records import ROLES, SUFFIXES, TURN_KEYS, has_surrogate, is_local, load_records
from .stdlib import TASK, Cuts, code_conversations, cut_text, read_source
from .suites import PromptSet
from .types import Conversation, Role, Turn

SCRIPTS_WITHOUT_SPACES = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Thai and Lao, kana, Chinese characters, Hangul: each character counts as a word."""
WORD = re.compile(f"[{SCRIPTS_WITHOUT_SPACES}]|[^\\W{SCRIPTS_WITHOUT_SPACES}]+")

Words = tuple[str, ...]


class PromptOverlap:
    """Index of the evaluation prompts' words, to find overlaps with other prompts (arXiv 2005.14165, appendix C).

    Two texts overlap if they share `num_words` consecutive words, ignoring case and punctuation. A
    turn with fewer words overlaps only with a turn of exactly the same words.
    """

    def __init__(self, suites: Iterable[PromptSet], num_words: int) -> None:
        self.num_words = num_words
        self._suites: dict[Words, str] = {}
        self.suites: dict[str, str] = {}
        """Digest of the prompts, by suite."""
        for suite in suites:
            self.suites[suite.name] = suite.revision
            for prompt in suite.prompts:
                for turn in prompt.turns:
                    for words in self._pieces(turn):
                        self._suites.setdefault(words, suite.name)

    def suite_of(self, conversation: Conversation) -> str | None:
        """Return the suite that a prompt of the conversation overlaps with, or None."""
        for turn in conversation.turns:
            if turn.role != "assistant":
                for words in self._pieces(turn.content):
                    if words in self._suites:
                        return self._suites[words]
        return None

    def _pieces(self, text: str) -> Iterator[Words]:
        words = WORD.findall(text.lower())
        if words:
            for start in range(max(1, len(words) - self.num_words + 1)):
                yield tuple(words[start : start + self.num_words])


def without_overlap(conversations: Sequence[Conversation], overlap: PromptOverlap, dropped: Counter[str]) -> list[Conversation]:
    """Drop conversations that overlap with the evaluation; `dropped` counts them by suite."""
    kept = []
    for conversation in conversations:
        if suite := overlap.suite_of(conversation):
            dropped[f"prompt that {suite} asks too ({overlap.num_words} words in a row)"] += 1
        else:
            kept.append(conversation)
    return kept


PROSE_SUFFIXES = frozenset({"", ".txt", ".md", ".rst"})
PROSE_TASK = "Continue this text."
NOT_UNICODE = "text with half a surrogate pair, which isn't valid Unicode"

Parsed = tuple[Turn, ...] | str
"""A record's turns, or the reason to drop it."""


def load_conversations(config: DataConfig, overlap: PromptOverlap | None = None) -> tuple[list[Conversation], Counter[str]]:
    """Load the valid conversations of a data set, and count dropped records by reason.

    They keep the data set's order. `config.limit` samples that many by `config.seed`; those with an
    `overlap` with the evaluation are then dropped. Ids are unique, and the same in every run.
    Raises ValueError if the data can't be read, or if nothing is left.
    """
    # 1. Read and parse.
    dropped: Counter[str] = Counter()
    conversations = list(_conversations(config, dropped))
    where = config.path or config.source
    if not conversations:
        raise ValueError(
            f"no conversation of {where} is usable as {config.source!r}; dropped: {describe_drops(dropped)}. Check that "
            "data.source names the form of its records"
        )
    # 2. Sample.
    if config.limit is not None and config.limit < len(conversations):
        chosen = Random(config.seed).sample(range(len(conversations)), config.limit)
        conversations = [conversations[index] for index in sorted(chosen)]
    # 3. Decontaminate.
    if overlap is not None:
        conversations = without_overlap(conversations, overlap, dropped)
        if not conversations:
            raise ValueError(
                f"every prompt of {where} overlaps with the evaluation; dropped: {describe_drops(dropped)}. Train on other "
                "data, evaluate on other suites (eval.suites), or set data.overlap_words=null; results then overestimate"
            )
    return conversations, dropped


def require_data(config: DataConfig) -> None:
    """Read the first record.

    Raises ValueError if the data is missing or unreadable, long before all records are read.
    """
    if config.path is not None and (config.source != "text" or _has_records(config.path)):
        next(iter(_records(config, config.path)))


def describe_drops(dropped: Counter[str]) -> str:
    """Describe the counts of dropped records, most frequent first."""
    return ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common()) or "nothing"


def _parse_alpaca(record: Any) -> Parsed:
    """Parse `{"instruction": ..., "input": ..., "output": ...}`; input is optional."""
    if not isinstance(record, dict):
        return "record is not an object"
    instruction, context, output = record.get("instruction"), record.get("input") or "", record.get("output")
    if not (isinstance(instruction, str) and isinstance(context, str) and isinstance(output, str)):
        return "record without the texts 'instruction' and 'output'"
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    return _checked([("user", question), ("assistant", output)])


def _parse_turns(turns_key: str, record: Any) -> Parsed:
    """Parse a record with a list of turns, as `TURN_KEYS` describes."""
    if not isinstance(record, dict):
        return "record is not an object"
    turns = record.get(turns_key)
    if not isinstance(turns, list):
        return f"record without a list {turns_key!r}"
    role_key, text_key = TURN_KEYS[turns_key]
    pairs: list[tuple[Role, str]] = []
    for turn in turns:
        if not (isinstance(turn, dict) and isinstance(turn.get(role_key), str) and isinstance(turn.get(text_key), str)):
            return f"turn without the texts {role_key!r} and {text_key!r}"
        role = ROLES.get(turn[role_key])
        if role is None:
            return f"unknown role {turn[role_key]!r:.40}"
        pairs.append((role, turn[text_key]))
    return _checked(pairs)


PARSERS: dict[str, Callable[[Any], Parsed]] = {
    "sharegpt": partial(_parse_turns, "conversations"),
    "messages": partial(_parse_turns, "messages"),
    "alpaca": _parse_alpaca,
}


def _checked(pairs: list[tuple[Role, str]]) -> Parsed:
    # Many data sets write an empty system message if there is none.
    pairs = [(role, text) for role, text in pairs if role != "system" or text.strip()]
    roles = [role for role, _ in pairs if role != "system"]
    if not pairs:
        return "no turns"
    if any(has_surrogate(text) for _, text in pairs):
        return NOT_UNICODE
    if not all(text.strip() for _, text in pairs):
        return "empty turn"
    if "assistant" not in roles:
        return "no assistant turn"
    if roles[0] == "assistant":
        return "starts with the assistant"
    return tuple(Turn(role=role, content=text) for role, text in pairs)


def _conversations(config: DataConfig, dropped: Counter[str]) -> Iterator[Conversation]:
    # 1. The standard library, and plain text, are cut into conversations.
    cuts = Cuts(seed=config.seed, prompt_chars=(config.prompt_chars[0], config.prompt_chars[1]))
    if config.source == "stdlib":
        split: Split = config.split  # type: ignore[assignment] # DataConfig has checked it
        yield from code_conversations(split, cuts)
        return
    assert config.path is not None  # DataConfig has checked it
    if config.source == "text":
        for id, task, text in _texts(config, config.path, dropped):
            pieces = list(cut_text(text, cuts, id=id, source=config.path, task=task))
            if not pieces:
                dropped["text too short to be cut into a prompt and an answer"] += 1
            yield from pieces
        return
    # 2. Other sources have records of conversations.
    seen: set[str] = set()
    parse = PARSERS[config.source]
    for index, record in enumerate(_records(config, config.path)):
        turns = parse(record)
        if isinstance(turns, str):
            dropped[turns] += 1
            continue
        yield Conversation(id=_unique_id(record, f"{Path(config.path).name}:{index}", seen), source=config.path, turns=turns)


def _records(config: DataConfig, path: str) -> Iterable[Any]:
    if is_local(path):
        return load_records(path)
    try:
        return load_records(path, split=config.split, subset=config.subset, file=config.file, revision=config.revision)
    except ValueError as error:
        raise ValueError(f"data.path is {path!r}: {error}. Check the name, or give a local file (data.path=FILE)") from error


def _unique_id(record: dict[str, Any], location: str, seen: set[str]) -> str:
    # Some data sets repeat their ids; the location in the file makes them unique.
    record_id = next((record[key] for key in ("id", "prompt_id") if isinstance(record.get(key), str | int)), None)
    if isinstance(record_id, str) and has_surrogate(record_id):
        record_id = None
    id = location if record_id is None else str(record_id) if str(record_id) not in seen else f"{record_id}@{location}"
    seen.add(id)
    return id


def _texts(config: DataConfig, path: str, dropped: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """Yield id, task and text of every piece of a `text` source.

    The source is a directory of files, one file, or records with a text.
    """
    # 1. Records with a text.
    if _has_records(path):
        for index, record in enumerate(_records(config, path)):
            values = [record[key] for key in ("text", "content") if key in record] if isinstance(record, dict) else []
            text = values[0] if values else None
            if not isinstance(text, str):
                dropped["record without a text 'text' or 'content'"] += 1
            elif has_surrogate(text):
                dropped[NOT_UNICODE] += 1
            else:
                yield f"{Path(path).name}:{index}", PROSE_TASK, text
        return
    # 2. Files.
    root = Path(path)
    files = _visible_files(root) if root.is_dir() else [root]
    if not files:
        raise ValueError(f"the directory {root} holds no file. Give a directory of text or source code files")
    for file in files:
        text = read_source(file)
        if text is None:
            dropped["file is not UTF-8 text"] += 1
        else:
            task = PROSE_TASK if file.suffix in PROSE_SUFFIXES else TASK
            yield file.relative_to(root.parent).as_posix(), task, text


def _has_records(path: str) -> bool:
    """Whether the texts of a `text` source are records, and not files of their own."""
    return not is_local(path) or (Path(path).is_file() and path.endswith(SUFFIXES))


def _visible_files(root: Path) -> list[Path]:
    # Hidden folders (.git, .venv) aren't the user's text.
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
