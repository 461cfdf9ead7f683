"""The progress bar of a training: its speed, its end, and the tokens per step so far."""

from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any

from tqdm import tqdm

RECENT = 20
"""Number of last records from which the speed is computed: steady, and quick to follow a change."""


class Clock:
    """Estimate of when a training ends. Steps and measurements are timed separately.

    tqdm's own estimate would count a measurement, or the time between a kill and the resume, as
    slow steps.
    """

    def __init__(self, *, num_steps: int, measure_every: int | None) -> None:
        self._num_steps = num_steps
        self._measure_every = measure_every
        self._points: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def tick(self, done: int, seconds: float) -> None:
        """Add a point: `done` steps took `seconds` of training, without measurements."""
        self._points.append((done, seconds))

    def seconds_left(self, measurement_seconds: float) -> float | None:
        """Return the seconds until the end, or None before the second point.

        Each measurement that is left takes `measurement_seconds`.
        """
        (first, started), (last, now) = self._points[0], self._points[-1]
        if last == first:
            return None
        steps_left = self._num_steps - last
        measurements_left = 0
        if self._measure_every is not None and steps_left:
            measurements_left = self._num_steps // self._measure_every - last // self._measure_every
            measurements_left += self._num_steps % self._measure_every > 0  # the one at the end
        return steps_left * (now - started) / (last - first) + measurements_left * measurement_seconds


class Progress:
    """The progress bar, a context manager. All processes but the main one pass `active=False`."""

    def __init__(self, clock: Clock, *, num_steps: int, start: int, seconds: float, active: bool) -> None:
        self._clock = clock
        self._clock.tick(start, seconds)
        self._bar = tqdm(
            total=num_steps,
            unit="step",
            initial=start,
            desc="train",
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]",
            disable=not active,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def step(self) -> None:
        """Add one step."""
        self._bar.update()

    def show(
        self,
        done: int,
        record: Mapping[str, Any],
        measured: tuple[int, float] | None,
        *,
        measurement_seconds: float,
        ended: bool = False,
    ) -> None:
        """Update the text beside the bar.

        `record` is a record of the training, `measured` the last measurement (step, tokens per
        step). With `ended` no further step follows.
        """
        self._clock.tick(done, record["seconds"])
        parts = [f"{record['tokens_per_second']:,.0f} tokens/s", f"loss {record['loss']:.3g}"]
        left = None if ended else self._clock.seconds_left(measurement_seconds)
        if left is not None:
            end = datetime.now().astimezone() + timedelta(seconds=left)
            day = "" if end.date() == datetime.now().astimezone().date() else f"{end:%b %d} "
            parts.insert(0, f"{tqdm.format_interval(left)} left, ends {day}{end:%H:%M}")
        tokens_per_step = f"tokens per step {record['tokens_per_step_estimate']:.2f} estimated"
        if measured is not None:
            tokens_per_step += f", {measured[1]:.2f} measured at step {measured[0]}"
        self._bar.set_postfix_str(", ".join([*parts, tokens_per_step]), refresh=False)
