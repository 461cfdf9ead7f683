"""Timing of plain decoding and drafters: interleaved, through the same decode loop."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...data.chat import encode_prompt
from ...data.differences import differences
from ...data.suites import Prompt, PromptSet
from ...data.types import Turn
from ...models.decoding.protocols import AcceptanceRule, Drafter
from ...models.target import cuda_graphs
from ...models.target.hf_target import HFTarget
from ..config import EvalConfig
from ..records.names import OOM
from ..records.records import BASELINE, EvalRecord, RecordFile, RecordKey
from ..records.run_files import Environment, OutOfMemory, Place
from .memory import within_memory
from .timing import Generation, time_generation
from .turns import Method, PromptTurn, TurnBatch, answer_seed, evenly_spaced
from .warm_up import num_recordings, reachable_sizes, shapes_of, text_lengths, visit

logger = logging.getLogger(__name__)

WARMUP_NEW_TOKENS = 32
T = TypeVar("T")
Pass = tuple[PromptSet, Sequence[Prompt], int, int, bool]
"""One pass of every method over some prompts: suite, prompts to answer, batch size, repeat,
profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measurements of one run: the settings that stay fixed, and the file that records go to.

    `rules` are by temperature. `methods` are by temperature and batch size, and include the
    baseline. The baseline's first answer to a turn becomes part of the next turn's prompt for every
    method. So a lossy method can't change its own prompts.
    """

    target: HFTarget
    tokenizer: PreTrainedTokenizerBase
    rules: Mapping[float, AcceptanceRule]
    methods: Mapping[Place, Sequence[Method]]
    config: EvalConfig
    context_length: int
    """Tokens, prompt and answer together, that the target and all drafters can read."""
    file: RecordFile
    config_digest: str
    environment: Environment
    recorded_environment: Environment
    """The environment in which the run started. New records must come from the same one."""
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    """Methods that ran out of memory. This run doesn't try them again. Where plain decoding doesn't
    fit, there is no baseline, so all methods are listed."""
    without_profile: list[OutOfMemory] = field(default_factory=list)
    """Methods that fit with the phase timers off but not with them on. Their figures stay, and
    their profile isn't tried again."""
    warnings: set[str] = field(default_factory=set)
    """Warnings that this run has already logged; each is logged once."""

    def measure(self, suites: Sequence[PromptSet]) -> None:
        """Measure all answers that the records lack, except those that don't fit into memory.

        A KeyboardInterrupt is raised again, with the number of answers that are kept.
        """
        passes = self._passes(suites)
        num_answers = sum(
            len(prompt.turns) * len(self.methods[temperature, size])
            for _, prompts, size, *_ in passes
            for prompt in prompts
            for temperature in self.rules
        )
        try:
            self._measure(suites, passes, num_answers)
        except KeyboardInterrupt:
            kept = f"{len(self.file.records)} of {num_answers} answers are kept in {self.file.path}."
            raise KeyboardInterrupt(kept) from None

    def _measure(self, suites: Sequence[PromptSet], passes: Sequence[Pass], num_answers: int) -> None:
        warm_length = 0  # texts up to this length need no further warm-up
        with tqdm(total=num_answers, desc="eval", unit="answer") as progress:
            for batch, method, repeat, profiled in self._plan(passes):
                progress.update(len(batch.turns))
                if all(_key(turn, method.name, repeat, profiled) in self.file.records for turn in batch.turns):
                    continue
                # 1. Warm up, when this batch's texts are longer than all before.
                length = max(map(len, batch.input_ids)) + self.config.max_new_tokens
                if length > warm_length:
                    warm_length = self._prepare(suites, batch.turns[0].suite, length, profiled)
                    if not self._fits(batch.turns[0], method, profiled):
                        continue
                # 2. Measure the batch, and write its records together.
                answer = partial(self._records, batch, method, repeat, profiled)
                if (records := self._within_memory(batch, method, answer, profiled)) is None:
                    warm_length = 0  # all caches were released
                else:
                    self.file.append(*records)
            progress.total = progress.n  # the remaining answers were too long, or ran out of memory

    def _passes(self, suites: Sequence[PromptSet]) -> list[Pass]:
        """List the passes that measure everything.

        Profiled passes consist of whole batches only, since a smaller batch takes a different time.
        """
        sizes, num_profiled = self.config.batch_sizes, self.config.profile_prompts
        passes: list[Pass] = [
            (suite, suite.prompts, size, repeat, False)
            for repeat in range(self.config.repeats)
            for suite in suites
            for size in sizes
        ]
        return passes + [
            (suite, evenly_spaced(suite.prompts, math.ceil(num_profiled / size) * size), size, 0, True)
            for suite in suites
            for size in sizes
        ]

    def _plan(self, passes: Iterable[Pass]) -> Iterator[tuple[TurnBatch, Method, int, bool]]:
        """Yield every batch at every temperature with every method, interleaved.

        The first method changes from group to group, in rotation. The plan is lazy for two reasons:
        a second turn needs the baseline's answer to the first, and methods that ran out of memory
        are skipped from then on.
        """
        for suite, prompts, size, repeat, profiled in passes:
            for index, group in enumerate(self._groups(suite, prompts, size)):
                for temperature in self.rules:
                    methods = self.methods[temperature, size]
                    first = (index + repeat) % len(methods)
                    batches = self._batches(suite, group, index, temperature, size)
                    while self._fits_at(suite, temperature, size, BASELINE) and (batch := next(batches, None)) is not None:
                        for method in (*methods[first:], *methods[:first]):
                            if self._fits_at(suite, temperature, size, method.name, profiled):
                                yield batch, method, repeat, profiled

    def _groups(self, suite: PromptSet, prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
        """Yield groups of `size` prompts that have room for an answer.

        The last group may be smaller.
        """
        temperature = next(iter(self.rules))  # a first turn is the same at all temperatures
        fitting = (
            prompt for prompt in prompts if next(self.prompt_turns(suite, prompt, temperature, size)).input_ids is not None
        )
        while group := list(islice(fitting, size)):
            yield group

    def _batches(
        self, suite: PromptSet, group: Sequence[Prompt], index: int, temperature: float, size: int
    ) -> Iterator[TurnBatch]:
        """Yield a group's first turns, its second turns, and so on."""
        rows = [self.prompt_turns(suite, prompt, temperature, size) for prompt in group]
        for together in zip_longest(*rows):
            remaining = [(turn, turn.input_ids[0]) for turn in together if turn is not None and turn.input_ids is not None]
            if remaining:
                turns, input_ids = zip(*remaining, strict=True)
                yield TurnBatch(index=index, turns=turns, input_ids=input_ids)

    def prompt_turns(self, suite: PromptSet, prompt: Prompt, temperature: float, batch_size: int) -> Iterator[PromptTurn]:
        """Yield the turns of a prompt.

        The caller must record the baseline's answer to a turn at this temperature and batch size
        before it requests the next turn.
        """
        messages: list[Turn] = []
        fits = True
        for index, text in enumerate(prompt.turns):
            messages.append(Turn(role="user", content=text))
            input_ids = encode_prompt(messages, self.tokenizer).to(self.target.device) if fits else None
            fits = input_ids is not None and self._has_room(input_ids, suite, prompt)
            turn = PromptTurn(
                suite=suite,
                prompt=prompt,
                turn=index,
                temperature=temperature,
                batch_size=batch_size,
                input_ids=input_ids if fits else None,
            )
            yield turn
            if fits and index + 1 < len(prompt.turns):
                answer = self.file.records[_key(turn, BASELINE, 0, False)].token_ids
                messages.append(Turn(role="assistant", content=self._text(answer)))

    def _text(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one answer, not a batch of them
        return text

    def _has_room(self, input_ids: Int[torch.Tensor, "1 seq"], suite: PromptSet, prompt: Prompt) -> bool:
        num_tokens = input_ids.shape[1] + self.config.max_new_tokens
        fits = num_tokens <= self.context_length
        if not fits and self.config.too_long == "error":
            raise ValueError(
                f"prompt {prompt.id!r} of {suite.name} leaves no room: {input_ids.shape[1]} tokens and "
                f"{self.config.max_new_tokens} new ones exceed the context window of "
                f"{self.context_length} tokens; lower max_new_tokens, or set too_long to skip"
            )
        return fits

    def _prepare(self, suites: Sequence[PromptSet], suite: PromptSet, length: int, profiled: bool) -> int:
        """Prepare to measure texts of up to `length` tokens.

        Raises ValueError if the environment differs from the recorded one. Then every method
        decodes everything that takes longer the first time (compilation, recording). Returns the
        text length up to which no further warm-up is needed. A method that runs out of memory here
        is left out. That also releases all caches, so the warm-up starts again without the method.
        """
        if changes := differences(asdict(self.recorded_environment), asdict(self.environment)):
            raise ValueError(
                f"{self.file.path} was started in another environment, which differs in {'; '.join(changes.values())}. Times "
                "of both can't be compared: finish the run where it started, or give another output directory"
            )
        while True:
            warm_length = self.context_length if self.target.form == "eager" else self._visit_shapes(suites, length, profiled)
            if self._answer_briefly(suite, profiled):
                return warm_length

    def _answer_briefly(self, suite: PromptSet, profiled: bool) -> bool:
        """Let every method answer the first prompts briefly; return False if memory runs out."""
        num_tokens = min(self.config.max_new_tokens, WARMUP_NEW_TOKENS)
        for size in self.config.batch_sizes:
            num_groups = math.ceil(self.config.warmup_prompts / size)
            for index, group in enumerate(islice(self._groups(suite, suite.prompts, size), num_groups)):
                for temperature in self.rules:
                    first_turns = next(self._batches(suite, group, index, temperature, size))
                    for method in self.methods[temperature, size]:
                        answer = partial(self._time, first_turns, method, num_tokens)
                        fits = self._fits(first_turns.turns[0], method, profiled)
                        if fits and self._within_memory(first_turns, method, answer, profiled) is None:
                            return False
        return True

    def _visit_shapes(self, suites: Sequence[PromptSet], length: int, profiled: bool) -> int:
        """Let every method run a step of each shape that its answers may have.

        The texts have `length` tokens, or as many as the prompts allow. Returns the length of the
        longest.
        """
        # 1. The numbers of rows that each drafter's batches can have.
        rows: dict[Drafter[Any, Any], set[int]] = {}
        for (temperature, size), methods in self.methods.items():
            for method in methods:
                for suite in suites:
                    if self._fits_at(suite, temperature, size, method.name, profiled):
                        rows.setdefault(method.drafter, set()).update(reachable_sizes(size, len(suite.prompts)))
        # 2. The shapes that these batches have at all lengths of the texts.
        limits = {"max_new_tokens": self.config.max_new_tokens, "context_length": self.context_length}
        estimated = text_lengths(suites, self.tokenizer, **limits)
        lengths = replace(estimated, longest=max(estimated.longest, length))
        shapes = shapes_of(rows, lengths, extent_step=self.target.extent_step, context_length=self.context_length)
        self._warn_of_dropped_recordings(num_recordings(shapes, self.target.extent_step))
        # 3. One step of each shape.
        text = encode_prompt([Turn(role="user", content=suites[0].prompts[0].turns[0])], self.tokenizer)[0]
        visit(shapes, text.to(self.target.device), self.target, next(iter(self.rules.values())))
        return lengths.longest

    def _warn_of_dropped_recordings(self, num_planned: int) -> None:
        """Warn once if the target can't keep the recordings of all planned shapes."""
        subject = "recordings"
        if self.target.cuda_graphs and num_planned > cuda_graphs.MAX_RECORDINGS and subject not in self.warnings:
            self.warnings.add(subject)
            logger.warning(
                "%d shapes are planned, but the target keeps %d recordings: some will be recorded again during the "
                "measurement; give fewer settings or batch sizes, or measure each in a separate output directory",
                num_planned,
                cuda_graphs.MAX_RECORDINGS,
            )

    def _fits(self, turn: PromptTurn, method: Method, profiled: bool) -> bool:
        return self._fits_at(turn.suite, turn.temperature, turn.batch_size, method.name, profiled)

    def _fits_at(self, suite: PromptSet, temperature: float, batch_size: int, method: str, profiled: bool = False) -> bool:
        """Check that a method (if `profiled`, also its profile) has not run out of memory."""
        failures = [*self.out_of_memory, *(self.without_profile if profiled else ())]
        return (suite.name, temperature, batch_size, method) not in {failure.cell for failure in failures}

    def _within_memory(self, batch: TurnBatch, method: Method, work: Callable[[], T], profiled: bool) -> T | None:
        """Run `work` for a batch and return its result, or None when memory runs out.

        A method that runs out of memory is left out from then on.
        """
        result = within_memory(work, self.target)
        if result is None:
            self._leave_out(batch.turns[0], method, profiled)
        return result

    def _leave_out(self, turn: PromptTurn, method: Method, profiled: bool) -> None:
        """Record which method ran out of memory; plain decoding takes all methods with it.

        Profiles come after all other answers. So a failure in their pass costs only the method's
        profile.
        """
        where = f"{turn.suite.name} (temperature {turn.temperature:g}, batch size {turn.batch_size})"
        # 1. Log the consequences.
        left_out = [method]
        if profiled:
            consequence = "no row there has a ceiling" if method.name == BASELINE else "its row has no ceiling"
            logger.warning(
                "%s ran out of memory on %s when it was profiled: its row has no time split, and %s; all other figures stay",
                method.name,
                where,
                consequence,
            )
        elif method.name == BASELINE:
            left_out = [*self.methods[turn.temperature, turn.batch_size]]
            logger.warning(
                "plain decoding ran out of memory on %s: without it no method has a speedup, so none is measured there; lower "
                "the batch size or max_new_tokens",
                where,
            )
        else:
            logger.warning("%s ran out of memory on %s: its row in the table is %s", method.name, where, OOM)

        # 2. Record the methods that are left out.
        (self.without_profile if profiled else self.out_of_memory).extend(
            OutOfMemory(
                suite=turn.suite.name,
                prompt_set_revision=turn.suite.revision,
                prompt_set_source=turn.suite.source,
                temperature=turn.temperature,
                batch_size=turn.batch_size,
                method=failed.name,
            )
            for failed in left_out
            if self._fits(turn, failed, profiled)
        )

    def _time(self, batch: TurnBatch, method: Method, max_new_tokens: int, timed: bool = False) -> Generation:
        return time_generation(
            self.target,
            method.drafter,
            self.rules[batch.turns[0].temperature],
            batch.input_ids,
            max_new_tokens=max_new_tokens,
            stop_ids=self.target.stop_ids,
            seeds=[answer_seed(self.config.seed, turn.suite.name, turn.prompt.id, turn.turn) for turn in batch.turns],
            timed=timed,
        )

    def _records(self, batch: TurnBatch, method: Method, repeat: int, profiled: bool) -> list[EvalRecord]:
        """Answer a batch and return one record for each of its rows."""
        generation = self._time(batch, method, self.config.max_new_tokens, timed=profiled)
        # Plain decoding has no drafts, so every rule samples from the target's distribution.
        lossless_rule = method.name == BASELINE or self.rules[batch.turns[0].temperature].lossless
        records = []
        for row, (turn, input_ids) in enumerate(zip(batch.turns, batch.input_ids, strict=True)):
            answer = generation.answer(row)
            records.append(
                EvalRecord(
                    suite=turn.suite.name,
                    prompt_set_revision=turn.suite.revision,
                    prompt_set_source=turn.suite.source,
                    prompt_id=turn.prompt.id,
                    category=turn.prompt.category,
                    turn=turn.turn,
                    temperature=turn.temperature,
                    batch_size=turn.batch_size,
                    batch=batch.index,
                    num_rows=len(batch.turns),
                    method=method.name,
                    repeat=repeat,
                    profiled=profiled,
                    context_from=BASELINE if turn.turn else None,
                    prompt_sha256=hashlib.sha256(str(input_ids.tolist()).encode()).hexdigest(),
                    num_prompt_tokens=len(input_ids),
                    token_ids=answer.token_ids,
                    accepted_histogram=answer.accepted_histogram,
                    num_verify_tokens=len(answer.token_ids) - 1,
                    num_draft_tokens=answer.num_draft_tokens,
                    drawn=answer.drawn,
                    lossless_rule=lossless_rule,
                    truncated=answer.token_ids[-1] not in self.target.stop_ids,
                    prefill_seconds=generation.prefill_seconds,
                    decode_seconds=generation.decode_seconds,
                    phase_seconds=generation.phase_seconds if profiled else None,
                    tree_tokens=answer.tree_tokens if profiled else None,
                    environment_digest=self.environment.digest,
                    config_digest=self.config_digest,
                    seed=self.config.seed,
                )
            )
        return records


def _key(turn: PromptTurn, method: str, repeat: int, profiled: bool) -> RecordKey:
    return (turn.suite.name, turn.prompt.id, turn.turn, turn.temperature, method, repeat, profiled, turn.batch_size, 0)
