"""Script of test_patience.py: two processes, of which the second is late for collectives.

It prints a JSON object with the result of each collective of the first process, or the name of the
error.
"""

import json
import sys
import time
from datetime import timedelta

import torch
from forked import ends, fork

from outrider.train import processes
from outrider.train.processes import make_accelerator

LIMIT_SECONDS, LATE_SECONDS = 0.5, 1.5


def main() -> None:
    torch.set_num_threads(1)
    processes.STEP_PATIENCE = timedelta(seconds=LIMIT_SECONDS)
    assert ends(fork(2, meet)) == [0, 0]


def meet() -> None:
    accelerator = make_accelerator()
    results = {}

    def meet_late(name: str) -> None:
        if not accelerator.is_main_process:
            time.sleep(LATE_SECONDS)
        try:
            results[name] = float(accelerator.reduce(torch.ones(()), "sum"))
        except RuntimeError as error:
            results[name] = type(error).__name__

    with processes.StepPatience(accelerator) as patience:
        meet_late("before the first step")
        patience.shorten()
    meet_late("after the training")
    with processes.StepPatience(accelerator) as patience:
        patience.shorten()
        patience.shorten()
        meet_late("after a step")
    if accelerator.is_main_process:
        sys.stdout.write(json.dumps(results))


main()
