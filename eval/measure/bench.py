"""Timing of plain decoding and drafters: interleaved, through the same decode loop."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from tqdm import tqdm

from ...data.chat import encode_prompt
from ...data.differences import differences
from ...data.suites import PromptSet
from ...data.types import Turn
from ...models.decoding.protocols import AcceptanceRule, Drafter
from ...models.llm import cuda_graphs
from ...models.llm.hf_target import HFTarget
from ..config import EvalConfig
from ..records.names import OOM
from ..records.records import BASELINE, EvalRecord, RecordFile
from ..records.run_files import Environment, OutOfMemory, Place
from ..results.attempts import PairKey, Repetition, find_repetitions
from .jobs import Job, SuitePass, plan_passes, repeat_batch
from .memory import within_memory
from .texts import Texts
from .timing import Generation, time_generation
from .turns import Method, answer_seed
from .warm_up import num_recordings, reachable_sizes, shapes_of, text_lengths, visit

logger = logging.getLogger(__name__)

WARMUP_NEW_TOKENS = 32
STREAMED_WARMUP_TOKENS = 3
"""New tokens of the warm-up where a pass may take seconds: shapes cost nothing there."""
MAX_REPETITIONS = 2
"""Times that a run decodes a disturbed answer again, at most; the next run may repeat it again."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measurements of one run: the settings that stay fixed, and the file that records go to.

    `rules` are by temperature. `methods` are by temperature and batch size, and include the
    baseline.
    """

    target: HFTarget
    texts: Texts
    rules: Mapping[float, AcceptanceRule]
    methods: Mapping[Place, Sequence[Method]]
    config: EvalConfig
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

        A KeyboardInterrupt is raised again, with the number of answers that are kept. Raises
        ValueError, before any work, if texts don't fit into a memory budget.
        """
        self._require_budget(suites)
        passes = plan_passes(suites, self.config)
        num_answers = sum(
            len(prompt.turns) * sum(map(one_pass.measures, self.methods[temperature, one_pass.batch_size]))
            for one_pass in passes
            for prompt in one_pass.prompts
            for temperature in self.rules
        )
        try:
            self._measure(suites, passes, num_answers)
        except KeyboardInterrupt:
            num_kept = sum(record.attempt == 0 for record in self.file.records.values())
            kept = f"{num_kept} of {num_answers} answers are kept in {self.file.path}."
            raise KeyboardInterrupt(kept) from None

    def _measure(self, suites: Sequence[PromptSet], passes: Sequence[SuitePass], num_answers: int) -> None:
        warm_length = 0  # texts up to this length need no further warm-up
        with tqdm(total=num_answers, desc="eval", unit="answer") as progress:
            for job in self._jobs(passes, progress):
                if not all(key in self.file.records for key in job.keys):
                    warm_length = self._measure_job(suites, job, warm_length, progress)
                progress.update(len(job.batch.turns))
            progress.total = progress.n  # the remaining answers were too long, or ran out of memory

    def _measure_job(self, suites: Sequence[PromptSet], job: Job, warm_length: int, progress: "tqdm[Any]") -> int:
        """Measure a batch and write its records; return up to which length texts need no warm-up."""
        # 1. Warm up, when this batch's texts are longer than all before.
        length = max(map(len, job.batch.input_ids)) + self.config.max_new_tokens
        if length > warm_length:
            progress.set_description("eval, warm-up")
            warm_length = self._prepare(suites, job.batch.turns[0].suite, length, job.profiled)
            progress.set_description("eval")
            if not self._fits(job):
                return warm_length
        # 2. Measure the batch, and write its records together.
        if (records := self._within_memory(job, partial(self._records, job))) is None:
            return 0  # all caches were released
        self.file.append(*records)
        return warm_length

    def _require_budget(self, suites: Sequence[PromptSet]) -> None:
        """Raise ValueError if the longest texts don't fit into the tokens of a memory budget."""
        if (budget := self.target.budget_tokens) is None:
            return
        limits = {"max_new_tokens": self.config.max_new_tokens, "context_length": self.texts.context_length}
        longest = text_lengths(suites, self.texts.tokenizer, **limits).longest
        for (_, size), methods in self.methods.items():
            for method in methods:
                if (needed := size * (longest + 1 + method.drafter.max_nodes)) > budget:
                    raise ValueError(
                        f"{method.name} at batch size {size} needs room for {needed:,} tokens (prompts, answers and draft "
                        f"trees), and target.budget_tokens is {budget:,}; raise it, or make batches, answers or trees smaller"
                    )

    def _jobs(self, passes: Sequence[SuitePass], progress: "tqdm[Any]") -> Iterator[Job]:
        """Yield all jobs: timed ones, then repetitions of those that were disturbed, then profiles."""
        timed = [one_pass for one_pass in passes if not one_pass.profiled]
        yield from self._plan(timed)
        for _ in range(MAX_REPETITIONS):
            repetitions = self._repetitions(timed)
            if num_answers := sum(len(job.batch.turns) for job in repetitions):
                logger.info("%d answers are decoded again, because the time of one of each pair was disturbed", num_answers)
            progress.total += num_answers
            yield from repetitions
        yield from self._plan([one_pass for one_pass in passes if one_pass.profiled])

    def _plan(self, passes: Iterable[SuitePass]) -> Iterator[Job]:
        """Yield every batch at every temperature with every method, interleaved.

        The first method changes from group to group, in rotation. The plan is lazy for two reasons:
        a second turn needs the baseline's answer to the first, and methods that ran out of memory
        are skipped from then on.
        """
        for one_pass in passes:
            suite, size, profiled = one_pass.suite, one_pass.batch_size, one_pass.profiled
            for index, group in enumerate(self.texts.groups(suite, one_pass.prompts, size)):
                for temperature in self.rules:
                    methods = self.methods[temperature, size]
                    first = (index + one_pass.repeat) % len(methods)
                    batches = self.texts.batches(suite, group, index, temperature, size)
                    while self._fits_at(suite, temperature, size, BASELINE) and (batch := next(batches, None)) is not None:
                        for method in (*methods[first:], *methods[:first]):
                            fits = self._fits_at(suite, temperature, size, method.name, profiled)
                            if fits and one_pass.measures(method):
                                yield Job(batch=batch, method=method, repeat=one_pass.repeat, profiled=profiled)

    def _repetitions(self, passes: Iterable[SuitePass]) -> list[Job]:
        """List what to decode again, because all attempts so far were disturbed.

        A run in another environment than the recorded one repeats nothing.
        """
        # 1. What is disturbed in each pass, at each temperature.
        disturbed = [(one_pass, t, self._disturbed(one_pass, t)) for one_pass in passes for t in self.rules]
        num_disturbed = sum(len(repetitions) for *_, repetitions in disturbed)
        # 2. Times of another environment can't be compared.
        if num_disturbed and (changes := differences(asdict(self.recorded_environment), asdict(self.environment))):
            self._warn_once(
                "%d disturbed answers or batches are not decoded again: this environment differs from the recorded one in %s",
                num_disturbed,
                "; ".join(changes.values()),
            )
            return []
        # 3. The jobs, with the methods that still fit into memory.
        return [job for part in disturbed if part[-1] for job in self._repeated(*part)]

    def _disturbed(self, one_pass: SuitePass, temperature: float) -> dict[PairKey, Repetition]:
        """List what is disturbed in a pass at a temperature, by the batch's key."""
        records = self._records_of(one_pass.suite, temperature, one_pass.batch_size)
        repetitions = find_repetitions(records, on_cpu=self.recorded_environment.device == "cpu")
        return {key: repetition for key, repetition in repetitions.items() if key[-1] == one_pass.repeat}

    def _repeated(self, one_pass: SuitePass, temperature: float, repetitions: Mapping[PairKey, Repetition]) -> Iterator[Job]:
        """Yield the jobs that repeat the batches of a pass."""
        suite, size = one_pass.suite, one_pass.batch_size
        for index, group in enumerate(self.texts.groups(suite, one_pass.prompts, size)):
            for batch in self.texts.batches(suite, group, index, temperature, size):
                if (repetition := repetitions.get(batch.pair_key(one_pass.repeat))) is not None:
                    yield from repeat_batch(batch, repetition, self.methods[temperature, size], one_pass.repeat)

    def _records_of(self, suite: PromptSet, temperature: float, batch_size: int) -> list[EvalRecord]:
        """List the records of a group, without those of methods that ran out of memory."""
        key = (suite.name, temperature, batch_size)
        return [
            record
            for record in self.file.records.values()
            if record.group_key == key
            and self._fits_at(suite, temperature, batch_size, record.method)
            and self._fits_at(suite, temperature, batch_size, BASELINE)
        ]

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
            has_shapes = self.target.has_fixed_shapes
            warm_length = self._visit_shapes(suites, length, profiled) if has_shapes else self.texts.context_length
            if self._answer_briefly(suite, profiled):
                return warm_length

    def _answer_briefly(self, suite: PromptSet, profiled: bool) -> bool:
        """Let every method answer the first prompts briefly; return False if memory runs out."""
        most = WARMUP_NEW_TOKENS if self.target.stream is None else STREAMED_WARMUP_TOKENS
        num_tokens = min(self.config.max_new_tokens, most)
        for size in self.config.batch_sizes:
            num_groups = math.ceil(self.config.warmup_prompts / size)
            for index, group in enumerate(islice(self.texts.groups(suite, suite.prompts, size), num_groups)):
                for temperature in self.rules:
                    first_turns = next(self.texts.batches(suite, group, index, temperature, size))
                    for method in self.methods[temperature, size]:
                        job = Job(batch=first_turns, method=method, profiled=profiled)
                        if self._fits(job) and self._within_memory(job, partial(self._time, job, num_tokens)) is None:
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
        limits = {"max_new_tokens": self.config.max_new_tokens, "context_length": self.texts.context_length}
        estimated = text_lengths(suites, self.texts.tokenizer, **limits)
        lengths = replace(estimated, longest=max(estimated.longest, length))
        shapes = shapes_of(rows, lengths, extent_step=self.target.extent_step, context_length=self.texts.context_length)
        self._warn_of_dropped_recordings(num_recordings(shapes, self.target.extent_step))
        # 3. One step of each shape.
        text = encode_prompt([Turn(role="user", content=suites[0].prompts[0].turns[0])], self.texts.tokenizer)[0]
        visit(shapes, text.to(self.target.device), self.target, next(iter(self.rules.values())))
        return lengths.longest

    def _warn_of_dropped_recordings(self, num_planned: int) -> None:
        """Warn once if the target can't keep the recordings of all planned shapes."""
        if self.target.cuda_graphs and num_planned > cuda_graphs.MAX_RECORDINGS:
            self._warn_once(
                "%d shapes are planned, but the target keeps %d recordings: some will be recorded again during the "
                "measurement; give fewer settings or batch sizes, or measure each in a separate output directory",
                num_planned,
                cuda_graphs.MAX_RECORDINGS,
            )

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self.warnings:
            self.warnings.add(message)
            logger.warning(message, *arguments)

    def _fits(self, job: Job) -> bool:
        turn = job.batch.turns[0]
        return self._fits_at(turn.suite, turn.temperature, turn.batch_size, job.method.name, job.profiled)

    def _fits_at(self, suite: PromptSet, temperature: float, batch_size: int, method: str, profiled: bool = False) -> bool:
        """Check that a method (if `profiled`, also its profile) has not run out of memory."""
        failures = [*self.out_of_memory, *(self.without_profile if profiled else ())]
        return (suite.name, temperature, batch_size, method) not in {failure.cell for failure in failures}

    def _within_memory(self, job: Job, work: Callable[[], T]) -> T | None:
        """Run the `work` of a job and return its result, or None when memory runs out.

        A method that runs out of memory is left out from then on, except in a repetition: all its
        answers were measured before.
        """
        result = within_memory(work, self.target)
        if result is None and job.attempt:
            logger.warning("%s ran out of memory when an answer was repeated: its earlier attempts count", job.method.name)
        elif result is None:
            self._leave_out(job)
        return result

    def _leave_out(self, job: Job) -> None:
        """Record which method ran out of memory; plain decoding takes all methods with it.

        Profiles come after all other answers. So a failure in their pass costs only the method's
        profile.
        """
        turn, method, profiled = job.batch.turns[0], job.method, job.profiled
        group = f"{turn.suite.name} (temperature {turn.temperature:g}, batch size {turn.batch_size})"
        # 1. Log the consequences.
        left_out = [method]
        if profiled:
            consequence = "no row there has a ceiling" if method.name == BASELINE else "its row has no ceiling"
            logger.warning(
                "%s ran out of memory on %s when it was profiled: its row has no time split, and %s; all other figures stay",
                method.name,
                group,
                consequence,
            )
        elif method.name == BASELINE:
            left_out = [*self.methods[turn.temperature, turn.batch_size]]
            logger.warning(
                "plain decoding ran out of memory on %s: without it no method has a speedup, so none is measured there; lower "
                "the batch size or max_new_tokens",
                group,
            )
        else:
            logger.warning("%s ran out of memory on %s: its row in the table is %s", method.name, group, OOM)

        # 2. Record the methods that are left out.
        (self.without_profile if profiled else self.out_of_memory).extend(
            failed.out_of_memory for other in left_out if self._fits(failed := replace(job, method=other))
        )

    def _time(self, job: Job, max_new_tokens: int, timed: bool = False) -> Generation:
        turns = job.batch.turns
        decode = job.method.decode or partial(time_generation, loop=job.method.loop)
        return decode(
            self.target,
            job.method.drafter,
            self.rules[turns[0].temperature],
            job.batch.input_ids,
            max_new_tokens=max_new_tokens,
            stop_ids=self.target.stop_ids,
            seeds=[answer_seed(self.config.seed, turn.suite.name, turn.prompt.id, turn.turn) for turn in turns],
            timed=timed,
        )

    def _records(self, job: Job) -> list[EvalRecord]:
        """Answer a batch and return one record for each of its rows."""
        return job.records(
            self._time(job, self.config.max_new_tokens, timed=job.profiled),
            lossless_rule=self.rules[job.batch.turns[0].temperature].lossless,
            stop_ids=self.target.stop_ids,
            seed=self.config.seed,
            config_digest=self.config_digest,
            environment_digest=self.environment.digest,
        )
