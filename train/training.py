"""The parts of one training, as the loop uses them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data.types import DrafterBatch, TargetReads
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.objective import Objective
from ..models.llm.hf_target import HFTarget
from .batches import BatchStream
from .best import Best
from .checkpoint import Checkpoints
from .config import TrainConfig
from .metrics import LOSS_FIELDS, Meter
from .missed_by import OtherDrafter
from .parallel import gather_weights
from .spikes import SpikeWatch
from .validation import Validator


class LossModule(nn.Module):
    """Module whose forward is the loss, because data parallelism and autocast act on a forward.

    It returns a tuple of tensors in the order of LOSS_FIELDS, since they don't support a dataclass.
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

    `run` is the description of `describe_run`. `other` is the drafter that
    `train.label_weights` names. `trained` is the drafter inside `model`. `copy` is a whole drafter on
    the host, for launches in which `trained` can't decode; else None.
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
    spikes: SpikeWatch
    validator: Validator | None
    best: Best
    checkpoints: Checkpoints
    reads: TargetReads
    other: OtherDrafter | None
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
