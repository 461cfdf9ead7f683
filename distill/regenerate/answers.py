"""Regenerated answers on disk: JSON Lines, a shard a file (see `ShardStore`).

`answers-00003.jsonl` holds an example a line; `answers-00003.json` is its `AnswersEntry`. The same
conversations, answered by the same engine with the same seeds, give the same bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...data.files import parse_json, read_json
from ...data.manifest import MANIFEST_FILE, BaseEntry, BaseManifest
from ...data.store import ShardStore
from ...data.types import Conversation, Example

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpan:
    """Where an answer stands among its example's tokens, its stop token included."""

    start: int
    num_tokens: int
    cut: bool
    """Whether the length limit ended it, and not the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredExample:
    """The very tokens that the target read and wrote: never made from text a second time."""

    id: str
    input_ids: list[int]
    answers: list[AnswerSpan]

    def to_example(self) -> Example:
        """With a loss mask that is True on the answers' tokens only."""
        loss_mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for span in self.answers:
            loss_mask[span.start : span.start + span.num_tokens] = True
        return Example(id=self.id, input_ids=torch.tensor(self.input_ids), loss_mask=loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """What became of the answers of some conversations: `num_turns` were to be answered, each of which is kept (`num_answers`)
    or dropped for one reason."""

    num_turns: int
    num_answers: int
    num_cut: int
    num_tokens: int
    """Of the answers that were kept."""
    dropped: dict[str, int]
    """Turns by the reason why they have no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersEntry(BaseEntry):
    """One complete shard: the conversations it was to answer, and what became of them."""

    conversation_ids: list[str]
    num_examples: int
    counts: AnswerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFacts:
    """How the answers were chosen."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersManifest(BaseManifest):
    """All answers of one regeneration.

    `max_tokens` bounds prompt and answer together; `data_sha256` is `conversations_sha256` of all
    conversations, in order.
    """

    chat_template_sha256: str
    sampling: SamplingFacts
    max_tokens: int
    shards: list[AnswersEntry]

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"answers of format version {self.format_version}; this outrider reads {FORMAT_VERSION}. Regenerate them"
            )


def answer_store(directory: Path) -> ShardStore[AnswersEntry, AnswersManifest]:
    """Return the shards of answers in a folder."""
    return ShardStore(directory, "answers", ".jsonl", AnswersEntry, AnswersManifest)


def is_answers(directory: Path) -> bool:
    """Whether a folder is one of answers, and not of shards."""
    path = directory / MANIFEST_FILE
    content = read_json(path) if path.exists() else None
    return "sampling" in content if isinstance(content, dict) else any(directory.glob("answers-*"))


def conversations_sha256(conversations: Iterable[Conversation]) -> str:
    """A digest of the conversations' ids, roles and texts, in order."""
    digest = hashlib.sha256()
    for conversation in conversations:
        turns = [(turn.role, turn.content) for turn in conversation.turns]
        digest.update(json.dumps([conversation.id, turns]).encode() + b"\n")
    return digest.hexdigest()


def write_answers(
    directory: Path, index: int, conversation_ids: list[str], examples: Sequence[AnsweredExample], counts: AnswerCounts
) -> AnswersEntry:
    """Write one shard and then its sidecar, each whole or not at all. A shard may hold no example."""
    data = "".join(json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in examples).encode()
    return answer_store(directory).write(
        index, data, conversation_ids=conversation_ids, num_examples=len(examples), counts=counts
    )


def read_answers(directory: Path, entry: AnswersEntry) -> list[AnsweredExample]:
    """Read the examples of one shard, in their order, after checking its digest (errors as in `ShardStore.verify`)."""
    answer_store(directory).verify(entry)
    path = directory / entry.file
    lines = path.read_bytes().splitlines()
    return [parse_json(AnsweredExample, line, path) for line in lines]
