"""Timing of plain decoding and drafters: interleaved, through the same decode loop."""

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from tqdm import tqdm

from ...data.chat import encode_prompt
from ...data.fields import differences
from ...data.suites import Prompt, PromptSet
from ...models.decoding.protocols import AcceptanceRule
from ...models.llm.hf_target import HFTarget
from ..config import EvalConfig
from ..records.names import OOM
from ..records.records import BASELINE, Drafts, EvalRecord, RecordFile
from ..records.run_files import Environment, OutOfMemory, RunInfo
from ..results.figures import is_slow
from .audit import audit
from .environment import recorded_stages, within_memory
from .plan import Job, Plan, PromptTurn, answer_seed, count_by_source
from .timing import Generation, attempts_without_graphs, time_generation
from .trace import trace_drafts

logger = logging.getLogger(__name__)

WARMUP_PROMPTS, WARMUP_TOKENS = 2, 32
"""Prompts of a warm-up (rounded up to whole batches), and new tokens of each answer."""
STREAMED_WARMUP_TOKENS = 3
"""New tokens of an answer where a pass may take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measurements of one run: what is measured, and the file that records go to.

    `rules` are by temperature.
    """

    plan: Plan
    rules: Mapping[float, AcceptanceRule]
    environment: Environment
    file: RecordFile
    info: RunInfo
    """The run as its folder describes it. New records must come from the environment in which it started."""
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    """Methods that ran out of memory. This run doesn't try them again. Where plain decoding doesn't
    fit, there is no baseline, so all methods are listed."""

    @property
    def config(self) -> EvalConfig:
        return self.plan.config

    @property
    def target(self) -> HFTarget:
        return self.plan.target

    @property
    def computes(self) -> bool:
        """Whether decoding computes in this process all the time, so that its processor time says how
        long it had to take."""
        return self.target.device.type == "cpu" and self.target.stream is None and not recorded_stages(self.target)

    def measure(self) -> None:
        """Measure all answers that the records lack, except those that don't fit into memory.

        A KeyboardInterrupt is raised again, with the number of answers that are kept. Raises
        ValueError, before any work, if texts don't fit into a memory budget, and if this isn't the
        environment in which the run started.
        """
        self._require_budget()
        records, total = self.file.records, self.plan.num_answers
        is_warm = False
        try:
            with tqdm(total=total, initial=len(records), desc="eval", unit="answer") as progress:
                for job in self.plan.jobs(self._fits):
                    if all(key in records for key in job.keys_of(job.repeat)):
                        continue
                    if not is_warm:
                        self.require_environment()
                        self._warm_up()
                        is_warm = True
                    if (generation := within_memory(partial(self._decode, job), self.target)) is None:
                        self._leave_out(job)
                        continue
                    self.file.append(*self._records(job, generation))
                    progress.update(len(job.turns))
                progress.update(total - progress.n)  # the others are too long, or don't fit into memory
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{len(records)} of {total} answers are kept in {self.file.path}.") from None

    def _decode(self, job: Job) -> Generation:
        """Decode a batch. Decode it again if its time isn't that of decoding alone.

        An attempt that made graphs doesn't count, if another one made none. And a slow answer is
        decoded once more, if memory allows; the faster attempt counts. If the attempts have different
        tokens, the one that is farthest from plain decoding counts. So a wrong token is recorded, and
        the comparison of all answers sees it.
        """
        decode = partial(self._time, job, self.config.max_new_tokens, timed=job.profiled)
        attempts = attempts_without_graphs(decode)
        records = self.file.records
        others = [records[key].seconds for repeat in range(job.repeat) for key in job.keys_of(repeat)[:1] if key in records]
        if is_slow(attempts[-1].seconds, attempts[-1].processor_seconds if self.computes else None, others):
            again = within_memory(decode, self.target)
            attempts += [] if again is None else [again]
        fastest = min(attempts, key=lambda attempt: (attempt.num_graphs, attempt.seconds))
        if all(attempt.token_ids == fastest.token_ids for attempt in attempts):
            return fastest
        logger.warning("%s's answers on %s differ from attempt to attempt", job.method.name, job.place)
        return max(attempts, key=partial(self._distance, job))

    def _distance(self, job: Job, attempt: Generation) -> tuple[bool, float]:
        """Compute how far an attempt is from plain decoding: whether a row ends wrongly, and its deficit."""
        audits = [
            audit(
                self.target,
                input_ids[None],
                token_ids,
                max_new_tokens=self.config.max_new_tokens,
                temperature=turn.temperature,
                seed=self._seed(turn),
            )
            for turn, input_ids, token_ids in zip(job.turns, job.input_ids, attempt.token_ids, strict=True)
        ]
        return any(not row.ends_rightly for row in audits), max(row.deficit for row in audits)

    def _seed(self, turn: PromptTurn) -> int:
        return answer_seed(self.config.seed, turn.suite.name, turn.prompt.id, turn.turn)

    def _time(self, job: Job, max_new_tokens: int, *, timed: bool = False) -> Generation:
        options = {**self._options(job), "max_new_tokens": max_new_tokens, "timed": timed, "loop": job.method.loop}
        return time_generation(self.target, job.method.drafter, self._rule(job), job.input_ids, **options)

    def _rule(self, job: Job) -> AcceptanceRule:
        return self.rules[job.turns[0].temperature]

    def _options(self, job: Job) -> dict[str, Any]:
        """Return the options of decoding a batch: when answers end, and their seeds."""
        seeds = [self._seed(turn) for turn in job.turns]
        return {"max_new_tokens": self.config.max_new_tokens, "stop_ids": self.target.stop_ids, "seeds": seeds}

    def _warm_up(self) -> None:
        """Let every method answer the longest prompts that fit, at each temperature and batch size.

        So memory is allocated and code is loaded before the first measurement. Memory may run out
        here: the measurement then finds the same.
        """
        most = WARMUP_TOKENS if self.target.stream is None else STREAMED_WARMUP_TOKENS
        num_tokens = min(self.config.max_new_tokens, most)
        fitting = [(suite, sorted(self.plan.fitting(suite, suite.prompts), key=_length)) for suite in self.plan.suites]
        suite, prompts = max(fitting, key=lambda choice: max(map(_length, choice[1]), default=0))
        for (temperature, size), methods in self.plan.methods.items():
            groups = self.plan.groups(suite, prompts[::-1], size)
            for index, group in enumerate(islice(groups, math.ceil(WARMUP_PROMPTS / size))):
                turns = next(self.plan.batches(suite, group, temperature, size))
                for method in methods:
                    within_memory(partial(self._time, Job(group=index, turns=turns, method=method), num_tokens), self.target)

    def require_environment(self) -> None:
        """Raise ValueError if the environment differs from the recorded one."""
        if changes := differences(asdict(self.info.environment), asdict(self.environment)):
            raise ValueError(
                f"{self.file.path} was started in another environment, which differs in {'; '.join(changes.values())}. Times "
                "and rounding of both can't be compared: finish the run where it started, or give another output directory"
            )

    def _require_budget(self) -> None:
        """Raise ValueError if the longest texts don't fit into the tokens of a memory budget."""
        if (budget := self.target.budget_tokens) is None:
            return
        longest = max((self._longest_text(suite) for suite in self.plan.suites), default=0)
        for (_, size), methods in self.plan.methods.items():
            for method in methods:
                if (needed := size * (longest + 1 + method.drafter.max_nodes)) > budget:
                    raise ValueError(
                        f"{method.label} at batch size {size} needs room for {needed:,} tokens (prompts, answers and draft "
                        f"trees), and target.budget_tokens is {budget:,}; raise it, or make batches, answers or trees smaller"
                    )

    def _longest_text(self, suite: PromptSet) -> int:
        """Compute the tokens of the suite's longest text: all turns and answers that have room."""
        longest = 0
        for prompt in self.plan.fitting(suite, suite.prompts):
            prompts = [encode_prompt(prompt.messages(text), self.plan.tokenizer, prompt.tools) for text in prompt.turns]
            turns = [ids.shape[1] for ids in prompts]
            length = sum(turns) + len(turns) * self.config.max_new_tokens
            longest = max(longest, min(length, self.plan.context_length))
        return longest

    def _fits(self, job: Job) -> bool:
        """Check that a job's method has not run out of memory."""
        return OutOfMemory(**job.cell_of(job.method)).cell not in {failure.cell for failure in self.out_of_memory}

    def _leave_out(self, job: Job) -> None:
        """Record which method ran out of memory; plain decoding takes all methods with it.

        A profile comes after all other answers, and a failure costs only this profile.
        """
        if job.profiled:
            logger.warning("%s ran out of memory on %s when it was profiled", job.method.name, job.place)
        elif job.method.name == BASELINE:
            logger.warning(
                "plain decoding ran out of memory on %s: without it no method has a speedup, so none is measured there; lower "
                "the batch size or max_new_tokens",
                job.place,
            )
            turn = job.turns[0]
            known = {failure.cell for failure in self.out_of_memory}
            failures = [OutOfMemory(**job.cell_of(method)) for method in self.plan.methods[turn.temperature, turn.batch_size]]
            self.out_of_memory.extend(failure for failure in failures if failure.cell not in known)
        else:
            logger.warning("%s ran out of memory on %s: its row in the table is %s", job.method.name, job.place, OOM)
            self.out_of_memory.append(OutOfMemory(**job.cell_of(job.method)))

    def _records(self, job: Job, generation: Generation) -> list[EvalRecord]:
        """Build one record for each row of a batch. Drafts are followed in another decoding, if memory allows it."""
        drafts: list[Drafts] | None = None
        if job.profiled and job.method.name != BASELINE:
            parts = (job.method.drafter, self._rule(job), self.plan.tokenizer, job.input_ids)
            drafts = within_memory(partial(trace_drafts, self.target, *parts, **self._options(job)), self.target)
        return [self._record(job, row, generation, drafts[row] if drafts else None) for row in range(len(job.turns))]

    def _record(self, job: Job, row: int, generation: Generation, drafts: Drafts | None) -> EvalRecord:
        turn, input_ids, answer = job.turns[row], job.input_ids[row], generation.answer(row)
        return EvalRecord(
            # 1. The prompt, and how it was answered.
            **job.cell_of(job.method),
            prompt_id=turn.prompt.id,
            category=turn.prompt.category,
            turn=turn.turn,
            batch=job.group,
            num_rows=len(job.turns),
            repeat=job.repeat,
            profiled=job.profiled,
            context_from=BASELINE if turn.turn else None,
            prompt_sha256=hashlib.sha256(str(input_ids.tolist()).encode()).hexdigest(),
            num_prompt_tokens=len(input_ids),
            # 2. The row's tokens, and its counts over the verify steps.
            token_ids=answer.token_ids,
            accepted_histogram=answer.accepted_histogram,
            num_verify_tokens=len(answer.token_ids) - 1,
            num_draft_tokens=answer.num_draft_tokens,
            # Plain decoding has no drafts, so every rule samples from the target's distribution.
            lossless_rule=self._rule(job).lossless or job.method.name == BASELINE,
            truncated=answer.token_ids[-1] not in self.target.stop_ids,
            accepted_by=count_by_source(answer.accepted_origins, job.method.sources, answer.num_accepted),
            pace=job.method.pace,
            drafts=drafts,
            # 3. The times of the whole batch; only profiled answers have phases.
            prefill_seconds=generation.prefill_seconds,
            decode_seconds=generation.decode_seconds,
            # The processes of a target's stages have processor seconds of their own.
            processor_seconds=generation.processor_seconds if generation.runs is None else None,
            streaming=generation.streaming,
            runs=generation.runs,
            phase_seconds=generation.phase_seconds if job.profiled else None,
            config_digest=self.info.config_digest,
            environment_digest=self.environment.digest,
            seed=self.config.seed,
        )


def _length(prompt: Prompt) -> int:
    return len(prompt.turns[0])
