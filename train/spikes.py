"""Steps whose loss is far above the losses before them: found on the device, told when the host waits for it anyway."""

from dataclasses import dataclass
from typing import Any

import torch

from ..models.drafters.objective import Loss
from .metrics import NO_STEP

WINDOW = 128
"""Losses that a loss is held against: those of the steps before it."""
LEAST = 16
"""As few of them as say something."""
TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
LEAST_DEVIATION = 0.01
"""Of the median: losses that hardly vary don't make a hair's breadth a spike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The first spike since it was last asked for, and how many there were."""

    step: int
    loss: float
    bound: float
    num_spikes: int


class SpikeWatch:
    """Looks for losses above median + `threshold` deviations of the last ones; a deviation is the scaled median absolute one.

    Both are robust: a spike among the last losses moves them by little, and a loss that stays high becomes the median. None
    looks for nothing. A loss that isn't finite is no spike but an error of its own (`Meter.first_bad_step`).
    """

    def __init__(self, device: torch.device, threshold: float | None) -> None:
        self._threshold = threshold
        self._losses = torch.zeros(WINDOW, device=device)  # of step s at s % WINDOW
        self._num_losses = 0
        self._forget(device)

    def _forget(self, device: torch.device) -> None:
        self._step = torch.tensor(NO_STEP, device=device)
        self._loss, self._bound = torch.zeros(2, device=device)
        self._num_spikes = torch.tensor(0, device=device)

    def add_step(self, step: int, loss: Loss) -> None:
        """Take in the loss of a step, over all processes. Never waits for the device."""
        if self._threshold is None:
            return
        mean = loss.sums.detach().sum() / loss.counts[: len(loss.sums)].sum().clamp(min=1)
        if self._num_losses >= LEAST:
            last = self._losses[: min(self._num_losses, WINDOW)]
            median = last.median()
            deviation = TO_DEVIATION * (last - median).abs().median()
            bound = median + self._threshold * torch.maximum(deviation, LEAST_DEVIATION * median.abs())
            is_spike = (mean > bound) & mean.isfinite()
            is_first = is_spike & (self._step == NO_STEP)
            self._step = torch.where(is_first, step, self._step)
            self._loss = torch.where(is_first, mean, self._loss)
            self._bound = torch.where(is_first, bound, self._bound)
            self._num_spikes = self._num_spikes + is_spike
        self._losses[self._num_losses % WINDOW] = mean
        self._num_losses += 1

    def take(self) -> Spike | None:
        """What was found since the last call. Waits for the device."""
        step = int(self._step)
        if step == NO_STEP:
            return None
        spike = Spike(step=step, loss=float(self._loss), bound=float(self._bound), num_spikes=int(self._num_spikes))
        self._forget(self._losses.device)
        return spike

    def state_dict(self) -> dict[str, Any]:
        """As JSON values that give back the same bits, after `take`. Waits for the device."""
        return {"losses": self._losses[: min(self._num_losses, WINDOW)].tolist(), "num_losses": self._num_losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._losses[: len(state["losses"])] = torch.tensor(state["losses"])
        self._num_losses = state["num_losses"]
