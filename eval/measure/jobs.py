"""Jobs of a measurement, and the records of their answers."""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...data.suites import Prompt, PromptSet
from ..config import EvalConfig
from ..records.records import BASELINE, EvalRecord, RecordKey
from ..records.run_files import OutOfMemory
from .timing import Generation
from .turns import Method, TurnBatch, evenly_spaced

Pass = tuple[PromptSet, Sequence[Prompt], int, int, bool]
"""One pass of every method over some prompts: suite, prompts to answer, batch size, repeat,
profiled."""


def plan_passes(suites: Sequence[PromptSet], config: EvalConfig) -> list[Pass]:
    """List the passes that measure everything, the profiled ones last.

    Profiled passes consist of whole batches only, since a smaller batch takes a different time.
    """
    sizes, num_profiled = config.batch_sizes, config.profile_prompts
    passes: list[Pass] = [
        (suite, suite.prompts, size, repeat, False) for repeat in range(config.repeats) for suite in suites for size in sizes
    ]
    return passes + [
        (suite, evenly_spaced(suite.prompts, math.ceil(num_profiled / size) * size), size, 0, True)
        for suite in suites
        for size in sizes
    ]


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
                    token_ids=answer.token_ids,
                    accepted_histogram=answer.accepted_histogram,
                    num_verify_tokens=len(answer.token_ids) - 1,
                    num_draft_tokens=answer.num_draft_tokens,
                    drawn=answer.drawn,
                    # Plain decoding has no drafts, so every rule samples from the target's distribution.
                    lossless_rule=lossless_rule or self.method.name == BASELINE,
                    truncated=answer.token_ids[-1] not in stop_ids,
                    prefill_seconds=generation.prefill_seconds,
                    decode_seconds=generation.decode_seconds,
                    processor_seconds=generation.processor_seconds,
                    phase_seconds=generation.phase_seconds if self.profiled else None,
                    tree_tokens=answer.tree_tokens if self.profiled else None,
                    environment_digest=environment_digest,
                    config_digest=config_digest,
                    seed=seed,
                )
            )
        return records
