"""The stage that trains: from distilled shards to a drafter, in one loop that a kill can't hurt."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_scheduler

from ..data.manifest import Manifest, load_manifest
from ..data.shards import verify_shards
from ..data.types import DrafterBatch, TargetReads
from ..models.drafters import build_drafter
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.objective import Loss, Objective
from ..models.machine import hardware
from ..models.target.hf_target import HFTarget
from ..models.target.text_states import require_packing
from .best import Best
from .checkpoint import Checkpoints
from .config import SCHEDULES, TrainConfig
from .data import (
    BatchStream,
    count_label_tokens,
    label_counts,
    target_reads,
    with_hidden_states,
)
from .metrics import LOSS_FIELDS, Meter, add_losses
from .parallel import (
    backward,
    finish_step,
    make_anchor,
    micro_batch,
    needs_whole_copy,
    prepare,
)
from .precision import tensor_float32
from .processes import SIGTERM_EXIT_CODE, Sigterm, StepPatience, require_supported_launch
from .results import (
    CHECKPOINTS_DIR,
    describe_run,
    is_trained,
    save_results,
    take_over_options,
)
from .resume import resume, save_step
from .spikes import SpikeWatch
from .tracking import Tracker, require_tracker
from .training import LossModule, Training
from .validation import Validator, hold_out
from .watch import is_measured, make_progress, require_sound, validate_now

logger = logging.getLogger(__name__)

MEASURED_SHARE = 0.1
"""Share of the steps, the last ones, that `TrainableDrafter.calibrate` is told of where no texts are held out for that."""


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

    Resumes from the last complete checkpoint, and reaches what an unbroken run would have reached: the same bits on a CPU, and
    equal within rounding on a GPU, where the backward of attention and `index_add` add in no fixed order. Does nothing where
    the drafter is complete. Raises ValueError for shards that are incomplete, damaged or another target's, for a folder of a
    run with another configuration, and where the loss stops being finite (or, where that is asked for, has a spike); OSError
    where the disk is full.
    """
    require_supported_launch(accelerator)
    require_tracker(config)
    manifest = load_manifest(shards_dir)
    manifest.require_target(target.identity)
    run = describe_run(config, drafter_config, manifest, accelerator)
    if is_trained(config, run, output_dir, drafter_dir):
        accelerator.wait_for_everyone()  # all have looked at the files before one changes them
        if accelerator.is_main_process:
            take_over_options(drafter_config, output_dir, drafter_dir)
        accelerator.wait_for_everyone()
        logger.info("the drafter in %s is already trained", drafter_dir)
        return
    verify_shards(shards_dir, manifest)
    training = _set_up(config, drafter_config, target, shards_dir, manifest, run, output_dir, accelerator)
    _fit(training, start=resume(training))
    with training.whole_drafter() as drafter:
        if training.validator is None:
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
                hardware=hardware(accelerator.device, accelerator.num_processes),
                config=config,
                best=training.best,
            )
            logger.info("trained %s in %.0f s", drafter_dir, training.meter.seconds)
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def _fit(training: Training, *, start: int) -> None:
    """The training loop: steps `start`.. of the run, counted from 0. Ends early where decoding accepts no more than before."""
    config, accelerator, model, meter = training.config, training.accelerator, training.model, training.meter
    tracker = Tracker(training.output_dir, config, training.run, step=start, active=accelerator.is_main_process)
    progress = make_progress(training, start)
    peaked = training.best.has_peaked(config.patience)
    patience, sigterm = StepPatience(accelerator), Sigterm(accelerator, step=start)
    with patience, sigterm, training.checkpoints, tracker, progress:
        for step in range(start, start if peaked else config.steps):
            batches = training.stream.batches(step)
            num_labels, seen = accelerator.reduce(_count(batches, accelerator.device), "sum")
            total: Loss | None = None
            for index, batch in enumerate(batches):
                batch = with_hidden_states(batch, training.target, training.reads)
                with micro_batch(accelerator, model, last=index == len(batches) - 1), tensor_float32(accelerator.device):
                    loss = Loss(**dict(zip(LOSS_FIELDS, model(batch, make_anchor(accelerator)), strict=True)))
                    # A sum over the labels of the whole step, whichever process and micro batch has them; times the
                    # number of processes because data parallelism takes the gradients' mean.
                    scale = accelerator.num_processes / num_labels[: len(loss.sums)].sum().clamp(min=1)
                    backward(accelerator, model, loss.sums.sum() * scale)
                total = add_losses(total, loss)
            grad_norm = finish_step(accelerator, model, training.optimizer, config.max_grad_norm)
            learning_rate = training.scheduler.get_last_lr()[0]
            training.scheduler.step()
            loss = _sum_over_processes(total, accelerator)
            patience.shorten()
            meter.add_step(step, loss, grad_norm, seen)
            training.spikes.add_step(step, loss)

            done = step + 1
            progress.step()
            measure = is_measured(training, done)
            log = done % config.log_every == 0 or done == config.steps or measure
            stop = sigterm.stops(done, host_waits=log)
            checkpoint = done % config.checkpoint_every == 0 or done == config.steps or stop
            if log or checkpoint:
                require_sound(training)
            if log:
                record = {"step": done, **meter.record(), "learning_rate": learning_rate, "grad_norm": float(grad_norm)}
                tracker.log(record)
                peaked = measure and validate_now(training, tracker, done)
                measured = training.best.latest
                progress.show(done, record, measured, measurement_seconds=meter.pause_seconds, ended=peaked)
            if checkpoint or peaked:
                save_step(training, done)
            if stop:
                training.checkpoints.finish()
                logger.warning("stopped by SIGTERM after step %d; the same command goes on from there", done)
                raise SystemExit(SIGTERM_EXIT_CODE)
            if peaked:
                logger.info("step %d: tokens per step have peaked; training ends (train.patience=%s)", done, config.patience)
                break


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
    if config.activation_checkpointing:
        drafter.checkpoint_activations()
    objective = Objective(loss=config.loss, weights=config.label_weights, teacher=config.teacher)
    if objective.needs_teacher:
        target.require_plain_head()
        objective = replace(objective, head=target.head)
    reads = target_reads(drafter, objective)
    manifest.require_top(reads)
    _tell_recomputed(manifest, reads)
    if config.packing and manifest.stored(reads) != reads:
        require_packing(target)
    context_length = min(target.context_length, drafter.context_length or target.context_length)
    room = context_length - config.validation_tokens
    if config.validation_texts and room < 1:
        raise ValueError(
            f"train.validation_tokens is {config.validation_tokens}, and target and drafter read {context_length} tokens at "
            "most: that leaves no room for a prompt; lower it"
        )
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
    if stream.step_size > stream.num_texts:
        logger.warning("a step reads %d texts, of %d that there are: some of them twice", stream.step_size, stream.num_texts)
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
        unused_parameters=drafter.has_unused_parameters(manifest.horizon),
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
        spikes=SpikeWatch(accelerator.device, config.spike_threshold),
        validator=validator,
        best=Best(output_dir, target.identity),
        checkpoints=Checkpoints(
            accelerator,
            output_dir / CHECKPOINTS_DIR,
            model,
            optimizer,
            keep=config.keep_checkpoints,
            background=config.checkpoint_in_background,
        ),
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
