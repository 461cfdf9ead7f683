"""Steps whose loss is far above the losses before them.

The host looks for them when it waits for the device for another reason.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..data.deviation import median_and_deviation
from ..models.drafters.objective import Loss

WINDOW = 128
"""Number of losses before a step that its loss is compared with."""
LEAST = 16
"""Fewest losses to compare with."""
LEAST_DEVIATION = 0.01
"""Of the median: where losses hardly vary, a tiny difference is no spike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """The first spike since the last call of `take`, and the number of spikes since then."""

    step: int
    loss: float
    bound: float
    num_spikes: int


class SpikeWatch:
    """Finds losses above median + `threshold` x robust deviation of the losses before them.

    Both are robust: a spike among the last losses hardly moves them, and a loss that stays high
    becomes the median. A threshold of None finds nothing. A loss that isn't finite is no spike but
    an error of another kind (`Meter.first_bad_step`).
    """

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._new: list[tuple[int, torch.Tensor]] = []
        """Steps since the last `take`, and their losses on the device."""

    def add_step(self, step: int, loss: Loss) -> None:
        """Add the loss of a step, over all processes. Never waits for the device."""
        if self._threshold is not None:
            mean = loss.sums.detach().sum() / loss.counts[: len(loss.sums)].sum().clamp(min=1)
            self._new.append((step, mean))

    def take(self) -> Spike | None:
        """Return the spikes since the last call, if any. Waits for the device."""
        if self._threshold is None or not self._new:
            return None
        spikes: list[tuple[int, float, float]] = []
        means = torch.stack([mean for _, mean in self._new]).tolist()
        for (step, _), mean in zip(self._new, means, strict=True):
            if len(self._last) >= LEAST:
                median, deviation = median_and_deviation(self._last)
                bound = median + self._threshold * max(deviation, LEAST_DEVIATION * abs(median))
                if bound < mean < float("inf"):
                    spikes.append((step, mean, bound))
            self._last.append(mean)
        self._new.clear()
        if not spikes:
            return None
        step, mean, bound = spikes[0]
        return Spike(step=step, loss=mean, bound=bound, num_spikes=len(spikes))

    def state_dict(self) -> dict[str, Any]:
        """JSON values that restore the same bits. To be called after `take`."""
        assert not self._new, "losses that were never compared with those before them"
        return {"losses": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._last.extend(state["losses"])
