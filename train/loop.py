"""The training loop: one page, the same for one process and for many. Below it: how a run resumes."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import set_seed

from ..data.device import to_device
from ..data.types import DrafterBatch
from ..models.drafters.objective import Loss
from .batches import derived_seed, label_counts, with_hidden_states
from .checkpoint import latest_checkpoint, remove_incomplete
from .config import Division
from .metrics import LOSS_FIELDS, add_losses, summarize
from .parallel import backward, finish_step, make_anchor, micro_batch, tensor_float32
from .processes import Sigterm, limit_waiting
from .records import Tracker, progress_bar, show
from .results import steps_of
from .setup import Training

logger = logging.getLogger(__name__)


def fit(training: Training, *, start: int) -> None:
    """Run the optimizer steps from `start` on, counted from 0.

    Ends early if the held-out prompts' tokens per decoding step have peaked (`train.patience`), and after a SIGTERM or
    Ctrl-C.
    """
    config, accelerator, meter = training.config, training.accelerator, training.meter
    tracker = Tracker(training.output_dir, config, training.run, step=start, active=accelerator.is_main_process)
    bar = progress_bar(config.steps, start=start, active=accelerator.is_main_process)
    peaked = training.best.has_peaked(config.patience)
    sigterm = Sigterm(accelerator, step=start)
    with ExitStack() as stack, sigterm, training.checkpoints, tracker, bar:
        for step in range(start, start if peaked else config.steps):
            # 1. Forward and backward of each micro-batch.
            loss, seen = _accumulate_gradients(training, training.stream.batches(step))
            # 2. The optimizer's step.
            grad_norm = finish_step(accelerator, training.model, training.optimizer, config.max_grad_norm)
            learning_rate = training.scheduler.get_last_lr()[0]
            training.scheduler.step()
            meter.add_step(step, loss, grad_norm, seen)

            # 3. Records, measurement and checkpoint, where they are due.
            done = step + 1
            bar.update()
            if step == start:
                limit_waiting(accelerator, stack)
                # The bar has a loss from its first step on.
                show(bar, summarize(loss), training.best.latest)
            measure = is_measured(training, done)
            log = done % config.log_every == 0 or done == config.steps or measure
            stop = sigterm.stops(done, host_waits=log)  # after every step, in all processes: they may exchange it here
            checkpoint = done % config.checkpoint_every == 0 or done == config.steps or stop
            if log or checkpoint:
                require_finite(training)
            if log:
                record = meter.latest = {
                    "step": done,
                    **meter.record(),
                    "learning_rate": learning_rate,
                    "grad_norm": float(grad_norm),
                }
                tracker.log(record)
                if measure:
                    validate_now(training, tracker, done)
                    peaked = training.best.has_peaked(config.patience)
                show(bar, record, training.best.latest)
            if checkpoint or peaked:
                save_step(training, done)
            if stop:
                break  # `sigterm` raises at the end of the `with` block, after the last write
            if peaked:
                logger.info("step %d: tokens per step have peaked; training ends (train.patience=%s)", done, config.patience)
                break


def _accumulate_gradients(training: Training, batches: Sequence[DrafterBatch]) -> tuple[Loss, torch.Tensor]:
    """Add the gradients of a step's micro-batches.

    Returns the summed loss, and the numbers of positions and tokens [2], over all processes.
    """
    accelerator, model = training.accelerator, training.model
    labels_by_depth, seen = accelerator.reduce(_count(batches, accelerator.device), "sum")
    total: Loss | None = None
    for index, batch in enumerate(batches):
        batch = with_hidden_states(batch, training.target, training.reads)
        with micro_batch(accelerator, model, last=index == len(batches) - 1), tensor_float32(accelerator.device):
            loss = Loss(**dict(zip(LOSS_FIELDS, model(batch, make_anchor(accelerator)), strict=True)))
            # The mean over all labels of the step, in all processes and micro-batches. Times the number of
            # processes, because data parallelism takes the mean of the gradients.
            scale = accelerator.num_processes / labels_by_depth[: len(loss.sums)].sum().clamp(min=1)
            backward(accelerator, model, loss.sums.sum() * scale)
        total = add_losses(total, loss)
    assert total is not None, "a step has at least one micro-batch"
    return Loss(**accelerator.reduce({name: getattr(total, name) for name in LOSS_FIELDS}, "sum")), seen


def _count(batches: Sequence[DrafterBatch], device: torch.device) -> list[torch.Tensor]:
    """Count this process's labels by depth [depth], and its positions and tokens [2]."""
    labels = torch.stack([label_counts(batch) for batch in batches]).sum(0)
    seen = torch.stack([torch.stack([batch.positions.sum(), batch.attention_mask.sum()]) for batch in batches]).sum(0)
    return [to_device(counts, device) for counts in (labels, seen)]


def is_measured(training: Training, done: int) -> bool:
    """Whether decoding is measured after so many steps: every `validate_every`, and at the end."""
    config = training.config
    due = done == config.steps or (config.validate_every is not None and done % config.validate_every == 0)
    return due and training.validator is not None


def validate_now(training: Training, tracker: Tracker, done: int) -> None:
    """Measure tokens per decoding step after so many steps, and keep the best drafter."""
    assert training.validator is not None
    with training.meter.paused(), training.whole_drafter() as drafter:
        validation = training.validator(drafter)
        training.best.add(done, validation)
        if training.accelerator.is_main_process:
            training.best.keep(drafter)
    tracker.log({"step": done, **validation})
    if (tokens_per_step := validation["validation_tokens_per_step"]) is not None:
        num_texts = training.config.validation_texts
        logger.info("step %d: %.2f tokens per step on %d held-out prompts", done, tokens_per_step, num_texts)


def require_finite(training: Training) -> None:
    """Raise ValueError where a loss or its gradient is not finite. Waits for the device."""
    step = training.meter.first_bad_step()
    if step is None:
        return
    problem = (
        f"the loss or its gradient is not finite at step {step + 1}, whose texts are {', '.join(training.stream.ids(step))}"
    )
    try:
        training.checkpoints.finish()
    except OSError as error:  # the message names both problems
        problem += f". Besides, {error.strerror}"
    kept = latest_checkpoint(training.checkpoints.directory)
    raise ValueError(
        f"{problem}. Nothing was saved since; the last good checkpoint is {kept or 'none'}. Look at those texts, lower "
        "train.learning_rate, set train.max_grad_norm or lengthen train.warmup_steps, and train into an empty folder"
    )


def save_step(training: Training, done: int) -> None:
    """Save a checkpoint: this state, beside the weights, the optimizer and the random numbers, which `Checkpoints` has."""
    state = {
        "examples_read": training.stream.position(done),
        "scheduler": training.scheduler.state_dict(),
        "meter": training.meter.state_dict(),
        "best": training.best.state_dict(),
        "run": training.run,
    }
    training.checkpoints.save(done, state)


def resume(training: Training) -> int:
    """Restore the last complete checkpoint, if any; returns the step to resume at."""
    accelerator, directory = training.accelerator, training.checkpoints.directory
    if accelerator.is_main_process:
        remove_incomplete(directory)
    accelerator.wait_for_everyone()
    checkpoint = latest_checkpoint(directory)
    if checkpoint is None:
        if accelerator.is_main_process:
            training.best.clear()
        return 0
    marker = training.checkpoints.load(checkpoint)
    state, step = marker.state, marker.step
    training.scheduler.load_state_dict(state["scheduler"])
    training.meter.load_state_dict(state["meter"])
    training.best.load_state_dict(state["best"])
    position = int(state["examples_read"])
    training.stream.start_at(step, position)
    logger.info("resuming from %s", checkpoint)
    if steps_of(state["run"]) != training.config.steps:
        _take_over_steps(training, state["scheduler"], steps_of(state["run"]), step)
    _take_over_division(training, Division.of(state["run"]), step)
    return step


def _take_over_steps(training: Training, scheduler_state: dict[str, Any], steps_before: int, step: int) -> None:
    """Resume a training that gets more steps on the schedule of the new number, and log it."""
    # 1. The learning rate of the next step: the checkpoint's is that of the old schedule.
    training.scheduler.load_state_dict({**scheduler_state, "last_epoch": step - 1})
    training.scheduler.step()
    # 2. The losses that calibrate the drafter: other steps are the last ones now.
    training.meter.last_losses = None
    # 3. The log.
    config, (rate_before, *_) = training.config, scheduler_state["_last_lr"]
    logger.info(
        "train.steps was %d and is %d: the training resumes after step %d. The %s schedule now ends at step %d, so the "
        "learning rate resumes at %.3g, where it was %.3g; the stage eval starts a new evaluation",
        *(steps_before, config.steps, step, config.schedule, config.steps),
        *(training.scheduler.get_last_lr()[0], rate_before),
    )
    if training.best.has_peaked(config.patience) and training.accelerator.is_main_process:
        logger.warning(
            "train.patience=%s has ended this training after step %d, and more steps don't change that; raise train.patience, "
            "or set it to null",
            *(config.patience, step),
        )


def _take_over_division(training: Training, before: Division, step: int) -> None:
    """Log what another division of the steps than before changes, and seed new processes."""
    now = Division.of(training.run)
    if now == before:
        return
    if training.accelerator.is_main_process:
        logger.warning(
            "after step %d the run resumes with %s: %d texts a step. Before, it was %s: %d texts. The order of texts "
            "and the learning rates stay. Random numbers (dropout, the positions that train.max_positions draws) and the order "
            "of sums differ from here on, so the run isn't equal bit for bit",
            *(step, now, now.texts_per_step, before, before.texts_per_step),
        )
    if now.num_processes != before.num_processes:
        seed = derived_seed(training.config.seed, "resumed", step, training.accelerator.process_index)
        set_seed(seed % 2**32)
