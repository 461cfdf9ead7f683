"""Jobs of a measurement, and the records of their answers."""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...data.suites import Prompt, PromptSet
from ..config import EvalConfig
from ..records.records import BASELINE, EvalRecord, RecordKey
from ..records.run_files import OutOfMemory
from ..results.attempts import Repetition
from .timing import Generation
from .turns import Method, TurnBatch, count_by_source, evenly_spaced


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePass:
    """One pass of every method over prompts of a suite."""

    suite: PromptSet
    prompts: Sequence[Prompt]
    """Prompts to answer; a profiled pass answers only some of the suite's."""
    batch_size: int
    repeat: int = 0
    profiled: bool = False

    def measures(self, method: Method) -> bool:
        """Return whether a method takes part: only phases can be profiled."""
        return method.has_phases or not self.profiled


def plan_passes(suites: Sequence[PromptSet], config: EvalConfig) -> list[SuitePass]:
    """List the passes that measure everything, the profiled ones last.

    Profiled passes consist of whole batches only, since a smaller batch takes a different time.
    """
    sizes, num_profiled = config.batch_sizes, config.profile_prompts
    timed = [
        SuitePass(suite=suite, prompts=suite.prompts, batch_size=size, repeat=repeat)
        for repeat in range(config.repeats)
        for suite in suites
        for size in sizes
    ]
    profiles = [
        SuitePass(
            suite=suite,
            prompts=evenly_spaced(suite.prompts, math.ceil(num_profiled / size) * size),
            batch_size=size,
            profiled=True,
        )
        for suite in suites
        for size in sizes
    ]
    return timed + profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch of turns that a method decodes once."""

    batch: TurnBatch
    method: Method
    repeat: int = 0
    profiled: bool = False
    attempt: int = 0

    @property
    def keys(self) -> list[RecordKey]:
        """Keys of the answers' records."""
        return [
            turn.key(self.method.name, repeat=self.repeat, profiled=self.profiled, attempt=self.attempt)
            for turn in self.batch.turns
        ]

    @property
    def out_of_memory(self) -> OutOfMemory:
        """Entry of `facts.json` for a job that runs out of memory."""
        turn = self.batch.turns[0]
        return OutOfMemory(
            suite=turn.suite.name,
            prompt_set_revision=turn.suite.revision,
            prompt_set_source=turn.suite.source,
            temperature=turn.temperature,
            batch_size=turn.batch_size,
            method=self.method.name,
        )

    def records(
        self,
        generation: Generation,
        *,
        lossless_rule: bool,
        stop_ids: Collection[int],
        seed: int,
        config_digest: str,
        environment_digest: str,
    ) -> list[EvalRecord]:
        """Build one record for each row of the batch."""
        records = []
        for row, (turn, input_ids) in enumerate(zip(self.batch.turns, self.batch.input_ids, strict=True)):
            answer = generation.answer(row)
            records.append(
                EvalRecord(
                    # 1. The prompt, and how it was answered.
                    suite=turn.suite.name,
                    prompt_set_revision=turn.suite.revision,
                    prompt_set_source=turn.suite.source,
                    prompt_id=turn.prompt.id,
                    category=turn.prompt.category,
                    turn=turn.turn,
                    temperature=turn.temperature,
                    batch_size=turn.batch_size,
                    batch=self.batch.index,
                    num_rows=len(self.batch.turns),
                    method=self.method.name,
                    repeat=self.repeat,
                    attempt=self.attempt,
                    profiled=self.profiled,
                    context_from=BASELINE if turn.turn else None,
                    prompt_sha256=hashlib.sha256(str(input_ids.tolist()).encode()).hexdigest(),
                    num_prompt_tokens=len(input_ids),
                    # 2. The row's tokens, and its counts over the verify steps.
                    token_ids=answer.token_ids,
                    step_tokens=answer.step_tokens,
                    accepted_histogram=answer.accepted_histogram,
                    num_verify_tokens=len(answer.token_ids) - 1,
                    num_draft_tokens=answer.num_draft_tokens,
                    drawn=answer.drawn,
                    # Plain decoding has no drafts, so every rule samples from the target's distribution.
                    lossless_rule=lossless_rule or self.method.name == BASELINE,
                    truncated=answer.token_ids[-1] not in stop_ids,
                    accepted_by=count_by_source(answer.accepted_origins, self.method.sources, answer.num_accepted),
                    pace=self.method.pace,
                    # 3. The times of the whole batch, and details that only profiled answers have.
                    prefill_seconds=generation.prefill_seconds,
                    decode_seconds=generation.decode_seconds,
                    # The processes of a target's stages have processor seconds of their own.
                    processor_seconds=generation.processor_seconds if generation.runs is None else None,
                    streaming=generation.streaming,
                    runs=generation.runs,
                    phase_seconds=generation.phase_seconds if self.profiled else None,
                    tree_tokens=answer.tree_tokens if self.profiled else None,
                    # 4. What every record of the run has in common.
                    environment_digest=environment_digest,
                    config_digest=config_digest,
                    seed=seed,
                )
            )
        return records


def repeat_batch(batch: TurnBatch, repetition: Repetition, methods: Sequence[Method], repeat: int) -> list[Job]:
    """List the jobs that decode a disturbed batch again, next to plain decoding.

    Which of the two comes first alternates.
    """
    names = {BASELINE, *repetition.methods}
    pair = [method for method in methods if method.name in names]
    order = reversed(pair) if (batch.index + repetition.attempt) % 2 else pair
    return [Job(batch=batch, method=method, repeat=repeat, attempt=repetition.attempt) for method in order]
