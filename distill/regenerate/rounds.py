"""Rounds of shards, and the lessons that each of them knows (see `lengths.lessons`)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...data.files import sha256_file
from ...data.manifest import MANIFEST_FILE
from ...models.llm.hf_target import HFTarget
from .answers import AnswersManifest, answer_store
from .engine import Limits
from .lengths.buckets import Lesson
from .lengths.lessons import (
    EARLIER_FILE,
    LESSONS_SUFFIX,
    MOST_LESSONS,
    LessonRecord,
    LessonsFile,
    Round,
    read_lessons,
    write_lessons,
)

logger = logging.getLogger(__name__)


def latest_files(folder: Path, before: int | None = None) -> list[Path]:
    """List the files with the latest MOST_LESSONS lessons, of shards `before` one or of all shards.

    Lessons of an earlier run are older than all others.
    """
    store = answer_store(folder)
    shards = sorted(folder.glob(f"{store.stem}-*{LESSONS_SUFFIX}"))
    if before is not None:
        shards = [path for path in shards if path < store.path(before, LESSONS_SUFFIX)]
    files: list[Path] = []
    num_lessons = 0
    for path in reversed([folder / EARLIER_FILE, *shards]):
        if num_lessons < MOST_LESSONS and path.exists():
            num_lessons += len(path.read_bytes().splitlines())
            files.append(path)
    return files[::-1]


def read_earlier(lessons: str | None, target: HFTarget, output_dir: Path) -> list[LessonRecord]:
    """Read the latest lessons of another run's answers (`distill.lessons`).

    Returns none if `output_dir` has a copy of such lessons, or without the option. Raises
    ValueError if the folder has none, or if its target has another tokenizer.
    """
    if lessons is None or (output_dir / EARLIER_FILE).exists():
        return []
    folder = Path(lessons)
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(
            f"distill.lessons is {lessons!r}, and {folder / MANIFEST_FILE} does not exist; give the folder answers/ of a run"
        )
    sha256 = answer_store(folder).load().target.tokenizer_sha256
    if sha256 != target.identity.tokenizer_sha256:
        raise ValueError(
            f"distill.lessons is {lessons!r}, whose target has another tokenizer than {target.identity.name}; give the answers "
            "of a target with the same tokenizer, or leave it out"
        )
    records = read_lessons(latest_files(folder))
    if not records:
        raise ValueError(
            f"distill.lessons is {lessons!r}, which has no lessons (*{LESSONS_SUFFIX}); give the folder answers/ of a run with "
            "the engine batch, or with continuous and a predictor, or leave it out"
        )
    return records


def begin_round(manifest: AnswersManifest, folder: Path, first_shard: int, earlier: Sequence[LessonRecord]) -> AnswersManifest:
    """Return the manifest with the round of `first_shard`, whose lessons were or are now listed.

    `earlier` are lessons of another run; they are copied once into the folder. If a listed file is
    gone, the lessons are listed again, with a warning. Raises ValueError if one was altered.
    """
    # 1. A round that began before knows the lessons that it began with.
    if earlier and not (folder / EARLIER_FILE).exists():
        write_lessons(folder / EARLIER_FILE, earlier)
    listed = next((known for known in manifest.rounds if known.first_shard == first_shard), None)
    if listed is not None:
        paths = {folder / file.file: file.sha256 for file in listed.lessons}
        altered = [path for path, sha256 in paths.items() if path.exists() and sha256_file(path) != sha256]
        if altered:
            raise ValueError(
                f"{altered[0]} was altered: its SHA-256 digest is not the one in the manifest, and answers were scheduled "
                "by its lessons. Restore it, or delete it: the round is then scheduled without it"
            )
        if all(path.exists() for path in paths):
            return manifest
        gone = ", ".join(path.name for path in paths if not path.exists())
        logger.warning("lessons of the round from shard %d are gone: %s; it continues without them", first_shard, gone)
    # 2. Another round lists the latest lessons.
    lessons = [LessonsFile(file=path.name, sha256=sha256_file(path)) for path in latest_files(folder, first_shard)]
    begun = Round(first_shard=first_shard, lessons=lessons)
    logger.info("a round begins at shard %d, with the lessons of %d files", first_shard, len(begun.lessons))
    others = [known for known in manifest.rounds if known.first_shard != first_shard]
    return replace(manifest, rounds=sorted([*others, begun], key=lambda known: known.first_shard))


def known_rounds(folder: Path) -> list[Round]:
    """Read the rounds of a folder's manifest; none before it has one."""
    return answer_store(folder).load().rounds if (folder / MANIFEST_FILE).exists() else []


def lessons_of(rounds: Sequence[Round], folder: Path, shard: int, limits: Limits) -> list[Lesson]:
    """Read the lessons of the round that a shard belongs to; none if no round was listed."""
    begun = [known for known in rounds if known.first_shard <= shard]
    records = read_lessons([folder / lessons.file for lessons in begun[-1].lessons]) if begun else []
    return [lesson for record in records for lesson in record.lessons(limits)]
