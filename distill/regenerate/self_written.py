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
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from ...data.chat import TEMPLATE_ERRORS, ChatTemplate, RejectedPromptError, describe_error, encode_prompt
from ...data.config import SELF, DataConfig, DataSource
from ...data.conversations import Conversation, Turn
from ...data.files import atomic_write_text, write_json
from ...data.loops import ends_in_a_loop
from ...data.questions import fault_of, near_duplicates
from ...data.sources import describe_drops
from ...data.store import describe_data
from ...data.template_options import DATE
from ...models.llm.hf_target import HFTarget
from ...models.llm.tensor_parallel import Worker
from ..config import DistillConfig
from ..plan import plan_shards, run_shards
from .answers import AnsweredExample, AnswersEntry, AnswerSpan, answer_store, read_answers
from .dialogues import AFTER_CUT, EMPTY, LOOP, answer_seed
from .engine import Answer, Engine, Limits, Request
from .engines.registry import open_engine
from .run import (
    STATS_FILE,
    answer_conversations,
    answer_limits,
    answer_shards,
    begin_answers,
    missing_conversations,
    total_counts,
)

logger = logging.getLogger(__name__)

QUESTION_TOKENS = 256
"""Most tokens of a question. One that is longer has lost its way, and is left out."""
QUESTION = "qZ7vX3k"
"""Stands in the place of a question when the template is tried."""
FIRST_WORD = re.compile(r"\W*\w+[^\w\s<\[]*")
"""First word, with marks before it: of `### Response: ` that is `### Response:`."""
FEW_KEPT = 0.4
"""Warn if a smaller share of the conversations can be used."""
NUM_SHOWN, NUM_SAMPLED = 3, 16
"""Conversations that the log shows, and that a plan tries."""
UNENDED = f"question that doesn't end within {QUESTION_TOKENS} tokens"
LOOPED = "question that ends in a loop"
REPEATED = "question that nearly repeats an earlier one"
LATER = "behind a question or an answer that can't be used"


class Opening:
    """What the chat template writes before a user's question, and behind it."""

    def __init__(self, target: HFTarget) -> None:
        self._template, self._tokenizer = ChatTemplate(target.tokenizer), target.tokenizer
        try:
            first, behind = self._parts([])
        except TEMPLATE_ERRORS as error:
            raise ValueError(
                f"data.source is {SELF}, and {self._template} fails for a question ({describe_error(error)}); set "
                "data.chat_template to another, or give data"
            ) from error
        if not first.strip() or not behind.strip():
            side = "before" if not first.strip() else "behind"
            raise ValueError(
                f"data.source is {SELF}, and {self._template} writes nothing {side} a user's question, so the target can't see "
                f"where it {'begins' if side == 'before' else 'ends'}; set data.chat_template to another, or give data"
            )
        added = {str(token) for token in target.tokenizer.added_tokens_decoder.values() if token.special}
        self._marks = sorted({*added, *target.tokenizer.all_special_tokens})
        behind = behind.strip()
        starts = [mark for mark in map(str, target.tokenizer.added_tokens_decoder.values()) if mark and behind.startswith(mark)]
        first_word = FIRST_WORD.match(behind)
        self.end = max(starts, key=len) if starts else first_word[0] if first_word else behind
        """What ends a question where the target writes on: the beginning of what stands behind it."""

    def _parts(self, turns: Sequence[Turn]) -> tuple[str, str]:
        text = self._template.prompt([*turns, Turn(role="user", content=QUESTION)])
        if text.count(QUESTION) != 1:
            raise ValueError(f"a question must stand in its text once, unchanged; it stands there {text.count(QUESTION)} times")
        before, _, behind = text.partition(QUESTION)
        return before, behind

    def text(self, turns: Sequence[Turn], prefix: str) -> str:
        """Return the text up to a question that begins with `prefix`. Raises an error of TEMPLATE_ERRORS."""
        # A blank at the end would be a token of its own, which the target has rarely read there.
        return (self._parts(turns)[0] + prefix).rstrip(" ")

    def question(self, written: Sequence[int], prefix: str, *, cut: bool) -> tuple[str, str | None]:
        """Return a question of the tokens that the target wrote behind its prefix, and why it can't be used."""
        # Decoded with the prefix: some tokenizers leave out a blank at the beginning.
        begun = self._tokenizer(prefix.rstrip(" "), add_special_tokens=False).input_ids
        text: Any = self._tokenizer.decode([*begun, *written], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text, end, _ = text.partition(self.end)
        question = text.strip()
        if not end and ends_in_a_loop(written):
            return question, LOOPED
        if cut and not end:
            return question, UNENDED
        if any(mark in question for mark in self._marks):
            return question, "question with a special token"
        return question, fault_of(question, prefix)


class Writer:
    """A conversation whose questions and answers the target writes in turn (see `InTurns`).

    Its one example holds the tokens of all turns, one span each; the prompts between them aren't kept.
    """

    def __init__(
        self, conversation: Conversation, target: HFTarget, opening: Opening, source: DataSource, limits: Limits, seed: int
    ) -> None:
        self.id = conversation.id
        self.examples: list[AnsweredExample] = []
        self.dropped: Counter[str] = Counter()
        self.num_turns = 2 * source.turns - 1
        self._target, self._opening, self._prefix, self._limits, self._seed = target, opening, source.prefix, limits, seed
        self._messages: list[Turn] = []
        self._tokens: list[int] = []
        self._spans: list[AnswerSpan] = []
        self._turn = 0

    @property
    def num_done(self) -> int:
        return self._turn

    def next_request(self) -> Request | None:
        if self._turn == self.num_turns:
            return None
        tokenizer = self._target.tokenizer
        try:
            if self._turn % 2:
                prompt = encode_prompt(self._messages, tokenizer)[0]
            else:
                text = self._opening.text(self._messages, self._prefix)
                prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        except (RejectedPromptError, *TEMPLATE_ERRORS) as error:
            self._end(f"rejected by the chat template ({error})")
            return None
        if self._limits.room(len(prompt)) < 1:
            self._end("no room for another turn")
            return None
        return Request(id=f"{self.id}#{self._turn}", prompt_ids=prompt, seed=answer_seed(self._seed, self.id, self._turn))

    def take(self, answer: Answer) -> None:
        tokens = answer.tokens.tolist()
        written = tokens[:-1] if tokens and tokens[-1] in self._target.stop_ids else tokens
        fault: str | None
        if self._turn % 2:
            decoded: Any = self._target.tokenizer.decode(written, clean_up_tokenization_spaces=False)
            text, looped = str(decoded), ends_in_a_loop(written)
            fault = EMPTY if not text.strip() else LOOP if looped else AFTER_CUT if answer.cut else None
        else:
            text, fault = self._opening.question(written, self._prefix, cut=answer.cut)
        if fault:
            self._end(fault)
            return
        self._spans.append(AnswerSpan(start=len(self._tokens), num_tokens=len(tokens), cut=answer.cut))
        self._tokens += tokens
        self._messages.append(Turn(role="assistant" if self._turn % 2 else "user", content=text))
        self._turn += 1
        if self._turn == self.num_turns:
            self._close()

    def _end(self, reason: str) -> None:
        self.dropped[reason] += 1
        if rest := self.num_turns - self._turn - 1:
            self.dropped[LATER] += rest
        self._turn = self.num_turns
        self._close()

    def _close(self) -> None:
        if self._spans:
            self.examples = [AnsweredExample(id=f"{self.id}#0", input_ids=self._tokens, answers=self._spans)]


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
        # A template that writes today's date gives another text tomorrow, and the run must still resume.
        first = source.prefix if DATE in str(target.tokenizer.chat_template) else self.opening.text([], source.prefix)
        more = [source.turns, config.temperature, config.top_k, config.top_p, config.max_new_tokens] if source.turns > 1 else []
        text = first if not more else f"{first}\0{more}"
        assert source.count is not None  # DataSource has checked it
        self.items = [Conversation(id=f"{SELF}:{number}:{index}", source=SELF, text=text) for index in range(source.count)]

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
        plain = replace(self.config, drafter=None, drafter_settings={})
        return InTwoWays(questions, stack.enter_context(open_engine(plain, self.target, limits)))

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

    def records(self, examples: Sequence[AnsweredExample], dropped: Counter[str]) -> list[dict[str, Any]]:
        """Return the conversations as records, without near-duplicates of an earlier first question."""
        records: list[dict[str, Any]] = [
            {"id": example.id.rpartition("#")[0], "messages": self.messages(example)} for example in examples
        ]
        repeated = near_duplicates(record["messages"][0]["content"] for record in records)
        dropped[REPEATED] += sum(repeated)
        return [record for record, again in zip(records, repeated, strict=True) if not again]


def write_conversations(
    config: DistillConfig, data: DataConfig, target: HFTarget, output_dir: Path, accelerator: Accelerator
) -> DataConfig:
    """Return `data` with files of messages in place of its sources `self`, which the target writes.

    `output_dir` keeps them, a folder for each source. As with answers, an interrupted run resumes.
    Raises ValueError if the folder holds another run's questions, if the target's chat template
    doesn't fit, or if no question can be used.
    """

    def path_of(number: int, source: DataSource) -> Path:
        folder = output_dir / str(number)
        written = SelfSource(config, data, source, number, target)
        _write(written, folder, accelerator)
        path = folder.with_suffix(".jsonl")
        if accelerator.is_main_process:
            _write_records(written, folder, path)
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
    planned = list[PlannedQuestions]()

    def path_of(number: int, source: DataSource) -> Path:
        # 1. Sources that are written.
        written, folder = SelfSource(config, data, source, number, target), output_dir / str(number)
        missing = missing_conversations(written.asking, data, target, written.items, folder)
        if not missing and (path := folder.with_suffix(".jsonl")).exists():
            return path
        # 2. A sample of the others.
        sample = written.items[: config.decode_batch_size or NUM_SAMPLED]
        target.choose_linears()
        with ExitStack() as stack, tqdm(disable=True) as progress:
            engine, started = written.open(stack), time.perf_counter()
            examples, counts = answer_conversations(list(map(written.begin, sample)), engine, progress)
            seconds = (time.perf_counter() - started) * len(missing) / len(sample)
        target.plain_linears()
        dropped = Counter(counts.dropped)
        if not (kept := written.records(examples, dropped)):
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


def _write(written: SelfSource, folder: Path, accelerator: Accelerator) -> None:
    """Write the shards of a source that are missing."""
    config, data, target = written.asking, written.data, written.target
    plan, store = plan_shards(written.items, config.shard_examples), answer_store(folder)
    facts = describe_data(data, target.tokenizer.chat_template)
    manifest, _ = begin_answers(config, data, target, plan, store, accelerator, facts)
    worker = Worker.of(accelerator, tensor_parallel=target.tensor_parallel and config.engine != "openai")

    def make(shards: Mapping[int, Sequence[Conversation]], progress: tqdm) -> None:
        with ExitStack() as stack:
            answer_shards(shards, written.begin, written.open(stack), str(config.engine), folder, progress, worker)

    run_shards(
        store,
        manifest,
        plan,
        accelerator,
        worker,
        num_units=lambda items: len(items) * (2 * written.source.turns - 1),
        make=make,
        finish=lambda entries: None,
        unit="question",
        data_facts=facts,
    )
    target.plain_linears()


def _write_records(written: SelfSource, folder: Path, path: Path) -> None:
    """Write the usable conversations of all shards as records, and report them."""
    shards: Sequence[AnswersEntry] = answer_store(folder).load().shards
    _, dropped = total_counts(shards)
    records = written.records([example for entry in shards for example in read_answers(folder, entry)], dropped)
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
        logger.info("  such as: %.160s", record["messages"][0]["content"].replace("\n", " "))
    if len(records) < FEW_KEPT * begun:
        logger.warning("that is a small part of them: lower data.question_temperature, or check data.chat_template")


def _useless(begun: int, dropped: Counter[str]) -> ValueError:
    return ValueError(
        f"data.source is {SELF}, and none of {begun} conversations that the target began can be used: "
        f"{describe_drops(+dropped)}. Lower data.question_temperature, or give data of another source: a base model, which "
        "isn't trained on instructions, can't ask"
    )
