"""The stage that trains: from distilled shards to a drafter, in one loop that a kill can't hurt."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm
from transformers import get_scheduler

from ..data.manifest import Manifest, load_manifest
from ..data.shards import verify_shards
from ..data.types import DrafterBatch, TargetReads
from ..models.drafters import build_drafter
from ..models.drafters.objective import Objective
from ..models.hf_target import HFTarget
from ..models.interfaces import Loss, TrainableDrafter
from .checkpoint import latest_checkpoint, load_checkpoint, remove_incomplete, save_checkpoint
from .config import SCHEDULES, TrainConfig
from .data import BatchStream, count_label_tokens, label_counts, target_reads, with_hidden_states
from .metrics import LOSS_FIELDS, Meter, add_losses
from .parallel import backward, finish_step, gather_weights, make_anchor, micro_batch, needs_whole_copy, prepare
from .processes import SIGTERM_EXIT_CODE, catching_sigterm, require_supported_launch, stop_agreed
from .results import CHECKPOINTS_DIR, describe_run, is_trained, save_results, take_over_options
from .tracking import Tracker
from .validation import Validation, Validator, hold_out

logger = logging.getLogger(__name__)

MEASURED_SHARE = 0.1
"""Share of the steps, the last ones, that `TrainableDrafter.calibrate` is told of where no texts are held out for that."""


class LossModule(nn.Module):
    """The loss as a forward: that is where data parallelism and autocast hook in. They know a tuple of tensors, in the order
    of LOSS_FIELDS, and no dataclass."""

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
    """All that the loop works on. `run` says what makes it this run and no other; `trained` is the drafter within `model`, and
    `copy`, on the host, is there where that can't draft as it is."""

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
    reads: TargetReads
    output_dir: Path
    trained: TrainableDrafter
    copy: TrainableDrafter | None

    @property
    def checkpoints_dir(self) -> Path:
        return self.output_dir / CHECKPOINTS_DIR

    @contextmanager
    def whole_drafter(self) -> Iterator[TrainableDrafter]:
        """The drafter with the weights of now, able to draft in every process. All of them take part."""
        if self.copy is None:
            yield self.trained
            return
        gather_weights(self.accelerator, self.trained, self.copy.to(self.accelerator.device))
        yield self.copy
        self.copy.to("cpu")


def train(
    config: TrainConfig,
    drafter_config: Mapping[str, Any],
    target: HFTarget,
    shards_dir: Path,
    output_dir: Path,
    drafter_dir: Path,
    accelerator: Accelerator,
) -> None:
    """Train a drafter on the shards and save it to `drafter_dir`; checkpoints, records and a summary go to `output_dir`.

    Goes on from the last complete checkpoint, to the same bits that an unbroken run would have reached; does nothing where the
    drafter is complete. Raises ValueError for shards that are incomplete, damaged or another target's, for a folder of a run
    with another configuration, and where the loss stops being finite; OSError where the disk is full.
    """
    require_supported_launch(accelerator)
    manifest = load_manifest(shards_dir)
    manifest.require_target(target.identity)
    run = describe_run(config, drafter_config, manifest, accelerator)
    if is_trained(run, output_dir, drafter_dir):
        accelerator.wait_for_everyone()  # all have looked at the files before one changes them
        if accelerator.is_main_process:
            take_over_options(drafter_config, output_dir, drafter_dir)
        accelerator.wait_for_everyone()
        logger.info("the drafter in %s is already trained", drafter_dir)
        return
    verify_shards(shards_dir, manifest)
    training = _set_up(config, drafter_config, target, shards_dir, manifest, run, output_dir, accelerator)
    validation = _fit(training, start=_resume(training))
    with training.whole_drafter() as drafter:
        if validation is None:
            assert training.meter.measured is not None, "the last step is always measured"
            drafter.calibrate(training.meter.measured)
        if accelerator.is_main_process:
            save_results(
                drafter,
                drafter_dir,
                output_dir,
                target=target.identity,
                run=run,
                seconds=training.meter.seconds,
                validation=None if validation is None else validation.record(),
            )
            logger.info("trained %s in %.0f s", drafter_dir, training.meter.seconds)
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def _fit(training: Training, *, start: int) -> Validation | None:
    """The training loop: steps `start`.. of the run, counted from 0. Returns the measurement at its end, where texts are held
    out."""
    config, accelerator, model, meter = training.config, training.accelerator, training.model, training.meter
    progress = tqdm(total=config.steps, initial=start, desc="train", unit="step", disable=not accelerator.is_main_process)
    tracker = Tracker(training.output_dir, config, training.run, step=start, active=accelerator.is_main_process)
    with tracker, progress, catching_sigterm() as sigterm:
        for step in range(start, config.steps):
            batches = training.stream.batches(step)
            num_labels, seen = accelerator.reduce(_count(batches, accelerator.device), "sum")
            total: Loss | None = None
            for index, batch in enumerate(batches):
                batch = with_hidden_states(batch, training.target, training.reads)
                with micro_batch(accelerator, model, last=index == len(batches) - 1):
                    loss = Loss(**dict(zip(LOSS_FIELDS, model(batch, make_anchor(accelerator)), strict=True)))
                    # A sum over the labels of the whole step, whichever process and micro batch has them; times the
                    # number of processes because data parallelism takes the gradients' mean.
                    scale = accelerator.num_processes / num_labels[: len(loss.sums)].sum().clamp(min=1)
                    backward(accelerator, model, loss.sums.sum() * scale)
                total = add_losses(total, loss)
            grad_norm = finish_step(accelerator, model, training.optimizer, config.max_grad_norm)
            learning_rate = training.scheduler.get_last_lr()[0]
            training.scheduler.step()
            meter.add_step(step, _sum_over_processes(total, accelerator), grad_norm, seen)

            done = step + 1
            progress.update()
            log = done % config.log_every == 0 or done == config.steps
            stop = stop_agreed(sigterm, accelerator, host_waits=log)
            checkpoint = done % config.checkpoint_every == 0 or done == config.steps or stop
            validate = config.validate_every is not None and done % config.validate_every == 0 and done < config.steps
            if log or checkpoint or validate:
                _require_finite(training)
            if validate:
                _validate(training, tracker, done)
            if log:
                record = {"step": done, **meter.record(), "learning_rate": learning_rate, "grad_norm": float(grad_norm)}
                tracker.log(record)
                shown = {name: f"{record[name]:.3g}" for name in ("loss", "positions_per_second", "tokens_per_step_estimate")}
                progress.set_postfix(shown, refresh=False)
            if checkpoint:
                _checkpoint(training, done)
            if stop:
                logger.warning("stopped by SIGTERM after step %d; the same command goes on from there", done)
                raise SystemExit(SIGTERM_EXIT_CODE)
        # Outside of the loop, since a run that was killed after its last step has none left.
        return _validate(training, tracker, config.steps)


def _validate(training: Training, tracker: Tracker, step: int) -> Validation | None:
    """What decoding accepts now, in the records."""
    if training.validator is None:
        return None
    with training.meter.paused(), training.whole_drafter() as drafter:
        validation = training.validator(drafter)
    tracker.log({"step": step, **validation.record()})
    if validation.tokens_per_step is not None:
        num_texts = training.config.validation_texts
        logger.info("step %d: %.2f tokens per step on %d held-out prompts", step, validation.tokens_per_step, num_texts)
    return validation


def _set_up(
    config: TrainConfig,
    drafter_config: Mapping[str, Any],
    target: HFTarget,
    shards_dir: Path,
    manifest: Manifest,
    run: dict[str, Any],
    output_dir: Path,
    accelerator: Accelerator,
) -> Training:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    set_seed(config.seed)
    drafter = build_drafter(drafter_config, target).train()
    objective = Objective(loss=config.loss, weights=config.label_weights, teacher=config.teacher)
    if objective.needs_teacher:
        target.require_plain_head()
        objective = replace(objective, head=target.head)
    reads = target_reads(drafter, objective)
    manifest.require_top(reads)
    _tell_recomputed(manifest, reads)
    context_length = min(target.context_length, drafter.context_length or target.context_length)
    room = context_length - config.validation_tokens
    held_out = hold_out(shards_dir, manifest, config.validation_texts, seed=config.seed, max_prompt_tokens=room)
    stream = BatchStream(
        shards_dir,
        manifest,
        config,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        held_out=[text.place for text in held_out],
        reads=reads,
    )
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(count_label_tokens(shards_dir, manifest, target.vocab_size))
    copy = None
    if needs_whole_copy(accelerator):
        copy = build_drafter(drafter_config, target)
        copy.load_state_dict(drafter.state_dict())
    set_seed(config.seed + accelerator.process_index)  # dropout and the like differ by process, the first weights don't
    optimizer = _make_optimizer(drafter, config)
    scheduler = get_scheduler(
        SCHEDULES[config.schedule], optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=config.steps
    )
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
    # The scheduler stays ours: accelerate would step a prepared one once per process.
    model, optimizer = prepare(
        accelerator,
        LossModule(drafter, objective),
        optimizer,
        batch_size=config.batch_size,
        max_grad_norm=config.max_grad_norm,
    )
    return Training(
        config=config,
        run=run,
        accelerator=accelerator,
        target=target,
        stream=stream,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        meter=Meter(accelerator.device, measure_from=config.steps - math.ceil(config.steps * MEASURED_SHARE)),
        validator=validator,
        reads=reads,
        output_dir=output_dir,
        trained=drafter,
        copy=copy,
    )


def _tell_recomputed(manifest: Manifest, reads: TargetReads) -> None:
    """Say what the target's pass in every step is for, and how it could be spared."""
    stored = manifest.stored(reads)
    options = []
    if reads.hidden_states and not stored.hidden_states:
        options.append("distill.features=last_hidden")
    if reads.layers and not stored.layers:
        options.append(f"distill.feature_layers=[{','.join(map(str, reads.layers))}]")
    if options:
        logger.info(
            "the shards lack states of the target that this drafter reads, so the target makes them anew in every step; "
            "distilled with %s they would hold them (now: features %s, feature_layers %s)",
            " ".join(options),
            manifest.features,
            manifest.feature_layers,
        )


def _make_optimizer(drafter: TrainableDrafter, config: TrainConfig) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def _count(batches: list[DrafterBatch], device: torch.device) -> list[torch.Tensor]:
    """Labels by depth, and positions and tokens, of this process's micro batches."""
    labels = torch.stack([label_counts(batch) for batch in batches]).sum(0)
    positions = sum(int(batch.positions.sum()) for batch in batches)
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
    return [labels.to(device), torch.tensor([positions, tokens], device=device)]


def _sum_over_processes(loss: Loss | None, accelerator: Accelerator) -> Loss:
    assert loss is not None, "a step has at least one micro batch"
    return Loss(**accelerator.reduce({name: getattr(loss, name) for name in LOSS_FIELDS}, "sum"))


def _require_finite(training: Training) -> None:
    step = training.meter.first_bad_step()
    if step is None:
        return
    kept = latest_checkpoint(training.checkpoints_dir)
    raise ValueError(
        f"the loss or its gradient is not finite at step {step + 1}, whose texts are {', '.join(training.stream.ids(step))}. "
        f"Nothing was saved since; the last good checkpoint is {kept or 'none'}. Look at those texts, lower "
        "train.learning_rate, set train.max_grad_norm or lengthen train.warmup_steps, and train into an empty folder"
    )


def _checkpoint(training: Training, step: int) -> None:
    state = {
        "examples_read": step * training.stream.step_size,
        "scheduler": training.scheduler.state_dict(),
        "meter": training.meter.state_dict(),
        "run": training.run,
    }
    keep = training.config.keep_checkpoints
    save_checkpoint(training.accelerator, training.checkpoints_dir, step, state, keep=keep)


def _resume(training: Training) -> int:
    """Restore the last complete checkpoint, if there is one; returns the step to go on from."""
    if training.accelerator.is_main_process:
        remove_incomplete(training.checkpoints_dir)
    training.accelerator.wait_for_everyone()
    checkpoint = latest_checkpoint(training.checkpoints_dir)
    if checkpoint is None:
        return 0
    marker = load_checkpoint(training.accelerator, checkpoint)
    training.scheduler.load_state_dict(marker["scheduler"])
    training.meter.load_state_dict(marker["meter"])
    logger.info("going on from %s", checkpoint)
    return int(marker["step"])
