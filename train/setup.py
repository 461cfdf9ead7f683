"""The parts of a training. They are built in a fixed order, because some draw random numbers."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from ..data.manifest import Manifest
from ..data.types import DrafterBatch, TargetReads
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.objective import Objective
from ..models.drafters.registry import DrafterSpec
from ..models.drafters.saved.build import build_drafter
from ..models.llm.hf_target import HFTarget
from .batches import BatchStream, count_label_tokens, require_packing, target_reads
from .checkpoint import Checkpoints
from .config import SCHEDULES, TrainConfig
from .low_rank import LowRankAdamW
from .metrics import LOSS_FIELDS, Meter
from .parallel import gather_weights, needs_whole_copy, prepare
from .results import CHECKPOINTS_DIR, Best
from .validation import HeldOut, Validator, hold_out

logger = logging.getLogger(__name__)

CALIBRATION_SHARE = 0.1
"""Share of the steps, at the end, whose losses `TrainableDrafter.calibrate` gets if no texts are
held out."""


class LossModule(nn.Module):
    """Module whose forward is the loss, because data parallelism and autocast act on a forward.

    It returns a tuple of tensors in the order of LOSS_FIELDS, since they don't support a dataclass. `anchor` is a zero (see
    `make_anchor`).
    """

    def __init__(self, drafter: TrainableDrafter, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective

    def forward(self, batch: DrafterBatch, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = self.drafter.loss(batch, self.objective)
        loss = replace(loss, sums=loss.sums + anchor)
        return tuple(getattr(loss, name) for name in LOSS_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The parts of one training.

    `run` is the description of `describe_run`. `trained` is the drafter inside `model`. `copy` is a
    whole drafter on the host, for launches in which `trained` can't decode; else None.
    """

    config: TrainConfig
    run: dict[str, Any]
    accelerator: Accelerator
    target: HFTarget
    stream: BatchStream
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    meter: Meter
    validator: Validator | None
    best: Best
    checkpoints: Checkpoints
    reads: TargetReads
    output_dir: Path
    trained: TrainableDrafter
    copy: TrainableDrafter | None

    @contextmanager
    def whole_drafter(self) -> Iterator[TrainableDrafter]:
        """The drafter with its current weights, ready to decode.

        All processes must call this together.
        """
        if self.copy is None:
            yield self.trained
            return
        gather_weights(self.accelerator, self.trained, self.copy.to(self.accelerator.device))
        yield self.copy
        self.copy.to("cpu")


def set_up(
    config: TrainConfig,
    spec: DrafterSpec,
    target: HFTarget,
    shards_dir: Path,
    manifest: Manifest,
    run: dict[str, Any],
    output_dir: Path,
    accelerator: Accelerator,
) -> Training:
    """Build drafter, batches, optimizer and validation, and wrap them with accelerate.

    Raises ValueError if drafter, shards and target don't fit each other.
    """
    # 1. The drafter, from the same first weights in every process.
    drafter = new_drafter(config, spec, target)
    objective = make_objective(config, target)
    # 2. The texts of training, and those that are held out from it.
    reads = target_reads(drafter, objective)
    check_shards(config, manifest, reads, target)
    log_recomputed(manifest, reads)
    room = validation_room(config, drafter, target)
    held_out = hold_out(shards_dir, manifest, config.validation_texts, seed=config.seed, max_prompt_tokens=room)
    stream = open_stream(config, shards_dir, manifest, held_out, reads, accelerator)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(count_label_tokens(shards_dir, manifest, target.vocab_size))
    # 3. A whole drafter on the host, for decoding, if the processes share the weights among them.
    copy = None
    if needs_whole_copy(accelerator):
        copy = build_drafter(spec, target)
        copy.load_state_dict(drafter.state_dict())
    set_seed(config.seed + accelerator.process_index)  # after the copy, whose first weights draw numbers: dropout differs
    # 4. What measures the held-out texts.
    validator = None
    if held_out:
        validator = Validator(
            held_out,
            target=target,
            objective=objective,
            horizon=manifest.horizon,
            max_new_tokens=config.validation_tokens,
            batch_size=config.batch_size,
            accelerator=accelerator,
        )
    # 5. The optimizer. The scheduler isn't wrapped: accelerate would step it once per process.
    optimizer, scheduler = make_optimizer(drafter, config)
    unused_parameters = drafter.has_unused_parameters(manifest.horizon)
    model, optimizer = prepare(accelerator, LossModule(drafter, objective), optimizer, config, unused_parameters)
    return Training(
        config=config,
        run=run,
        accelerator=accelerator,
        target=target,
        stream=stream,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        meter=Meter(accelerator.device, last_from=config.steps - math.ceil(config.steps * CALIBRATION_SHARE)),
        validator=validator,
        best=Best(output_dir, target.identity),
        checkpoints=Checkpoints(accelerator, output_dir / CHECKPOINTS_DIR, model, optimizer, keep=config.keep_checkpoints),
        reads=reads,
        output_dir=output_dir,
        trained=drafter,
        copy=copy,
    )


def new_drafter(config: TrainConfig, spec: DrafterSpec, target: HFTarget) -> TrainableDrafter:
    """Build the drafter of a training. Sets the seed of its first weights."""
    set_seed(config.seed)
    drafter = build_drafter(spec, target).train()
    if config.activation_checkpointing:
        drafter.checkpoint_activations()
    return drafter


def make_objective(config: TrainConfig, target: HFTarget) -> Objective:
    """Build the objective, with the target's head if the loss compares with the target."""
    objective = Objective(loss=config.loss, weights=config.label_weights, teacher=config.teacher)
    if not objective.loss.needs_teacher:
        return objective
    target.require_plain_head()
    return replace(objective, head=target.head)


def check_shards(config: TrainConfig, manifest: Manifest, reads: TargetReads, target: HFTarget) -> None:
    """Raise ValueError if the shards lack what the loss reads, or states that the target can't recompute in packed texts."""
    manifest.require_top(reads)
    if config.mixes_teacher_and_labels:
        manifest.require_teacher_temperature()
    if config.packing and manifest.stored(reads) != reads:
        require_packing(target)


def validation_room(config: TrainConfig, drafter: TrainableDrafter, target: HFTarget) -> int:
    """Return the most tokens of a prompt that validation decodes. Raises ValueError if none fits."""
    context_length = min(target.context_length, drafter.context_length or target.context_length)
    room = context_length - config.validation_tokens
    if config.validation_texts and room < 1:
        raise ValueError(
            f"train.validation_tokens is {config.validation_tokens}, and target and drafter can read at most {context_length} "
            "tokens, which leaves no room for a prompt; lower train.validation_tokens"
        )
    return room


def open_stream(
    config: TrainConfig,
    shards_dir: Path,
    manifest: Manifest,
    held_out: list[HeldOut],
    reads: TargetReads,
    accelerator: Accelerator,
) -> BatchStream:
    """Open this process's stream of batches."""
    stream = BatchStream(
        shards_dir,
        manifest,
        config,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        ahead=accelerator.device.type != "cpu",
        held_out=[text.location for text in held_out],
        reads=reads,
    )
    logger.info("%s", describe_batch(config, stream, manifest))
    if stream.step_size > stream.num_texts and accelerator.is_main_process:
        logger.warning(
            "a step reads %d texts, and there are only %d: it reads some of them twice; lower train.batch_size",
            *(stream.step_size, stream.num_texts),
        )
    return stream


def describe_batch(config: TrainConfig, stream: BatchStream, manifest: Manifest) -> str:
    """Describe one optimizer step (texts, tokens, positions), and the number of epochs."""
    num_texts = sum(len(entry.ids) for entry in manifest.shards)
    tokens, positions = (stream.step_size * total / num_texts for total in (manifest.num_tokens, manifest.num_labels))
    limit = ""
    if config.max_positions is not None:
        at_most = config.max_positions * config.gradient_accumulation * stream.num_processes
        positions = min(positions, at_most)
        limit = f" (at most {at_most:,}, by train.max_positions {config.max_positions})"
    return (
        f"a step reads {stream.step_size} texts = {stream.num_processes} process{'es' * (stream.num_processes > 1)} x "
        f"train.batch_size {config.batch_size} x gradient_accumulation {config.gradient_accumulation}: about {tokens:,.0f} "
        f"tokens, and it trains on about {positions:,.0f} positions{limit}; {config.steps} steps are "
        f"{config.steps * stream.step_size / stream.num_texts:.3g} epochs of {stream.num_texts} texts"
    )


def log_recomputed(manifest: Manifest, reads: TargetReads) -> None:
    """Log why every step needs a pass of the target, and which options store its states."""
    stored = manifest.stored(reads)
    options = []
    if reads.hidden_states and not stored.hidden_states:
        options.append("distill.features=last_hidden")
    if reads.layers and not stored.layers:
        options.append(f"distill.feature_layers=[{','.join(map(str, reads.layers))}]")
    if options:
        logger.info(
            "the shards lack states of the target that this drafter reads, so the target recomputes them in every step; with "
            "%s the distillation stores them (now: features %s, feature_layers %s)",
            " ".join(options),
            manifest.features,
            manifest.feature_layers,
        )


def make_optimizer(drafter: TrainableDrafter, config: TrainConfig) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Build AdamW, with weight decay for matrices only, and the schedule of its learning rate."""
    optimizer: torch.optim.Optimizer
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    if config.lora_rank is None:
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    else:
        optimizer = LowRankAdamW(groups, config.lora_rank, lr=config.learning_rate, seed=config.seed)
    name, num_steps = SCHEDULES[config.schedule], config.steps
    return optimizer, get_scheduler(name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=num_steps)
