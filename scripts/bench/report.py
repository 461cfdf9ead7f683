"""Turns, ratios, the table and the record: what every benchmark of this folder shares."""

import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from outrider.data.files import write_json
from outrider.eval.measure.environment import describe_environment
from outrider.models.machine import synchronize

NUM_DRAWS = 2000
"""Samples of a bootstrap."""


@dataclasses.dataclass(kw_only=True)
class Seconds:
    """Seconds of each call of one way, in the order of the rounds."""

    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)
    """Of all threads: other work on the machine changes them less than wall seconds."""


def take_turns(ways: Mapping[str, Callable[[], Any]], *, rounds: int, device: torch.device | None = None) -> dict[str, Seconds]:
    """Call each way once a round, in turns, and return their seconds. The first round warms up and isn't counted."""
    device = device or torch.device("cpu")
    seconds = {name: Seconds() for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            synchronize(device)
            wall, processor = time.perf_counter(), time.process_time()
            way()
            synchronize(device)
            if number:
                seconds[name].wall.append(time.perf_counter() - wall)
                seconds[name].processor.append(time.process_time() - processor)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the median of paired ratios, and the bounds of its 95 % interval (a bootstrap)."""
    ratios = np.array(above) / np.array(below)
    medians = np.median(np.random.default_rng(0).choice(ratios, (NUM_DRAWS, len(ratios))), axis=1)
    return [round(float(value), 3) for value in (np.median(ratios), *np.quantile(medians, (0.025, 0.975)))]


def median(values: Sequence[float], digits: int = 4) -> float:
    """Return the median to some significant digits, for tables that are read."""
    return float(f"{statistics.median(values):.{digits}g}")


def finish(
    output: Path,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    device: torch.device | None = None,
    **facts: Any,
) -> None:
    """Print the rows as a table, and write them as JSON: with the command, its options, the facts and the environment."""
    print(pd.DataFrame(list(rows)).to_string(index=False, na_rep="-"))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    environment = dataclasses.asdict(describe_environment(device or torch.device("cpu")))
    record = {"command": shlex.join(["python", *sys.argv]), "options": settings, **facts, "rows": list(rows)}
    write_json(output, {**record, "environment": environment})
    print(f"Written to {output}")
