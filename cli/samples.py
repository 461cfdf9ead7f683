"""Short runs of the stages' own steps. `--plan` extrapolates their times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from jaxtyping import Int
from tqdm import tqdm

from ..data.types import DistilledExample, DrafterBatch, Example, TargetReads
from ..distill.config import DistillConfig
from ..distill.label.run import LabellingStats, label_shard
from ..distill.plan import total
from ..eval.measure.timing import Generation, time_generation
from ..models.decoding import GreedyAcceptance
from ..models.decoding.stopping import Finish
from ..models.drafters import NullDrafter
from ..models.drafters.registry import DrafterSpec
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import agreed
from ..models.machine import synchronize
from ..train.batches import collated, count_tokens, target_reads, with_hidden_states
from ..train.config import TrainConfig
from ..train.parallel import make_anchor, tensor_float32
from ..train.setup import LossModule, make_objective, make_optimizer, new_drafter

SECONDS = 12.0
"""Longest time of a measurement, after its first portion."""
FIRST_SIZE, GROWTH = 16, 4
"""Tokens of the first portion, which ends within seconds on a slow machine, too; and the size of each
portion over that of the one before."""
REPEATS = 5
"""Most portions of the largest size."""

T = TypeVar("T")


def grow(step: Callable[[int], T], largest: int, target: HFTarget) -> list[T]:
    """Run a step on portions of growing size, and return the results of the largest size.

    A portion is GROWTH times as large as the one before, if the clock leaves time for it: many
    tokens take less time each than few. A portion of size `largest` is repeated.
    """
    size, results, started = min(FIRST_SIZE, largest), list[T](), time.perf_counter()
    while True:
        begin = time.perf_counter()
        results.append(step(size))
        synchronize(target.device)
        now = time.perf_counter()
        growth = 1 if size == largest else GROWTH
        ends = now + growth * (now - begin) > started + SECONDS or len(results) == REPEATS
        if agreed(ends, target.device) if target.tensor_parallel else ends:
            return results
        if growth > 1:
            size, results = min(growth * size, largest), []


def mean_tokens(answers: Generation, most: int) -> float:
    """Return the mean length of answers of at most `most` tokens.

    It takes every token to be the last one with the same probability, so answers that were cut
    count, too.
    """
    num_ended = [finish for step in answers.steps for finish in step.finishes].count(Finish.STOP_TOKEN)
    probability = num_ended / answers.num_tokens
    return (1 - (1 - probability) ** most) / probability if probability else float(most)


def batch_seconds(answers: Generation, num_tokens: float) -> float:
    """Return the seconds of a batch whose longest answer has so many tokens. Each step decodes a token of each answer."""
    return answers.prefill_seconds + answers.decode_seconds / max(1, len(answers.steps) - 1) * (num_tokens - 1)


def sample_decoding(target: HFTarget, prompts: Sequence[Int[torch.Tensor, " _"]], max_new_tokens: int) -> Generation:
    """Answer a batch of prompts by plain decoding, up to a growing length."""
    room = max(1, target.context_length - max_new_tokens)
    on_device = [prompt[:room].long().to(target.device) for prompt in prompts]

    def decode(size: int) -> Generation:
        options: dict[str, Any] = {"max_new_tokens": size, "stop_ids": target.stop_ids, "seeds": [0] * len(on_device)}
        return time_generation(target, NullDrafter(), GreedyAcceptance(), on_device, **options)

    decoded = grow(decode, max_new_tokens, target)
    target.release_cache()
    return min(decoded, key=lambda answers: answers.decode_seconds)


def sample_labels(
    config: DistillConfig, target: HFTarget, texts: Sequence[Example]
) -> tuple[LabellingStats, list[DistilledExample]]:
    """Label parts of texts. Returns the work of the largest batches, and the examples of one of them."""
    source = cycle(texts)

    def label(size: int) -> tuple[list[DistilledExample], LabellingStats]:
        parts, num_tokens = list[Example](), 0
        while num_tokens < size:
            parts.append(cut(next(source), size - num_tokens))
            num_tokens += len(parts[-1].input_ids)
        return label_shard(config, target, parts, tqdm(disable=True))

    labelled = grow(label, min(config.batch_tokens, sum(len(text.input_ids) for text in texts)), target)
    return total(LabellingStats, [stats for _, stats in labelled]), labelled[0][0]


def cut(text: Example, size: int) -> Example:
    """Return `size` tokens of a text, around the start of its answer."""
    wanted = text.wanted.nonzero()
    middle = int(wanted[0]) if len(wanted) else 0
    start = max(0, min(middle - size // 2, len(text.input_ids) - size))
    return replace(text, input_ids=text.input_ids[start : start + size], loss_mask=text.loss_mask[start : start + size])


def sample_training(
    config: TrainConfig,
    spec: DrafterSpec,
    target: HFTarget,
    examples: Sequence[DistilledExample],
    accelerator: Accelerator,
    *,
    tokens_per_text: float,
    positions_per_text: float,
) -> tuple[float, int]:
    """Train a fresh drafter on a micro-batch of labelled texts. Each process measures its own steps.

    Returns the seconds of an optimizer step, and the drafter's number of parameters. The exchange of
    gradients, the reading of shards and the writing of checkpoints aren't measured.
    """
    # 1. The drafter and what it learns from, as in a training.
    drafter = new_drafter(config, spec, target)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(count_tokens(examples, target.vocab_size))
    optimizer, _ = make_optimizer(drafter, config)
    objective = make_objective(config, target)
    model, reads = LossModule(drafter, objective), target_reads(drafter, objective)
    # 2. A micro-batch with its share of the positions: the texts may be parts.
    chosen, tokens_per_batch = examples[: config.batch_size], config.batch_size * tokens_per_text
    num_tokens = sum(len(example.example.input_ids) for example in chosen)
    positions = min(config.max_positions or tokens_per_batch, config.batch_size * positions_per_text)
    thinned = max(1, round(positions * num_tokens / tokens_per_batch))
    config = replace(config, max_positions=thinned)

    def train(_: int) -> tuple[float, float]:
        # 3. Collation, the target's states, forward and backward.
        begin = time.perf_counter()
        batch = with_hidden_states(draw_batch(config, chosen, reads), target, reads)
        with accelerator.autocast(), tensor_float32(accelerator.device):
            sums, *_ = model(batch, make_anchor(accelerator))
        sums.sum().backward()
        synchronize(target.device)
        # 4. The optimizer's step, as after the last micro-batch.
        middle = time.perf_counter()
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(target.device)
        return middle - begin, time.perf_counter() - middle

    # 5. A step of full size. Another program's burst doesn't count in a median.
    batch_seconds, update_seconds = map(median, zip(*grow(train, 1, target), strict=True))
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    return batch_seconds * tokens_per_batch / num_tokens * config.gradient_accumulation + update_seconds, num_parameters


def draw_batch(config: TrainConfig, examples: Sequence[DistilledExample], reads: TargetReads) -> DrafterBatch:
    """Return a micro-batch of these texts, with the states of the target that they hold."""
    stored = TargetReads(
        hidden_states=reads.hidden_states and all(example.hidden_states is not None for example in examples),
        layers=reads.layers if all(set(reads.layers) <= example.layers.keys() for example in examples) else (),
        top=reads.top,
    )
    return collated(config, examples, torch.Generator().manual_seed(config.seed), stored)
