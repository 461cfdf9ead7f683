"""Lessons on disk: lengths of answers, from which later rounds and runs predict.

`answers-00003.lessons.jsonl` has a line for each answer of a shard, also for answers that are
dropped from the examples. `earlier.lessons.jsonl` is a copy of another run's latest lessons
(`distill.lessons`). Shards are answered in rounds, and a round knows the lessons of all rounds
before it. The manifest lists these files when the round begins (`Round`). So the schedule of a
shard depends neither on the process that answers it nor on interruptions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ....data.files import atomic_write_text, parse_json
from ..engine import Answer, Limits, Request
from .buckets import Lesson

LESSONS_SUFFIX = ".lessons.jsonl"
EARLIER_FILE = f"earlier{LESSONS_SUFFIX}"

MOST_LESSONS = 2048
"""Most lessons that a round knows: the latest ones."""

FIRST_ROUND = 4
"""Shards of the first round. Each later round has as many as all rounds before it: a predictor also
learns again when its lessons have doubled. Processes wait for each other between rounds only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonRecord:
    """One line of a file of lessons: an answer's length, and what a predictor reads."""

    prompt_ids: list[int]
    num_known_tokens: int | None
    """Tokens of the data's answer to this prompt."""
    num_tokens: int
    """Tokens of the target's answer."""
    cut: bool
    """Whether the length limit ended it, not the target."""

    @classmethod
    def of(cls, request: Request, answer: Answer) -> "LessonRecord":
        return cls(
            prompt_ids=request.prompt_ids.tolist(),
            num_known_tokens=request.num_known_tokens,
            num_tokens=max(1, len(answer.tokens)),
            cut=answer.cut,
        )

    def lessons(self, limits: Limits) -> list[Lesson]:
        """Return the lesson under today's limits, or none if the prompt leaves no room for an answer.

        An answer that fills its room is complete.
        """
        room = limits.room(len(self.prompt_ids))
        prompt_ids = torch.tensor(self.prompt_ids, dtype=torch.long)
        request = Request(id="lesson", prompt_ids=prompt_ids, seed=0, num_known_tokens=self.num_known_tokens)
        is_complete = not self.cut or self.num_tokens >= room
        lesson = Lesson(request=request, num_tokens=min(self.num_tokens, room), is_complete=is_complete)
        return [lesson] if room > 0 else []


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonsFile:
    """A file of lessons in the folder of the answers, and its digest."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round of shards, and the files of the lessons that it knows."""

    first_shard: int
    """Number of its first shard; it ends where the next round begins."""
    lessons: list[LessonsFile]
    """Files whose latest lessons it knows, the oldest first."""


def plan_rounds(num_shards: int) -> list[range]:
    """Divide shards into rounds. Example: 20 shards are rounds of 4, 4, 8 and 4."""
    rounds, start, end = [], 0, FIRST_ROUND
    while start < num_shards:
        rounds.append(range(start, min(end, num_shards)))
        start, end = end, 2 * end
    return rounds


def write_lessons(path: Path, records: Sequence[LessonRecord]) -> None:
    atomic_write_text(path, "".join(json.dumps(asdict(record)) + "\n" for record in records))


def read_lessons(paths: Sequence[Path]) -> list[LessonRecord]:
    """Read the latest MOST_LESSONS lessons of files in order. Raises ValueError if one is malformed."""
    lines = [(path, line) for path in paths for line in path.read_bytes().splitlines()]
    return [parse_json(LessonRecord, line, path) for path, line in lines[-MOST_LESSONS:]]
