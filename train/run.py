"""The stage `train`: from distilled shards to a drafter. `loop.fit` is the loop."""

import logging
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from ..data.chat import template_digest
from ..data.manifest import Manifest
from ..data.shards import label_store, verify_shards
from ..models.drafters.registry import DrafterSpec
from ..models.llm.hf_target import HFTarget
from ..models.machine import hardware
from .config import TrainConfig, for_launch
from .loop import fit, resume
from .parallel import describe_launch
from .processes import require_supported_launch
from .records import require_tracker
from .results import describe_run, is_trained, save_results, take_over_options
from .setup import set_up

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    spec: DrafterSpec,
    target: HFTarget,
    shards_dir: Path,
    output_dir: Path,
    drafter_dir: Path,
    accelerator: Accelerator,
) -> None:
    """Train a drafter on the shards, and save it to `drafter_dir`.

    Checkpoints, records and a summary go to `output_dir`. Resumes from the last complete
    checkpoint, and then ends like an unbroken run: with the same bits on a CPU, and within rounding
    on a GPU, where the backward of attention and `index_add` have no fixed order of addition. Does
    nothing if the drafter is complete. Raises ValueError for shards that are incomplete, damaged or
    of another target, for a folder of a run with other options, and for a loss that is not finite.
    Raises OSError if the disk is full.
    """
    # 1. Checks, before any file changes.
    require_supported_launch(accelerator)
    require_tracker(config)
    launch = describe_launch(accelerator)
    config = for_launch(config, launch, tensor_parallel=target.tensor_parallel)
    manifest = label_store(shards_dir).load()
    manifest.require_target(target.identity)
    run = describe_run(config, spec, manifest, launch)
    if is_trained(config, run, output_dir, drafter_dir):
        accelerator.wait_for_everyone()  # all processes have read the files before one changes them
        if accelerator.is_main_process:
            take_over_options(spec.config, output_dir, drafter_dir)
        accelerator.wait_for_everyone()
        logger.info("the drafter in %s is already trained", drafter_dir)
        return
    # 2. The training, from its last checkpoint if there is one.
    require_whole_shards(shards_dir, manifest, accelerator)
    training = set_up(config, spec, target, shards_dir, manifest, run, output_dir, accelerator)
    fit(training, start=resume(training))
    # 3. The drafter's folder and the summary. All processes take part in gathering the weights.
    with training.whole_drafter() as drafter:
        if training.validator is None:
            assert training.meter.last_losses is not None, "it has the last step's"
            drafter.calibrate(training.meter.last_losses)
        if accelerator.is_main_process:
            assert training.meter.latest is not None, "the last step always has a record"
            save_results(
                drafter,
                drafter_dir,
                output_dir,
                target=target.identity,
                run=run,
                hardware=hardware(accelerator.device, accelerator.num_processes),
                config=config,
                best=training.best,
                base=spec.start_from,
                chat_template=template_digest(target.tokenizer) if target.tokenizer is not None else None,
                metrics=training.meter.latest,
            )
            logger.info("trained %s in %.0f s", drafter_dir, training.meter.seconds)
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def require_whole_shards(shards_dir: Path, manifest: Manifest, accelerator: Accelerator) -> None:
    """Raise ValueError, in all processes, if the shards are incomplete or damaged. Each process reads a share of them."""
    problem: Exception | None = None
    try:
        verify_shards(shards_dir, manifest, rank=accelerator.process_index, num_processes=accelerator.num_processes)
    except (ValueError, OSError) as error:
        problem = error
    # A process that continued alone would wait for the others.
    for failure in gather_object([problem]):
        if failure is not None:
            raise failure
