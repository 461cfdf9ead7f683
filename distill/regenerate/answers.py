"""Regenerated answers on disk, as JSON Lines with one file per shard (see `ShardStore`).

`answers-00003.jsonl` holds one example per line; `answers-00003.json` is its `AnswersEntry`. The
same conversations, answered by the same engine with the same seeds, give the same bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...data.conversations import Conversation, Turn
from ...data.files import parse_json, read_json
from ...data.manifest import MANIFEST_FILE, BaseEntry, BaseManifest
from ...data.store import ShardStore
from ...data.types import Example

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpan:
    """Position of an answer among its example's tokens, with its stop token."""

    start: int
    num_tokens: int
    cut: bool
    """Whether the length limit ended it, not the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredExample:
    """The exact tokens that the target read and wrote; text is never tokenized a second time."""

    id: str
    input_ids: list[int]
    answers: list[AnswerSpan]

    def to_example(self) -> Example:
        """Return the example with a loss mask that is True on the answers' tokens only."""
        loss_mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for span in self.answers:
            loss_mask[span.start : span.start + span.num_tokens] = True
        return Example(id=self.id, input_ids=torch.tensor(self.input_ids), loss_mask=loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """Results of answering some conversations.

    There were `num_turns` turns to answer. Each was kept (`num_answers`) or dropped for one reason.
    """

    num_turns: int
    num_answers: int
    num_cut: int
    num_tokens: int
    """Tokens of the kept answers."""
    dropped: dict[str, int]
    """Number of turns without an answer, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersEntry(BaseEntry):
    """One complete shard: its conversations, and the results of answering them."""

    conversation_ids: list[str]
    num_examples: int
    counts: AnswerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFacts:
    """Sampling parameters of the answers."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersManifest(BaseManifest):
    """All answers of one regeneration.

    `max_tokens` bounds prompt and answer together. `linears` are the ways in which the target's and
    the drafter's linear layers are computed (`choose_linears`), by shape. `data_sha256` is
    `conversations_sha256` of all conversations in order.
    """

    chat_template_sha256: str
    sampling: SamplingFacts
    max_tokens: int
    linears: dict[str, str]
    shards: list[AnswersEntry]

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"answers of format version {self.format_version}; this outrider reads {FORMAT_VERSION}. Regenerate them"
            )


def answer_store(directory: Path, data_facts: Mapping[str, Any] | None = None) -> ShardStore[AnswersEntry, AnswersManifest]:
    """Return the store of the answer shards in a folder."""
    return ShardStore(directory, "answers", ".jsonl", AnswersEntry, AnswersManifest, data_facts)


def is_answers(directory: Path) -> bool:
    """Return whether a folder holds shards of answers, not of labels."""
    path = directory / MANIFEST_FILE
    content = read_json(path) if path.exists() else None
    return "chat_template_sha256" in content if isinstance(content, dict) else any(directory.glob("answers-*"))


def conversations_sha256(conversations: Iterable[Conversation]) -> str:
    """Return a digest of the conversations' ids, roles and texts, in order."""
    digest = hashlib.sha256()
    for conversation in conversations:
        tools = [list(conversation.tools)] if conversation.tools else []
        texts = [conversation.text] if conversation.text is not None else []  # of a conversation that the target begins
        digest.update(json.dumps([conversation.id, list(map(_facts, conversation.turns)), *tools, *texts]).encode() + b"\n")
    return digest.hexdigest()


def _facts(turn: Turn) -> list[Any]:
    """Return what a turn says: role and text, and what else it has."""
    defaults = {"reasoning": None, "tool_calls": (), "name": None, "tool_call_id": None}
    more = {name: value for name, default in defaults.items() if (value := getattr(turn, name)) != default}
    return [turn.role, turn.content, *([more] if more else [])]


def write_answers(
    directory: Path, index: int, conversation_ids: list[str], examples: Sequence[AnsweredExample], counts: AnswerCounts
) -> AnswersEntry:
    """Write one shard and then its sidecar, each atomically. A shard may hold no example."""
    data = "".join(json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in examples).encode()
    return answer_store(directory).write(
        index, data, conversation_ids=conversation_ids, num_examples=len(examples), counts=counts
    )


def read_answers(directory: Path, entry: AnswersEntry) -> list[AnsweredExample]:
    """Read the examples of one shard in order, after checking its digest."""
    answer_store(directory).require_intact(entry)
    path = directory / entry.file
    lines = path.read_bytes().splitlines()
    return [parse_json(AnsweredExample, line, path) for line in lines]
