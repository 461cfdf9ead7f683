"""Estimate of what a training will take, before it runs.

A few real steps are timed; memory and disk are computed.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ..data.collate import collate
from ..data.types import UNKNOWN, DistilledExample, DrafterBatch, TargetReads
from ..models.decoding import GreedyAcceptance, RowSeeds, generate
from ..models.drafters import NullDrafter
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.chunks import max_chunk
from ..models.drafters.saved.build import DrafterSpec, build_drafter
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import Worker
from ..models.machine import synchronize
from .batches import PAD_ID, target_reads, with_hidden_states
from .config import TrainConfig
from .division import with_accumulation
from .missed_by import TrainedCounter, open_other
from .on_policy import step_starts
from .parallel import make_anchor, tensor_float32
from .setup import LossModule, make_objective, make_optimizer
from .state import HostCopy

MEASURED_SECONDS = 8.0
WARM_UP = 2
"""First micro-batches, which aren't timed: they allocate memory and the optimizer's state."""
MIN_TIMED = 5
"""Micro-batches that are timed at least, whatever they take."""
DECODED_TOKENS = 16
"""New tokens of an answer that the decoding of a validation is timed on."""
FLOAT_BYTES = 4
"""Drafters and their optimizer are in float32."""
ADAM_COPIES = 2
"""Moments of AdamW, each as large as the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """What a training takes: times are measured in each process alone, all else is computed."""

    num_steps: int
    """Steps that are left."""
    texts_per_step: int
    tokens_per_text: float
    """Mean over the texts of the sample, padding excluded."""
    max_chunk: int
    """Logits that the loss holds at a time on this device."""
    most_logits: int
    """Logits of a micro-batch of the sample's longest texts, over the target's vocabulary."""
    parameters: int
    target_bytes: int
    seconds_per_step: float
    """Median, with the target's states recomputed where the shards lack them."""
    checkpoint_seconds: float
    """All copies of the state for the checkpoints that are left."""
    validation_seconds: float
    """All measurements on held-out texts that are left, at the speed of plain decoding."""
    num_checkpoints: int
    """Kept at a time, and one more while it is written."""

    @property
    def tokens_per_step(self) -> float:
        return self.texts_per_step * self.tokens_per_text

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step + self.checkpoint_seconds + self.validation_seconds

    @property
    def drafter_bytes(self) -> int:
        return self.parameters * FLOAT_BYTES

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and the optimizer's moments."""
        return self.drafter_bytes * (2 + ADAM_COPIES)

    @property
    def chunk_bytes(self) -> int:
        """Logits that are held at a time, at most; the loss holds a few tensors of this size."""
        return min(self.max_chunk, self.most_logits) * FLOAT_BYTES

    @property
    def disk_bytes(self) -> int:
        """Checkpoints (weights and moments), the best drafter and the one that the run leaves."""
        return self.drafter_bytes * ((1 + ADAM_COPIES) * self.num_checkpoints + 2)


def estimate_training(
    config: TrainConfig,
    spec: DrafterSpec,
    target: HFTarget,
    examples: Sequence[DistilledExample],
    accelerator: Accelerator,
    *,
    steps_done: int = 0,
) -> TrainingEstimate:
    """Train a fresh drafter on these texts for some seconds, and estimate the training.

    Writes nothing. Each process measures its own steps. The exchange of gradients, the reading of
    shards and the writing of checkpoints aren't in them.
    """
    # 1. The drafter and what it learns from, as in a training.
    config = with_accumulation(config, accelerator.num_processes)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    set_seed(config.seed)
    drafter = build_drafter(spec, target).train()
    if config.activation_checkpointing:
        drafter.checkpoint_activations()
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(count_tokens(examples, target.vocab_size))
    # 2. The times of a step, of a checkpoint's copy and of a measurement on held-out texts.
    optimizer, _ = make_optimizer(drafter, config)
    seconds_per_step = _time_steps(config, drafter, optimizer, target, examples, accelerator)
    copies = _count_due(config.steps, steps_done, config.checkpoint_every)
    copy = HostCopy() if config.checkpoint_in_background else None
    state = {"model": drafter.state_dict(), "optimizer": optimizer.state_dict()}
    copy_seconds = 0.0 if copy is None else _time_copy(copy, state)
    measurements = _count_due(config.steps, steps_done, config.validate_every or config.steps)
    answer_seconds = _time_answers(config, target, examples, accelerator) if config.validation_texts and measurements else 0.0
    num_labels = sorted(example.continuations.numel() for example in examples)
    return TrainingEstimate(
        num_steps=config.steps - steps_done,
        texts_per_step=config.batch_size * config.gradient_accumulation * accelerator.num_processes,
        tokens_per_text=sum(len(example.example.input_ids) for example in examples) / len(examples),
        max_chunk=max_chunk(target.device),
        most_logits=sum(num_labels[-config.batch_size :]) * target.vocab_size,
        parameters=_num_parameters(drafter),
        target_bytes=target.weight_bytes,
        seconds_per_step=seconds_per_step,
        checkpoint_seconds=copies * copy_seconds,
        validation_seconds=(measurements + 1) * answer_seconds,  # plain decoding answers the prompts once before
        num_checkpoints=config.keep_checkpoints + 1,
    )


def _time_steps(
    config: TrainConfig,
    drafter: TrainableDrafter,
    optimizer: torch.optim.Optimizer,
    target: HFTarget,
    examples: Sequence[DistilledExample],
    accelerator: Accelerator,
) -> float:
    """Return the median seconds of an optimizer step.

    With a median, another program's burst doesn't count.
    """
    objective = make_objective(config, target)
    other = None if config.missed_by is None else open_other(config.missed_by, target)
    model, reads = LossModule(drafter, objective), target_reads(drafter, objective, other)
    batch_seconds: list[float] = []
    update_seconds: list[float] = []
    started = time.perf_counter()
    while len(batch_seconds) < MIN_TIMED or time.perf_counter() - started < MEASURED_SECONDS:
        # 1. A micro-batch: collation, the target's states, forward and backward.
        index, begin = len(update_seconds), time.perf_counter()
        batch = with_hidden_states(draw_batch(config, examples, reads, index), target, reads, other)
        with accelerator.autocast(), tensor_float32(accelerator.device):
            sums, *_ = model(batch, make_anchor(accelerator))
        sums.sum().backward()
        synchronize(target.device)
        # 2. The optimizer's step, as after the last micro-batch.
        middle = time.perf_counter()
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(target.device)
        update_seconds.append(time.perf_counter() - middle)
        batch_seconds.append(middle - begin)
        if index + 1 == WARM_UP:
            started = time.perf_counter()
            batch_seconds.clear()
    choice_seconds = _time_choice(config, drafter, target, examples, reads)
    return (median(batch_seconds) + choice_seconds) * config.gradient_accumulation + median(update_seconds[WARM_UP:])


def _time_choice(
    config: TrainConfig,
    drafter: TrainableDrafter,
    target: HFTarget,
    examples: Sequence[DistilledExample],
    reads: TargetReads,
) -> float:
    """Return the seconds in which a micro-batch's on-policy positions are chosen, as a mean over steps."""
    if config.on_policy_every is None:
        return 0.0
    all_positions = replace(config, max_positions=None, on_policy_every=None, on_policy_share=None)
    batch = with_hidden_states(draw_batch(all_positions, examples, reads, 0), target, reads)
    seconds = []
    drafter.eval()
    for seed in range(1 + MIN_TIMED):
        started = time.perf_counter()
        step_starts(TrainedCounter(drafter, target), batch, config, seed)
        synchronize(target.device)
        seconds.append(time.perf_counter() - started)
    drafter.train()
    return median(seconds[1:]) / config.on_policy_every


def _count_due(steps: int, steps_done: int, every: int) -> int:
    """Count the times that work of every so many steps is due in the steps that are left.

    It is due after the last step too.
    """
    return 0 if steps_done >= steps else math.ceil(steps / every) - steps_done // every


def _time_copy(copy: HostCopy, content: dict[str, Any]) -> float:
    """Return the seconds of a checkpoint's copy, not the first one, which allocates its memory."""
    copy(content)
    started = time.perf_counter()
    copy(content)
    return time.perf_counter() - started


def _time_answers(
    config: TrainConfig, target: HFTarget, examples: Sequence[DistilledExample], accelerator: Accelerator
) -> float:
    """Return the seconds in which plain decoding answers all held-out prompts.

    Each process answers its share.
    """
    room = target.context_length - max(config.validation_tokens, DECODED_TOKENS)
    prompts = []
    for example in examples[: config.batch_size]:
        wanted = example.example.wanted.nonzero()
        length = int(wanted[0]) + 1 if len(wanted) else len(example.example.input_ids)
        prompts.append(example.example.input_ids[:length][:room].long().to(target.device))
    tokens = [1, 1, DECODED_TOKENS]  # the first call warms up
    seconds = [_time_decoding(target, prompts, max_new_tokens=limit) for limit in tokens]
    per_token = max(0.0, seconds[2] - seconds[1]) / (DECODED_TOKENS - 1)
    per_batch = seconds[1] + per_token * (config.validation_tokens - 1)
    workers = Worker.of(accelerator, tensor_parallel=target.tensor_parallel).num_workers
    return per_batch * math.ceil(config.validation_texts / workers / config.batch_size)


def _time_decoding(target: HFTarget, prompts: list[torch.Tensor], *, max_new_tokens: int) -> float:
    started = time.perf_counter()
    rule, seeds = GreedyAcceptance(), RowSeeds(range(len(prompts)))
    for _ in generate(target, NullDrafter(), rule, prompts, max_new_tokens=max_new_tokens, stop_ids=(), generator=seeds):
        pass
    synchronize(target.device)
    target.release_cache()
    return time.perf_counter() - started


def draw_batch(config: TrainConfig, examples: Sequence[DistilledExample], reads: TargetReads, index: int) -> DrafterBatch:
    """Return a micro batch; the sample is used again and again."""
    start = index * config.batch_size
    batch = [examples[(start + offset) % len(examples)] for offset in range(config.batch_size)]
    stored = TargetReads(
        hidden_states=reads.hidden_states and all(example.hidden_states is not None for example in batch),
        layers=reads.layers if all(set(reads.layers) <= example.layers.keys() for example in batch) else (),
        top=reads.top,
    )
    return collate(
        batch,
        max_positions=config.max_positions,
        generator=torch.Generator().manual_seed(index),
        labels=config.labels,
        pad_id=PAD_ID,
        reads=stored,
        packing=config.packing,
    )


def count_tokens(examples: Sequence[DistilledExample], vocab_size: int) -> torch.Tensor:
    labels = torch.cat([example.continuations.flatten() for example in examples])
    return labels[labels != UNKNOWN].bincount(minlength=vocab_size)


def _num_parameters(drafter: TrainableDrafter) -> int:
    return sum(parameter.numel() for parameter in drafter.parameters())
