"""Loading of a target in stages: each process reads its part only.

Process 0 of the launch is the head: embeddings, final norm, output embeddings, drafter. Process k
has the layers of stage k. Everything that can be wrong is an error of the head, before weights are
read.
"""

import logging
import os
import time
from dataclasses import fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import DistError, Store

from ...machine import turn_off_cudnn_attention
from ..config import TargetConfig
from ..identity import WEIGHT_PATTERNS, config_digest, weights_digest
from ..pretrained import read_config
from ..streamed_loading import Skeleton, build_without_weights, stored_weights
from .links import GOODBYE_SECONDS, ProcessLink, RemoteStage, StageLink, report_loss_on_sigterm
from .meeting import (
    HeadMeeting,
    StageFacts,
    StageMeeting,
    Type,
    is_beside_head,
    launch_store,
    machine,
    num_processes,
    rank,
    versions,
)
from .messages import StageLost
from .slices import EndSlice, LayerSlice
from .stage import FAILED, Stage, leave_interrupts_to_the_head, serve

logger = logging.getLogger(__name__)

LOCAL_OPTIONS = frozenset({"name_or_path", "device", "tokenizer_options", "trust_remote_code"})
"""Options of the target that may differ between processes."""


def head_or_stage(config: TargetConfig, device: torch.device) -> "Head":
    """Return the head in the launch's first process. Any other process is a stage, and ends here."""
    if device.type != "cpu" and device.index is None:
        # The machine may have several of this kind.
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    if rank() > 0:
        serve_stage(config, device)
    return Head(config, device)


def stage_ranges(config: TargetConfig, launched: int | None = None) -> list[range]:
    """Return the layers of each stage. `launched` is the number of processes; None counts them.

    Raises ValueError if the launch or the model has not the right number of processes or layers.
    """
    assert config.stage_layers is not None
    counts = [int(number) for number in config.stage_layers]
    needed, launched = 1 + len(counts), launched or num_processes()
    if launched != needed:
        raise ValueError(
            f"target.stage_layers is {counts}, which needs {needed} processes (a head, and one for each stage), and "
            f"{'one was' if launched == 1 else f'{launched} were'} launched; add --launch pipeline_cpu --num_processes "
            f"{needed} (or accelerate launch --num_processes {needed}), or change target.stage_layers"
        )
    num_layers = int(read_config(config).get_text_config().num_hidden_layers)
    if sum(counts) != num_layers:
        least, more = divmod(num_layers, len(counts))
        even = [least + (index < more) for index in range(len(counts))]
        remedy = f"for example {even}" if least else "and each stage needs one: launch fewer processes"
        raise ValueError(
            f"target.stage_layers is {counts}, which is {sum(counts)} layers, and {config.name_or_path} has {num_layers}; "
            f"their sum must be the model's number of layers, {remedy}"
        )
    return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


class Head:
    """The head's way to its part of the model, and to its stages.

    A constructed head has a place in the launch's store, so that stages notice if it ends.
    """

    def __init__(self, config: TargetConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._ranges = stage_ranges(config)
        self._store: Store = launch_store()
        self.weights_sha256 = ""
        """Digest of the weights; there after `load`."""

    def load(self) -> tuple[EndSlice, ProcessLink]:
        """Load the ends of the model, after all stages have come with the same model.

        Raises ValueError, before weights are read, for stages that are missing or different.
        """
        # 1. Build the model without weights: models and files that can't be divided are errors.
        config = self._config
        skeleton = skeleton_of(config)
        # 2. Meet the stages.
        names = [
            f"stage {number} of {len(self._ranges)} ({_layers(part)})" for number, part in enumerate(self._ranges, start=1)
        ]
        meeting = HeadMeeting(names, facts(config))
        with meeting:
            meeting.gather(self._store)
            self.weights_sha256 = digest(config)
            meeting.compare(self.weights_sha256)
            # 3. Load the ends, while the stages load their layers.
            meeting.start()
            ends = EndSlice.load(skeleton, self._device)
            meeting.wait_until_ready()
        link = ProcessLink([RemoteStage(guest.name, guest.channel) for guest in meeting.guests])
        report_loss_on_sigterm(link)
        return ends, link


def serve_stage(config: TargetConfig, device: torch.device) -> NoReturn:
    """Be a stage: load its layers, handle the head's messages, and end the process with the head."""
    leave_interrupts_to_the_head()
    turn_off_cudnn_attention(device)
    try:
        # 1. Describe this process, or why it can't be a stage: the head reports both.
        store, error = launch_store(), ""
        try:
            part, skeleton, known = stage_ranges(config)[rank() - 1], skeleton_of(config), facts(config)
        except (ValueError, OSError) as reason:
            error = str(reason)
        meeting = StageMeeting(store)
        if error:
            meeting.greet(None, error)
            raise StageLost(f"it can't be one: {error}")
        meeting.greet(known)
        meeting.answer(digest(config) if meeting.needs_digest() else "")
        # 2. Connect to the neighbours, and load.
        try:
            previous, following = meeting.connect()
            stage = Stage(LayerSlice.load(skeleton, part, device))
        except Exception as error:
            kind = "" if isinstance(error, StageLost) else f"{type(error).__name__}: "
            meeting.head.send({"type": Type.FAILED, "error": f"{kind}{error}"})
            raise
        neighbours = {
            channel: number
            for channel, number in ((previous, rank() - 1), (following, rank() + 1))
            if channel is not meeting.head
        }
        meeting.head.send({"type": Type.READY})
    except (StageLost, DistError) as lost:
        # On its own machine the head prints the error.
        level = logging.INFO if is_beside_head() else logging.WARNING
        logger.log(level, "this stage of the target ends: %s", str(lost).partition("\n")[0])
        # Launchers end all processes after the first that fails, and the head has an error to print.
        time.sleep(GOODBYE_SECONDS)
        raise SystemExit(FAILED) from None
    # 3. Serve.
    serve(stage, StageLink(meeting.head, previous, following, neighbours), fast_linears=config.fast_linears)


def facts(config: TargetConfig) -> StageFacts:
    """Return what must be equal in all processes, without reading weights."""
    folder = Path(config.name_or_path)
    paths = sorted(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)) if folder.is_dir() else []
    stats = [(path.name, path.stat()) for path in paths]
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in LOCAL_OPTIONS}
    return StageFacts(
        machine=machine(),
        files=[[name, stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino] for name, stat in stats],
        values={
            **{f"version of {name}": value for name, value in versions().items()},
            **{f"target.{name}": str(value) for name, value in options.items()},
            "digest of config.json": config_digest(config.name_or_path)[:12],
            "weight files": ", ".join(f"{name} of {stat.st_size:,} bytes" for name, stat in stats),
        },
    )


def digest(config: TargetConfig) -> str:
    """Return the digest of the target's weights."""
    return weights_digest(config.name_or_path, getattr(read_config(config), "_commit_hash", None))


def skeleton_of(config: TargetConfig) -> Skeleton:
    """Build the model without weights. Raises ValueError if its files can't be read in parts."""
    return build_without_weights(config, stored_weights(config))


def _layers(part: range) -> str:
    return f"layer {part.start}" if len(part) == 1 else f"layers {part.start} to {part.stop - 1}"
