"""Two processes of test_patience.py, of which the second is late for collectives."""

import json
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from outrider.train import processes
from outrider.train.processes import limit_waiting, make_accelerator

from .forked import ends, fork

LIMIT_SECONDS, LATE_SECONDS = 0.5, 1.5


def main(output: Path) -> Any:
    """Return the result of each collective of the first process, or the name of its error."""
    processes.STEP_PATIENCE = timedelta(seconds=LIMIT_SECONDS)
    assert ends(fork(2, lambda: meet(output))) == [0, 0]
    return json.loads(output.read_text())


def meet(output: Path) -> None:
    accelerator = make_accelerator()
    results = {}

    def meet_late(name: str) -> None:
        if not accelerator.is_main_process:
            time.sleep(LATE_SECONDS)
        try:
            results[name] = float(accelerator.reduce(torch.ones(()), "sum"))
        except RuntimeError as error:
            results[name] = type(error).__name__

    with ExitStack() as training:
        meet_late("before the first step")
        limit_waiting(accelerator, training)
    meet_late("after the training")
    with ExitStack() as training:
        limit_waiting(accelerator, training)
        meet_late("after a step")
    if accelerator.is_main_process:
        output.write_text(json.dumps(results))
