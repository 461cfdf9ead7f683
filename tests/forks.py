"""Processes that start at once: forks of a small server, which has imported torch and our modules.

The test's own process can't be forked: it may have threads, or have used a GPU.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# accelerate imports deepspeed in every training where it is installed.
CONTEXT.set_forkserver_preload(
    [
        "deepspeed",
        "outrider.distill.label.run",
        "outrider.distill.regenerate.run",
        "outrider.models.drafters.draft_model",
        "outrider.train.run",
        "pytest",
    ]
)

LONGEST_SECONDS = 500
"""The longest work kills a dozen trainings of two processes."""


def result_of(work: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return the result of a function of a module in a process of its own, with this environment besides ours."""
    near, far = CONTEXT.Pipe(duplex=False)
    with near:
        process = CONTEXT.Process(target=_send_result, args=(far, {**os.environ, **environment}, work, arguments))
        process.start()
        far.close()
        try:
            assert wait([near, process.sentinel], LONGEST_SECONDS), "the process doesn't end"
            with suppress(EOFError):
                if near.poll():
                    return near.recv()
            raise AssertionError("the process ended with an error, which it has printed")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.join()


def _send_result(end: "Connection[Any, Any]", environment: dict[str, str], work: Callable[..., Any], arguments: Any) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    end.send(work(*arguments))
