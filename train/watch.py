"""Watching a training: whether it is sound, what decoding accepts, when it will end."""

import logging

from .checkpoint import latest_checkpoint
from .progress import Clock, Progress
from .tracking import Tracker
from .training import Training

logger = logging.getLogger(__name__)


def make_progress(training: Training, start: int) -> Progress:
    """Make the bar of a run that starts or resumes at step `start`."""
    config = training.config
    measure_every = None if training.validator is None else config.validate_every or config.steps
    return Progress(
        Clock(num_steps=config.steps, measure_every=measure_every),
        num_steps=config.steps,
        start=start,
        seconds=training.meter.seconds,
        active=training.accelerator.is_main_process,
    )


def is_measured(training: Training, done: int) -> bool:
    """Whether decoding is measured after so many steps: every `validate_every`, and at the end."""
    config = training.config
    due = done == config.steps or (config.validate_every is not None and done % config.validate_every == 0)
    return due and training.validator is not None


def validate_now(training: Training, tracker: Tracker, step: int) -> bool:
    """Measure tokens per step, and keep the best drafter; return whether they have peaked."""
    assert training.validator is not None
    with training.meter.paused(), training.whole_drafter() as drafter:
        validation = training.validator(drafter)
        training.best.add(step, validation.record())
        if training.accelerator.is_main_process:
            training.best.keep(drafter)
    tracker.log({"step": step, **validation.record()})
    if validation.tokens_per_step is not None:
        num_texts = training.config.validation_texts
        logger.info("step %d: %.2f tokens per step on %d held-out prompts", step, validation.tokens_per_step, num_texts)
    return training.best.has_peaked(training.config.patience)


def require_sound(training: Training) -> None:
    """Raise ValueError where the loss is not finite, or has a spike that ends the run.

    The message names the step and its texts. Waits for the device.
    """
    bad_step, spike = training.meter.first_bad_step(), training.spikes.take()
    if bad_step is None and spike is None:
        return
    if bad_step is not None:
        step, problem = bad_step, "the loss or its gradient is not finite"
        remedy = "set train.max_grad_norm or lengthen train.warmup_steps, and train into an empty folder"
    else:
        assert spike is not None
        step, problem = (
            spike.step,
            (
                f"the loss has a spike of {spike.loss:.4g}, far above the last ones (bound: {spike.bound:.4g}, "
                f"train.spike_threshold={training.config.spike_threshold}; {spike.num_spikes} since the last look)"
            ),
        )
        remedy = "continue through it with train.on_spike=warn, or lower that and train into an empty folder"
    problem += f" at step {step + 1}, whose texts are {', '.join(training.stream.ids(step))}"
    if bad_step is None and training.config.on_spike == "warn":
        if training.accelerator.is_main_process:
            logger.warning("%s", problem)
        return
    try:
        training.checkpoints.finish()
    except OSError as error:  # the message names both problems
        problem += f". Besides, {error.strerror}"
    kept = latest_checkpoint(training.checkpoints.directory)
    raise ValueError(
        f"{problem}. Nothing was saved since; the last good checkpoint is {kept or 'none'}. Look at those texts, lower "
        f"train.learning_rate, {remedy}"
    )
