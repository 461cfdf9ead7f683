"""Resuming a run, and the state that its checkpoints hold beside weights and optimizer."""

import logging
from typing import Any

from accelerate.utils import set_seed

from .batches import derived_seed
from .checkpoint import latest_checkpoint, remove_incomplete
from .config import Division, describe_change
from .results import steps_of
from .setup import Training

logger = logging.getLogger(__name__)


def save_step(training: Training, step: int) -> None:
    """Save the checkpoint of a step."""
    state = {
        "examples_read": training.stream.position(step),
        "scheduler": training.scheduler.state_dict(),
        "meter": training.meter.state_dict(),
        "best": training.best.state_dict(),
        "run": training.run,
    }
    training.checkpoints.save(step, state)


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
    _take_over_division(training, Division.of(state["run"]), step, position)
    return step


def _take_over_steps(training: Training, scheduler_state: dict[str, Any], steps_before: int, step: int) -> None:
    """Resume a training that gets more steps on the schedule of the new number, and log it."""
    # 1. The learning rate of the next step: the checkpoint's is that of the old schedule.
    training.scheduler.load_state_dict({**scheduler_state, "last_epoch": step - 1})
    training.scheduler.step()
    # 2. What the last steps measure for the drafter: they are others now.
    training.meter.measured = None
    # 3. The log.
    config, (rate_before, *_) = training.config, scheduler_state["_last_lr"]
    logger.info(
        "train.steps was %d and is %d: the training resumes after step %d. The %s schedule now ends at step %d, so the "
        "learning rate resumes at %.3g, where it was %.3g; the stage eval starts a new evaluation",
        *(steps_before, config.steps, step, config.schedule, config.steps),
        *(training.scheduler.get_last_lr()[0], rate_before),
    )
    if training.best.has_peaked(config.patience):
        logger.warning(
            "train.patience=%s has ended this training after step %d, and more steps don't change that; raise train.patience, "
            "or set it to null",
            *(config.patience, step),
        )


def _take_over_division(training: Training, before: Division, step: int, position: int) -> None:
    """Log what another division of the steps than before changes, and seed new processes."""
    now = Division.of(training.run)
    if now == before:
        return
    steps_left = training.config.steps - step
    change = describe_change(
        before, now, step=step, position=position, num_texts=training.stream.num_texts, steps_left=steps_left
    )
    if training.accelerator.is_main_process:
        logger.warning("%s", change)
    if now.num_processes != before.num_processes:
        seed = derived_seed(training.config.seed, "resumed", step, training.accelerator.process_index)
        set_seed(seed % 2**32)
