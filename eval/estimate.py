"""Estimate of an evaluation's duration, before it runs.

It counts the answers and times plain decoding on a few of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..data.chat import encode_prompt
from ..data.suites import PromptSet
from ..data.types import Turn
from ..models.decoding.acceptance import GreedyAcceptance
from ..models.drafters import NullDrafter
from ..models.llm.hf_target import HFTarget
from .config import EvalConfig
from .measure.timing import time_generation
from .run import cpu_threads

MEASURED_TOKENS = 32
"""New tokens of a timed answer."""
WARMUP_TOKENS = 4
"""New tokens of the warm-up answer before it, which runs with cold caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEstimate:
    """Upper estimate of an evaluation: all answers have full length, and no method beats plain
    decoding."""

    num_prompts: int
    num_methods: int
    """Plain decoding included."""
    num_answers: int
    max_new_tokens: int
    tokens_per_second: dict[int, float]
    """Throughput of plain decoding by batch size, over all rows of a batch."""
    seconds: float


def estimate_evaluation(
    config: EvalConfig, suites: Sequence[PromptSet], num_methods: int, target: HFTarget
) -> EvaluationEstimate:
    """Estimate an evaluation from timings of plain decoding at each batch size.

    The estimate counts the answers of all methods, temperatures and repeats.
    """
    # 1. Time a batch of each size, and multiply by the number of batches.
    times_repeated = num_methods * len(config.temperatures) * config.repeats
    seconds, speeds = 0.0, {}
    for size in config.batch_sizes:
        per_batch = _measure(config, suites[0], size, target)
        speeds[size] = size * config.max_new_tokens / per_batch
        for suite in suites:
            num_turns = sum(len(prompt.turns) for prompt in suite.prompts)
            num_profiled = math.ceil(config.profile_prompts / size) * num_turns / len(suite.prompts)
            num_batches = num_turns / size * times_repeated + num_profiled * num_methods * len(config.temperatures)
            seconds += num_batches * per_batch
    # 2. Count the answers.
    return EvaluationEstimate(
        num_prompts=sum(len(suite.prompts) for suite in suites),
        num_methods=num_methods,
        num_answers=sum(len(prompt.turns) for suite in suites for prompt in suite.prompts)
        * times_repeated
        * len(config.batch_sizes),
        max_new_tokens=config.max_new_tokens,
        tokens_per_second=speeds,
        seconds=seconds,
    )


def _measure(config: EvalConfig, suite: PromptSet, size: int, target: HFTarget) -> float:
    """Time a batch of plain decoding; return the seconds for answers of `max_new_tokens`."""
    room = target.context_length - config.max_new_tokens
    prompts = [
        encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0, :room].to(target.device)
        for prompt in suite.prompts[:size]
    ]
    num_tokens = min(MEASURED_TOKENS, config.max_new_tokens)
    with cpu_threads(config.num_threads):
        target.choose_linears()
        for limit in (min(WARMUP_TOKENS, num_tokens), num_tokens):
            generation = time_generation(
                target,
                NullDrafter(),
                GreedyAcceptance(),
                prompts,
                max_new_tokens=limit,
                stop_ids=(),
                seeds=[0] * len(prompts),
            )
    per_token = generation.decode_seconds / max(1, num_tokens - 1)
    return generation.prefill_seconds + per_token * (config.max_new_tokens - 1)
