"""Numbers of a training: means by depth, and the estimate of tokens per step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int

from ..models.drafters.objective import Loss

NO_STEP = -1


def estimate_tokens_per_step(joint_hits: Int[torch.Tensor, " depth"], counts: Int[torch.Tensor, " depth"]) -> float:
    """Estimate tokens per target step, with the bonus token, of greedy drafting of a chain.

    It is 1 + sum over d of joint_hits[d] / counts[d]. joint_hits[d] counts the positions where the
    labels at ALL depths 0..d were the drafter's likeliest tokens, so that draft token d would have
    been accepted. The product of the accuracies of the depths would be wrong, because the depths
    aren't independent.

    counts[d] is the number of positions whose labels at depths 0..d are all known. A position whose
    continuation ends earlier (at a stop token, or at the end of the text) is left out at depth d:
    it is neither a rejection nor an acceptance. A depth without any position adds 0.

    It is an estimate for comparing drafters during training. It counts every position of the texts
    once; but decoding starts a step only where the last one ended, and a tree or a beam accepts
    more than a chain.

    Example: counts [4, 2], joint hits [3, 1] -> 1 + 3/4 + 1/2 = 2.25.
    """
    return 1 + sum(_divide(joint_hits, counts, missing=0.0))


def summarize(loss: Loss) -> dict[str, Any]:
    """Return the means of summed losses, by depth over the positions with a label there.

    A depth without labels has None. `loss` and `loss_by_depth` cover the trained depths.
    `accuracy_by_depth[d][k]` is the share of positions whose label is among the k + 1 likeliest
    tokens.
    """
    trained_counts = loss.counts[: len(loss.sums)]
    ranks = [_divide(hits, loss.counts, missing=None) for hits in loss.hits.T]  # [rank][depth]
    return {
        "loss": float(loss.sums.sum() / trained_counts.sum().clamp(min=1)),
        "tokens_per_step_estimate": estimate_tokens_per_step(loss.joint_hits, loss.counts),
        "loss_by_depth": _divide(loss.sums, trained_counts, missing=None),
        "accuracy_by_depth": [list(depth) for depth in zip(*ranks, strict=True)],
    }


def add_losses(left: Loss | None, right: Loss) -> Loss:
    """Add two losses, detached from autograd. None is the empty sum."""
    sums = {name: getattr(right, name).detach() for name in LOSS_FIELDS}
    if left is not None:
        sums = {name: getattr(left, name) + value for name, value in sums.items()}
    return Loss(**sums)


LOSS_FIELDS = ("sums", "counts", "hits", "joint_hits")


class Meter:
    """Sums since the last record, and totals of the run, over all processes.

    `last_losses` is the sum over the steps from `last_from` on, which records don't reset. A method
    waits for the device only if its docstring says so.
    """

    def __init__(self, device: torch.device, *, last_from: int = 0) -> None:
        self.last_losses: Loss | None = None
        self._last_from = last_from
        self._window: Loss | None = None
        # Positions and tokens of the whole run.
        self._seen = torch.zeros(2, dtype=torch.long, device=device)
        self._first_bad_step = torch.tensor(NO_STEP, device=device)
        self._seconds = 0.0
        self._started = time.perf_counter()
        self._last_record = (0, 0, 0.0)  # positions, tokens and seconds of the run at the last record
        self.latest: dict[str, Any] | None = None
        """The last record of the run, as its file has it."""

    @property
    def seconds(self) -> float:
        """Seconds spent training, over all resumes."""
        return self._seconds + time.perf_counter() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the training's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - started

    def add_step(self, step: int, loss: Loss, grad_norm: torch.Tensor, seen: Int[torch.Tensor, " 2"]) -> None:
        """Add one optimizer step: its loss, and its positions and tokens.

        All are sums over all processes.
        """
        self._window = add_losses(self._window, loss)
        if step >= self._last_from:
            self.last_losses = add_losses(self.last_losses, loss)
        self._seen = self._seen + seen
        bad = ~(loss.sums.sum().isfinite() & grad_norm.isfinite()) & (self._first_bad_step == NO_STEP)
        self._first_bad_step = torch.where(bad, step, self._first_bad_step)

    def first_bad_step(self) -> int | None:
        """Return the first step whose loss or gradient was not finite, or None.

        Waits for the device.
        """
        step = int(self._first_bad_step)
        return None if step == NO_STEP else step

    def record(self) -> dict[str, Any]:
        """Return means since the last record, and totals; start the next record.

        Waits for the device.
        """
        assert self._window is not None, "a record covers at least one step"
        means = summarize(self._window)
        self._window = None
        (positions, tokens), seconds = self._seen.tolist(), self.seconds
        last_positions, last_tokens, last_seconds = self._last_record
        self._last_record = (positions, tokens, seconds)
        seconds_since = max(seconds - last_seconds, 1e-9)
        return {
            **means,
            "positions_seen": positions,
            "tokens_seen": tokens,
            "seconds": seconds,
            "positions_per_second": (positions - last_positions) / seconds_since,
            "tokens_per_second": (tokens - last_tokens) / seconds_since,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values that restore the same bits. Waits for the device."""
        return {
            "window": _to_lists(self._window),
            "measured": _to_lists(self.last_losses),
            "seen": self._seen.tolist(),
            "seconds": self.seconds,
            "last_record": list(self._last_record),
            "latest": self.latest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        device = self._seen.device
        self._window, self.last_losses = _from_lists(state["window"], device), _from_lists(state["measured"], device)
        self._seen = torch.tensor(state["seen"][:2], device=device)  # older checkpoints have a third number
        positions, tokens, seconds = state["last_record"]
        self._last_record = (positions, tokens, seconds)
        self.latest = state["latest"]
        self._seconds = state["seconds"]
        self._started = time.perf_counter()


def _to_lists(loss: Loss | None) -> dict[str, Any] | None:
    return None if loss is None else {name: getattr(loss, name).tolist() for name in LOSS_FIELDS}


def _from_lists(values: dict[str, Any] | None, device: torch.device) -> Loss | None:
    return None if values is None else Loss(**{name: torch.tensor(value, device=device) for name, value in values.items()})


def _divide(sums: torch.Tensor, counts: torch.Tensor, *, missing: Any) -> list[Any]:
    return [total / count if count else missing for total, count in zip(sums.tolist(), counts.tolist(), strict=True)]
