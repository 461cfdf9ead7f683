"""Regenerated answers on disk: JSON Lines, a shard a file, each with a sidecar that says it is complete.

`answers-00003.jsonl` holds an example a line; `answers-00003.json` is its `AnswersEntry`, written after it. A file without a
sidecar doesn't count. The same conversations, answered by the same engine with the same seeds, give the same bytes.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from ...data.files import (
    atomic_write_bytes,
    parse_json,
    read_dataclass,
    read_json,
    read_sealed,
    sha256_file,
    write_json,
    write_sealed,
)
from ...data.manifest import MANIFEST_FILE, TargetIdentity
from ...data.types import Conversation, Example
from ...data.verify import read_sidecars

FORMAT_VERSION = 1
REMEDY = "Choose another output directory, or delete this one to regenerate anew"


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
class AnswersEntry:
    """One complete shard: its file and digest, the conversations it was to answer, and what became of them."""

    index: int
    file: str
    sha256: str
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
class AnswersManifest:
    """All answers of one regeneration.

    `target_dtype` is the type that the target computed in; `max_tokens` bounds prompt and answer together; `data_sha256` is
    `conversations_sha256` of all conversations, in order, and `plan_sha256` a digest of which of them go into which shard;
    `complete` is False until every shard is there.
    """

    format_version: int = FORMAT_VERSION
    target: TargetIdentity
    target_dtype: str
    chat_template_sha256: str
    sampling: SamplingFacts
    max_tokens: int
    data_sha256: str
    plan_sha256: str
    shards: list[AnswersEntry]
    complete: bool

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"answers of format version {self.format_version}; this outrider reads {FORMAT_VERSION}. Regenerate them"
            )

    def differences(self, other: "AnswersManifest") -> list[str]:
        """What makes `other` another regeneration, each as "field: ours, theirs"."""
        found = [f"target.{difference}" for difference in self.target.differences(other.target)]
        found += _differences(
            "", self, other, ("target_dtype", "chat_template_sha256", "max_tokens", "data_sha256", "plan_sha256")
        )
        return found + _differences("distill.", self.sampling, other.sampling, [field.name for field in fields(SamplingFacts)])


def save_answers_manifest(directory: Path, manifest: AnswersManifest) -> None:
    """Write `manifest.json`, whole or not at all, with a digest of what it says."""
    write_sealed(directory / MANIFEST_FILE, manifest)


def load_answers_manifest(directory: Path) -> AnswersManifest:
    """Read `manifest.json`. Raises ValueError where it is missing, malformed or altered, or has unknown or missing keys."""
    return read_sealed(AnswersManifest, directory / MANIFEST_FILE)


def is_answers(directory: Path) -> bool:
    """Whether a folder is one of answers, and not of shards."""
    path = directory / MANIFEST_FILE
    content = read_json(path) if path.exists() else None
    return "sampling" in content if isinstance(content, dict) else any(directory.glob("answers-*"))


def require_same_answers(directory: Path, manifest: AnswersManifest) -> None:
    """Raise ValueError, naming every differing field, where `directory` holds answers of another regeneration than `manifest`
    describes."""
    if not (directory / MANIFEST_FILE).exists():
        if any(directory.glob("answers-*")):
            raise ValueError(f"{directory} holds answers but no {MANIFEST_FILE}, so nobody knows whose they are. {REMEDY}")
        return
    found = load_answers_manifest(directory)
    if differences := found.differences(manifest):
        if found.data_sha256 == manifest.data_sha256 and found.plan_sha256 != manifest.plan_sha256:
            differences.append("the same conversations in shards of another size: set distill.shard_examples back")
        raise ValueError(
            f"{directory} holds the answers of another run. Differing (there, here): {'; '.join(differences)}. {REMEDY}"
        )


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
    path = directory / f"{_stem(index)}.jsonl"
    atomic_write_bytes(path, data)
    entry = AnswersEntry(
        index=index,
        file=path.name,
        sha256=hashlib.sha256(data).hexdigest(),
        conversation_ids=conversation_ids,
        num_examples=len(examples),
        counts=counts,
    )
    write_json(_sidecar(directory, index), asdict(entry))
    return entry


def read_answers_entry(directory: Path, index: int) -> AnswersEntry | None:
    """The sidecar of shard `index`, or None where there is none yet. A malformed sidecar is a ValueError."""
    path = _sidecar(directory, index)
    if not path.exists():
        return None
    try:
        return read_dataclass(AnswersEntry, path)
    except ValueError as error:
        raise ValueError(
            f"{error}. Delete {path}, then run the stage distill again: it makes just these answers anew"
        ) from error


def is_written(directory: Path, index: int) -> bool:
    """Whether shard `index` was finished: its sidecar, which is written last, is there."""
    return _sidecar(directory, index).exists()


def verify_answers(directory: Path, entry: AnswersEntry) -> None:
    """Raise ValueError, with the remedy, where the shard's file is missing, cut or altered."""
    path = directory / entry.file
    if path.exists() and sha256_file(path) == entry.sha256:
        return
    problem = "were cut or altered: their SHA-256 digest is not the recorded one" if path.exists() else "are missing"
    raise ValueError(
        f"the answers {path} {problem}. Delete {path.name} and {_sidecar(directory, entry.index).name}, then run the stage "
        "distill again: it makes just these answers anew"
    )


def read_answers(directory: Path, entry: AnswersEntry) -> list[AnsweredExample]:
    """The examples of one shard, in their order, after checking its digest (errors as in `verify_answers`)."""
    verify_answers(directory, entry)
    path = directory / entry.file
    lines = path.read_bytes().splitlines()
    return [parse_json(AnsweredExample, line, path) for line in lines]


def find_damage(directory: Path) -> tuple[AnswersManifest, list[str]]:
    """The manifest of the answers in `directory`, and what is wrong with them, each with its remedy; of an unfinished
    regeneration, the answers that are there. Raises ValueError where there is no manifest, or it can't be read."""
    manifest = load_answers_manifest(directory)
    problems: list[str] = []
    entries = manifest.shards if manifest.complete else read_sidecars(AnswersEntry, directory, "answers-*[0-9].json", problems)
    if not manifest.complete:
        problems.append(
            f"the regeneration is not complete ({len(entries)} shards are there); run the stage distill again, which goes on "
            "from there"
        )
    ids: Counter[str] = Counter()
    for entry in entries:
        path = directory / entry.file
        try:
            if read_answers_entry(directory, entry.index) != entry:
                raise ValueError(
                    f"{_sidecar(directory, entry.index)} is missing, or doesn't say of its answers what {MANIFEST_FILE} says. "
                    "Delete it, then run the stage distill again: it makes just these answers anew"
                )
            examples = read_answers(directory, entry)
        except (ValueError, OSError) as error:
            problems.append(str(error))
            continue
        ids.update(example.id for example in examples)
        problems += [f"{path} {problem}. {REMEDY}" for problem in _contradictions(entry, examples, manifest)]
    if doubled := [id for id, count in ids.items() if count > 1]:
        problems.append(f"{len(doubled)} examples are there twice, such as {doubled[0]!r}. {REMEDY}")
    known = {entry.file for entry in entries} | {_sidecar(directory, entry.index).name for entry in entries}
    strays = [path for path in sorted(directory.glob("answers-*[0-9].json*")) if path.name not in known]
    problems += [f"{path} belongs to no answers of this regeneration; delete it" for path in strays if manifest.complete]
    return manifest, problems


def _contradictions(entry: AnswersEntry, examples: Sequence[AnsweredExample], manifest: AnswersManifest) -> list[str]:
    """What the answers say against their entry and the manifest: a digest only tells that the bytes are those written."""
    problems = []
    spans = [span for example in examples for span in example.answers]
    said = (len(examples), len(spans), sum(span.num_tokens for span in spans))
    told = (entry.num_examples, entry.counts.num_answers, entry.counts.num_tokens)
    if said != told:
        problems.append(f"has {said} examples, answers and tokens of answers, not {told}")
    for example in examples:
        ids = example.input_ids
        if any(span.start < 0 or span.num_tokens < 1 or span.start + span.num_tokens > len(ids) for span in example.answers):
            problems.append(f"has answers outside the text of {example.id!r}")
        if min(ids, default=-1) < 0 or max(ids) >= manifest.target.vocab_size:
            problems.append(f"has tokens outside the target's vocabulary of {manifest.target.vocab_size} in {example.id!r}")
    return problems


def stats_path(directory: Path, index: int) -> Path:
    """Where the seconds that a shard took are noted: apart from it, since they differ from run to run."""
    return directory / f"{_stem(index)}.stats.json"


def _differences(prefix: str, ours: object, theirs: object, names: Sequence[str]) -> list[str]:
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return [f"{prefix}{name}: {our}, {their}" for name, our, their in pairs if our != their]


def _stem(index: int) -> str:
    return f"answers-{index:05d}"


def _sidecar(directory: Path, index: int) -> Path:
    return directory / f"{_stem(index)}.json"
