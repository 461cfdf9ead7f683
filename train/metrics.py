"""What training reports: means by depth, and how long accepted drafts would be."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int

from ..models.drafters.objective import Loss

NO_STEP = -1


def estimate_tokens_per_step(joint_hits: Int[torch.Tensor, " depth"], counts: Int[torch.Tensor, " depth"]) -> float:
    """Tokens per target step, bonus included, of greedy chain drafting: 1 + sum over d of joint_hits[d] / counts[d].

    joint_hits[d] counts the positions whose labels at depths 0..d were ALL the drafter's likeliest token: draft token d would
    have been accepted. Multiplying the accuracies of the depths instead would take them for independent, and they aren't.
    The denominator of depth d is its own number of positions whose labels at 0..d are all known. A position whose continuation
    ends earlier (a stop token, the end of the text) says nothing about depth d and is left out there: it counts neither as a
    rejection nor as an acceptance. A depth without any such position adds nothing.

    Every position counts once, on the texts' own prefixes; decoding starts a step only where the last one ended, and a tree or
    a beam accepts more than a chain. So it is an estimate, made to compare drafters while they train.

    Example: counts [4, 2], joint hits [3, 1] -> 1 + 3/4 + 1/2 = 2.25.
    """
    return 1 + sum(_divide(joint_hits, counts, missing=0.0))


def summarize(loss: Loss) -> dict[str, Any]:
    """Means of summed losses, each over the positions that have a label at that depth. None where there is none. `loss` and
    `loss_by_depth` are of the trained depths.

    `accuracy_by_depth[d][k]`: share of the positions whose label is among the k + 1 likeliest tokens.
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
    """Both together, cut off from autograd. None is the empty sum."""
    sums = {name: getattr(right, name).detach() for name in LOSS_FIELDS}
    if left is not None:
        sums = {name: getattr(left, name) + value for name, value in sums.items()}
    return Loss(**sums)


LOSS_FIELDS = ("sums", "counts", "hits", "joint_hits")


class Meter:
    """Sums since the last record and totals of the run, over all processes. Few methods wait for the device; they say so.

    `measured` sums the steps from `measure_from` on, however often records are made.
    """

    def __init__(self, device: torch.device, *, measure_from: int = 0) -> None:
        self.measured: Loss | None = None
        self._measure_from = measure_from
        self._window: Loss | None = None
        self._seen = torch.zeros(2, dtype=torch.long, device=device)  # positions and tokens of the whole run
        self._first_bad_step = torch.tensor(NO_STEP, device=device)
        self._seconds = 0.0
        self._started = time.perf_counter()
        self._last_record = (0, 0, 0.0)  # positions, tokens and seconds of the run when the last record was made
        self.pause_seconds = 0.0
        """How long the last pause took."""

    @property
    def seconds(self) -> float:
        """Seconds spent training, over all resumes."""
        return self._seconds + time.perf_counter() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that isn't the training's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.pause_seconds = time.perf_counter() - started
            self._started += self.pause_seconds

    def add_step(self, step: int, loss: Loss, grad_norm: torch.Tensor, seen: Int[torch.Tensor, " 2"]) -> None:
        """Take in one optimizer step: its loss, and the positions and tokens it saw, all over all processes."""
        self._window = add_losses(self._window, loss)
        if step >= self._measure_from:
            self.measured = add_losses(self.measured, loss)
        self._seen = self._seen + seen
        bad = ~(loss.sums.sum().isfinite() & grad_norm.isfinite()) & (self._first_bad_step == NO_STEP)
        self._first_bad_step = torch.where(bad, step, self._first_bad_step)

    def first_bad_step(self) -> int | None:
        """The first step whose loss or gradient was not finite. Waits for the device."""
        step = int(self._first_bad_step)
        return None if step == NO_STEP else step

    def record(self) -> dict[str, Any]:
        """Means since the last record, and totals; the next record starts here. Waits for the device."""
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
        """Everything, as JSON values that give back the same bits. Waits for the device."""
        return {
            "window": _to_lists(self._window),
            "measured": _to_lists(self.measured),
            "seen": self._seen.tolist(),
            "seconds": self.seconds,
            "last_record": list(self._last_record),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        device = self._seen.device
        self._window, self.measured = _from_lists(state["window"], device), _from_lists(state["measured"], device)
        self._seen = torch.tensor(state["seen"], device=device)
        positions, tokens, seconds = state["last_record"]
        self._last_record = (positions, tokens, seconds)
        self._seconds = state["seconds"]
        self._started = time.perf_counter()


def _to_lists(loss: Loss | None) -> dict[str, Any] | None:
    return None if loss is None else {name: getattr(loss, name).tolist() for name in LOSS_FIELDS}


def _from_lists(values: dict[str, Any] | None, device: torch.device) -> Loss | None:
    return None if values is None else Loss(**{name: torch.tensor(value, device=device) for name, value in values.items()})


def _divide(sums: torch.Tensor, counts: torch.Tensor, *, missing: Any) -> list[Any]:
    return [total / count if count else missing for total, count in zip(sums.tolist(), counts.tolist(), strict=True)]
