"""All that the training loop works on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data.types import DrafterBatch, TargetReads
from ..models.drafters.objective import Objective
from ..models.hf_target import HFTarget
from ..models.interfaces import Loss, TrainableDrafter
from .best import Best
from .checkpoint import Checkpoints
from .config import TrainConfig
from .data import BatchStream
from .metrics import Meter
from .spikes import SpikeWatch
from .validation import Validator


class LossModule(nn.Module):
    """The loss as a forward: that is where data parallelism and autocast hook in."""

    def __init__(self, drafter: TrainableDrafter, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective

    def forward(self, batch: DrafterBatch) -> Loss:
        return self.drafter.loss(batch, self.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All that the loop works on. `run` says what makes it this run and no other."""

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
    output_dir: Path

    @property
    def drafter(self) -> TrainableDrafter:
        model: LossModule = self.accelerator.unwrap_model(self.model)
        return model.drafter
