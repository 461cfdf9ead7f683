"""What a training will take, before it runs: a few real steps are timed, memory and disk are computed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ..data.collate import collate
from ..data.types import UNKNOWN, DistilledExample, DrafterBatch, TargetReads
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.objective import MAX_CHUNK
from ..models.drafters.saved.build import DrafterSpec, build_drafter
from ..models.machine import synchronize
from ..models.target.hf_target import HFTarget
from .batches import PAD_ID, target_reads, with_hidden_states
from .config import TrainConfig
from .division import with_accumulation
from .parallel import make_anchor
from .precision import tensor_float32
from .setup import make_objective, make_optimizer
from .training import LossModule

MEASURED_SECONDS = 8.0
FLOAT_BYTES = 4
"""Drafters and their optimizer are in float32."""
ADAM_COPIES = 2
"""Moments of AdamW, each as large as the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """What a training takes: `seconds_per_step` is measured in each process alone, all else is computed."""

    num_steps: int
    """Steps that are left."""
    texts_per_step: int
    tokens_per_text: float
    """Mean over the texts of the sample, padding excluded."""
    parameters: int
    target_bytes: int
    seconds_per_step: float
    num_checkpoints: int
    """Kept at a time, and one more while it is written."""

    @property
    def tokens_per_step(self) -> float:
        return self.texts_per_step * self.tokens_per_text

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step

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
        return MAX_CHUNK * FLOAT_BYTES

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
    """Train a fresh drafter on these texts for some seconds, and count what the whole training takes.

    Writes nothing. Each process measures its own steps: the exchange of gradients isn't in them.
    """
    # 1. The drafter and what it learns from, as in a training.
    config = with_accumulation(config, accelerator.num_processes)
    set_seed(config.seed)
    drafter = build_drafter(spec, target).train()
    if config.activation_checkpointing:
        drafter.checkpoint_activations()
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(_count_tokens(examples, target.vocab_size))
    objective = make_objective(config, target)
    model, reads = LossModule(drafter, objective), target_reads(drafter, objective)
    optimizer, _ = make_optimizer(drafter, config)
    # 2. Micro batches, the first of them untimed; each is followed by a step of the optimizer.
    started, num_batches = time.perf_counter(), -1
    while num_batches < 1 or time.perf_counter() - started < MEASURED_SECONDS:
        if num_batches == 0:
            started = time.perf_counter()
        batch = with_hidden_states(_draw_batch(config, examples, reads, num_batches + 1), target, reads)
        with accelerator.autocast(), tensor_float32(accelerator.device):
            sums, *_ = model(batch, make_anchor(accelerator))
        sums.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(target.device)
        num_batches += 1
    seconds = (time.perf_counter() - started) / num_batches
    return TrainingEstimate(
        num_steps=config.steps - steps_done,
        texts_per_step=config.batch_size * config.gradient_accumulation * accelerator.num_processes,
        tokens_per_text=sum(len(example.example.input_ids) for example in examples) / len(examples),
        parameters=_num_parameters(drafter),
        target_bytes=sum(each.numel() * each.element_size() for each in target.model.parameters()),
        seconds_per_step=seconds * config.gradient_accumulation,
        num_checkpoints=config.keep_checkpoints + 1,
    )


def _draw_batch(config: TrainConfig, examples: Sequence[DistilledExample], reads: TargetReads, index: int) -> DrafterBatch:
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


def _count_tokens(examples: Sequence[DistilledExample], vocab_size: int) -> torch.Tensor:
    labels = torch.cat([example.continuations.flatten() for example in examples])
    return labels[labels != UNKNOWN].bincount(minlength=vocab_size)


def _num_parameters(drafter: TrainableDrafter) -> int:
    return sum(parameter.numel() for parameter in drafter.parameters())
