"""Conversations that the target begins itself, after Magpie (Xu et al., arXiv 2406.08464, section 2).

An instruct model has learnt texts of questions and answers. Given nothing but the chat template's
opening of a user's turn, it writes a question:

    <|im_start|>system ... <|im_end|> <|im_start|>user  ->  How do plants breathe at night? <|im_end|>

Questions are sampled, and those that fail a filter are left out. Then they are data like any other:
a file of messages, whose answers are regenerated. So no data set is needed, and the drafter learns
the target's own distribution.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from ...data.config import SELF, DataConfig, DataSource
from ...data.conversations import Conversation
from ...data.files import atomic_write_text, write_json
from ...data.questions import near_duplicates
from ...data.sources import describe_drops
from ...models.llm.hf_target import HFTarget
from ..config import DistillConfig
from .answers import AnsweredExample, AnswersEntry, answer_store, read_answers
from .engine import Answer, Engine, Request
from .engines.registry import open_engine, tried_rows
from .run import (
    STATS_FILE,
    answer_all,
    answer_conversations,
    answer_limits,
    missing_conversations,
    total_counts,
)
from .self_dialogues import QUESTION_TOKENS, Opening, Writer

logger = logging.getLogger(__name__)

FEW_KEPT = 0.4
"""Warn if a smaller share of the conversations can be used."""
NUM_SHOWN = 3
"""Conversations that the log shows."""
REPEATED = "question that nearly repeats an earlier one"


@dataclass(frozen=True, slots=True)
class InTwoWays:
    """Engine that samples questions in one way and answers in another. Turns are numbered in the ids."""

    questions: Engine
    answers: Engine

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        for engine, odd in ((self.questions, 0), (self.answers, 1)):
            if chosen := [request for request in requests if int(request.id.rpartition("#")[2]) % 2 == odd]:
                yield from engine.answer(chosen)


class SelfSource:
    """The conversations of one source, which the target begins."""

    def __init__(self, config: DistillConfig, data: DataConfig, source: DataSource, number: int, target: HFTarget) -> None:
        self.config, self.data, self.source, self.target = config, data, source, target
        self.opening = Opening(target)
        # Greedy answers of a run stay as they are; its drafter would slow sampling down.
        self.asking = replace(
            config,
            temperature=source.question_temperature,
            top_k=None,
            top_p=None,
            max_new_tokens=QUESTION_TOKENS,
            drafter=None,
            drafter_settings={},
        )
        # The template has a digest of its own in the manifest. With one turn no answer decides anything.
        more = [source.turns, config.temperature, config.top_k, config.top_p, config.max_new_tokens] if source.turns > 1 else []
        text = json.dumps([source.prefix, *more])
        assert source.count is not None  # DataSource has checked it
        self.items = [Conversation(id=f"{SELF}:{number}:{index}", text=text) for index in range(source.count)]

    def begin(self, item: Conversation) -> Writer:
        """Begin a conversation."""
        limits = answer_limits(self.config, self.data, self.target)
        return Writer(item, self.target, self.opening, self.source, limits, self.config.seed)

    def open(self, stack: ExitStack) -> Engine:
        """Open the engine of questions and answers."""
        limits = answer_limits(self.asking, self.data, self.target)
        questions = stack.enter_context(open_engine(self.asking, self.target, limits))
        if self.source.turns == 1:
            return questions
        limits = answer_limits(self.config, self.data, self.target)
        return InTwoWays(questions, stack.enter_context(open_engine(self.config, self.target, limits)))

    def messages(self, example: AnsweredExample) -> list[dict[str, str]]:
        """Return the turns of a conversation that was written."""
        stops, turns = self.target.stop_ids, list[dict[str, str]]()
        for place, span in enumerate(example.answers):
            tokens = example.input_ids[span.start : span.start + span.num_tokens]
            written = tokens[:-1] if tokens and tokens[-1] in stops else tokens
            if place % 2:
                text: Any = self.target.tokenizer.decode(written, clean_up_tokenization_spaces=False)
                turns.append({"role": "assistant", "content": text})
            else:
                question = self.opening.question(written, self.source.prefix, cut=span.cut)[0]
                turns.append({"role": "user", "content": question})
        return turns

    def records(self, examples: Sequence[AnsweredExample], dropped: Counter[str], asked: list[str]) -> list[dict[str, Any]]:
        """Return the conversations as records, without near-duplicates of an earlier first question.

        `asked` are the first questions of the sources before this one; those of this source join them.
        """
        records: list[dict[str, Any]] = [
            {"id": example.id.rpartition("#")[0], "messages": self.messages(example)} for example in examples
        ]
        repeated = near_duplicates([*map(first_question, records)], asked)
        dropped[REPEATED] += sum(repeated)
        kept = [record for record, again in zip(records, repeated, strict=True) if not again]
        asked += map(first_question, kept)
        return kept


def first_question(record: Mapping[str, Any]) -> str:
    """Return the first question of a written record."""
    return str(record["messages"][0]["content"])


def require_openings(data: DataConfig, target: HFTarget) -> None:
    """Raise ValueError for a chat template or a prefix with which the target can't begin conversations."""
    for source in data.all_sources:
        if source.source == SELF:
            Opening(target).require_prefix(source.prefix)


def write_conversations(
    config: DistillConfig, data: DataConfig, target: HFTarget, output_dir: Path, accelerator: Accelerator
) -> DataConfig:
    """Return `data` with files of messages in place of its sources `self`, which the target writes.

    `output_dir` keeps them, a folder for each source. As with answers, an interrupted run resumes.
    Raises ValueError if the folder holds another run's questions, if the target's chat template
    doesn't fit, or if no question can be used.
    """
    asked = list[str]()

    def path_of(number: int, source: DataSource) -> Path:
        folder = output_dir / str(number)
        written = SelfSource(config, data, source, number, target)
        answer_all(
            written.asking,
            data,
            target,
            written.items,
            folder,
            accelerator,
            begin=written.begin,
            open=lambda drafter, stack: written.open(stack),
            unit="question",
        )
        path = folder.with_suffix(".jsonl")
        if accelerator.is_main_process:
            _write_records(written, folder, path, asked)
        accelerator.wait_for_everyone()
        return path

    return with_files(data, path_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedQuestions:
    """The time that missing conversations will take, by a sample of them."""

    num_missing: int
    num_sampled: int
    num_kept: int
    seconds: float


def sample_conversations(
    config: DistillConfig, data: DataConfig, target: HFTarget, output_dir: Path, scratch: Path
) -> tuple[DataConfig, list[PlannedQuestions]]:
    """Return `data` as `write_conversations` would, with a sample in `scratch` repeated to the full number.

    Sources that are written already keep their files.
    """
    planned, asked = list[PlannedQuestions](), list[str]()

    def path_of(number: int, source: DataSource) -> Path:
        # 1. Sources that are written.
        written, folder = SelfSource(config, data, source, number, target), output_dir / str(number)
        missing = missing_conversations(written.asking, data, target, written.items, folder)
        if not missing and (path := folder.with_suffix(".jsonl")).exists():
            return path
        # 2. A sample of the others.
        sample = written.items[: tried_rows(config, target, data.max_length)]
        target.choose_linears()
        with ExitStack() as stack, tqdm(disable=True) as progress:
            engine, started = written.open(stack), time.perf_counter()
            examples, counts = answer_conversations(list(map(written.begin, sample)), engine, progress)
            seconds = (time.perf_counter() - started) * len(missing) / len(sample)
        target.plain_linears()
        dropped = Counter(counts.dropped)
        if not (kept := written.records(examples, dropped, asked)):
            raise _useless(len(sample), dropped)
        planned.append(PlannedQuestions(num_missing=len(missing), num_sampled=len(sample), num_kept=len(kept), seconds=seconds))
        repeated = [kept[index % len(kept)] for index in range(max(1, len(written.items) * len(kept) // len(sample)))]
        path = scratch / f"{number}.jsonl"
        path.write_text("".join(json.dumps({**record, "id": f"{index}"}) + "\n" for index, record in enumerate(repeated)))
        return path

    return with_files(data, path_of), planned


def with_files(data: DataConfig, path_of: Callable[[int, DataSource], Path]) -> DataConfig:
    """Return `data` with files of messages in place of its sources `self`: `path_of(number, source)`."""
    sources = [
        DataSource(source="messages", path=str(path_of(number, source)), weight=source.weight)
        if source.source == SELF
        else source
        for number, source in enumerate(data.all_sources)
    ]
    if data.sources or data.source != SELF:
        return replace(data, sources=sources) if data.sources else data
    names = ("source", "path", "count", "turns", "prefix", "question_temperature")
    return replace(data, **{name: getattr(sources[0], name) for name in names})


def _write_records(written: SelfSource, folder: Path, path: Path, asked: list[str]) -> None:
    """Write the usable conversations of all shards as records, and report them. For `asked` see `SelfSource.records`."""
    shards: Sequence[AnswersEntry] = answer_store(folder).load().shards
    _, dropped = total_counts(shards)
    examples = [example for entry in shards for example in read_answers(folder, entry)]
    records = written.records(examples, dropped, asked)
    begun = len(written.items)
    if not records:
        raise _useless(begun, dropped)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if path.exists() and path.read_bytes() != text.encode():
        logger.warning(
            "%s was altered, and is written again; to use your version, set data.source=messages data.path=COPY", path
        )
    atomic_write_text(path, text)
    statistics = {"num_begun": begun, "num_kept": len(records), "dropped": dict(dropped.most_common())}
    write_json(folder / STATS_FILE, statistics | {"sha256": hashlib.sha256(text.encode()).hexdigest()})
    logger.info("%d of %d begun conversations are used | dropped: %s", len(records), begun, describe_drops(+dropped))
    for record in records[:NUM_SHOWN]:
        logger.info("  such as: %.160s", first_question(record).replace("\n", " "))
    if len(records) < FEW_KEPT * begun:
        logger.warning("that is a small part of them: lower data.question_temperature, or check data.chat_template")


def _useless(begun: int, dropped: Counter[str]) -> ValueError:
    return ValueError(
        f"data.source is {SELF}, and none of {begun} conversations that the target began can be used: "
        f"{describe_drops(+dropped)}. Lower data.question_temperature, or give data of another source: a base model, which "
        "isn't trained on instructions, can't ask"
    )
