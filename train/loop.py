"""The training loop: one page, the same for one process and for many."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator

from ..data.bundles import to_device
from ..data.types import DrafterBatch
from ..models.drafters.objective import Loss
from .batches import label_counts, with_hidden_states
from .metrics import LOSS_FIELDS, add_losses
from .on_policy import choose_on_policy
from .parallel import backward, finish_step, make_anchor, micro_batch
from .precision import tensor_float32
from .processes import SIGTERM_EXIT_CODE, Sigterm, StepPatience
from .resume import save_step
from .tracking import Tracker
from .training import Training
from .watch import is_measured, make_progress, require_sound, validate_now

logger = logging.getLogger(__name__)


def fit(training: Training, *, start: int) -> None:
    """Run the optimizer steps from `start` on, counted from 0.

    Ends early if tokens per step have peaked (`train.patience`), and after a SIGTERM or Ctrl-C.
    """
    config, accelerator, meter = training.config, training.accelerator, training.meter
    tracker = Tracker(training.output_dir, config, training.run, step=start, active=accelerator.is_main_process)
    progress = make_progress(training, start)
    peaked = training.best.has_peaked(config.patience)
    patience, sigterm = StepPatience(accelerator), Sigterm(accelerator, step=start)
    with patience, sigterm, training.checkpoints, tracker, progress:
        for step in range(start, start if peaked else config.steps):
            # 1. Forward and backward of each micro-batch.
            batches, num_on_policy = choose_on_policy(training, step, training.stream.batches(step))
            loss, seen = _accumulate_gradients(training, batches, num_on_policy)
            # 2. The optimizer's step.
            grad_norm = finish_step(accelerator, training.model, training.optimizer, config.max_grad_norm)
            learning_rate = training.scheduler.get_last_lr()[0]
            training.scheduler.step()
            patience.shorten()
            meter.add_step(step, loss, grad_norm, seen)
            training.spikes.add_step(step, loss)

            # 3. Records, measurement and checkpoint, where they are due.
            done = step + 1
            progress.step()
            measure = is_measured(training, done)
            log = done % config.log_every == 0 or done == config.steps or measure
            stop = sigterm.stops(done, host_waits=log)
            checkpoint = done % config.checkpoint_every == 0 or done == config.steps or stop
            if log or checkpoint:
                require_sound(training)
            if log:
                record = meter.latest = {
                    "step": done,
                    **meter.record(),
                    "learning_rate": learning_rate,
                    "grad_norm": float(grad_norm),
                }
                tracker.log(record)
                peaked = measure and validate_now(training, tracker, done)
                measured = training.best.latest
                progress.show(done, record, measured, measurement_seconds=meter.pause_seconds, ended=peaked)
            if checkpoint or peaked:
                save_step(training, done)
            if stop:
                training.checkpoints.finish()
                if sigterm.is_interrupt:
                    raise KeyboardInterrupt
                logger.warning("stopped by SIGTERM after step %d; the same command resumes there", done)
                raise SystemExit(SIGTERM_EXIT_CODE)
            if peaked:
                logger.info("step %d: tokens per step have peaked; training ends (train.patience=%s)", done, config.patience)
                break


def _accumulate_gradients(training: Training, batches: Sequence[DrafterBatch], num_on_policy: int) -> tuple[Loss, torch.Tensor]:
    """Add the gradients of a step's micro-batches.

    Returns the summed loss, and what `Meter.add_step` adds up, over all processes.
    """
    accelerator, model = training.accelerator, training.model
    num_labels, seen = accelerator.reduce(_count(batches, num_on_policy, accelerator.device), "sum")
    total: Loss | None = None
    for index, batch in enumerate(batches):
        batch = with_hidden_states(batch, training.target, training.reads, training.other)
        with micro_batch(accelerator, model, last=index == len(batches) - 1), tensor_float32(accelerator.device):
            loss = Loss(**dict(zip(LOSS_FIELDS, model(batch, make_anchor(accelerator)), strict=True)))
            # The mean over all labels of the step, in all processes and micro-batches. Times the number of
            # processes, because data parallelism takes the mean of the gradients.
            scale = accelerator.num_processes / num_labels[: len(loss.sums)].sum().clamp(min=1)
            backward(accelerator, model, loss.sums.sum() * scale)
        total = add_losses(total, loss)
    return _sum_over_processes(total, accelerator), seen


def _count(batches: Sequence[DrafterBatch], num_on_policy: int, device: torch.device) -> list[torch.Tensor]:
    """Count the labels by depth of this process's micro-batches, and what `Meter.add_step` adds up."""
    labels = torch.stack([label_counts(batch) for batch in batches]).sum(0)
    positions = sum(int(batch.on_host.positions.sum()) for batch in batches)
    tokens = sum(int(batch.on_host.attention_mask.sum()) for batch in batches)
    return [to_device(values, device) for values in (labels.numpy(), np.array([positions, tokens, num_on_policy]))]


def _sum_over_processes(loss: Loss | None, accelerator: Accelerator) -> Loss:
    assert loss is not None, "a step has at least one micro batch"
    return Loss(**accelerator.reduce({name: getattr(loss, name) for name in LOSS_FIELDS}, "sum"))
