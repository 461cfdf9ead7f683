"""How the processes of a training are launched, and how they stop together."""

import os
import signal
import threading
import time
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from .launch import PATIENCE, launched_with

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
LOOK_SECONDS = 5.0
STEP_PATIENCE = timedelta(hours=1)
"""Limit of a collective after the first step of a training.

The other processes then wait for one process's share of a step or of a validation, or for the main
process to write a checkpoint: minutes, also on a slow disk.
"""


def require_supported_launch(accelerator: Accelerator) -> None:
    """Raise ValueError, with the remedy, for a launch that would train something else than asked for."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but accelerate sees {accelerator.num_processes}: each would train alone, "
            "over the same files. On a CPU, set ACCELERATE_USE_CPU=true and use accelerate launch --multi_gpu"
        )
    for feature, kind in (("DEEPSPEED", DistributedType.DEEPSPEED), ("FSDP", DistributedType.FSDP)):
        if launched_with(feature) and accelerator.distributed_type != kind:
            raise ValueError(
                f"the launch asks for {feature}, and accelerate runs {accelerator.distributed_type.value} instead, which would "
                "shard nothing: it knows FSDP on accelerators only, and DeepSpeed on a CPU only where ACCELERATE_USE_CPU is "
                "not set. Launch with another file of conf/launch/"
            )
    if accelerator.distributed_type == DistributedType.DEEPSPEED and (
        clipping := accelerator.state.deepspeed_plugin.gradient_clipping
    ) not in ("auto", None):
        raise ValueError(
            f"the launch sets gradient_clipping to {clipping}; leave it out, and set train.max_grad_norm, which each training "
            "of a recipe has of its own"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"accelerate is set to {accelerator.gradient_accumulation_steps} gradient accumulation steps; leave it at 1 and "
            "set train.gradient_accumulation, which weighs micro batches by their labels"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"training in mixed precision {accelerator.mixed_precision!r} isn't supported; use bf16 or no")


class StepPatience:
    """Ends a training whose processes wait for each other longer than STEP_PATIENCE, so that a hang doesn't pass for slowness.

    A context manager. Before the first step and after the block PATIENCE holds: compiling and other stages take their time.
    DeepSpeed's own groups keep it throughout, but every step counts its labels in the default group.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._is_short = False

    def __enter__(self) -> "StepPatience":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_short:
            _limit_collectives(PATIENCE)

    def shorten(self) -> None:
        """Let STEP_PATIENCE hold from here on. All processes call this after every step; only the first call does anything."""
        if self._is_short or self._accelerator.num_processes == 1:
            return
        self._accelerator.wait_for_everyone()  # none may still be in its first step
        _limit_collectives(STEP_PATIENCE)
        self._is_short = True


def _limit_collectives(limit: timedelta) -> None:
    """Set the limit of the default group's collectives, of all its backends (NCCL and gloo have one)."""
    torch.distributed.distributed_c10d._set_pg_timeout(limit)  # torch has no public name for it


class Sigterm:
    """Whether a SIGTERM has come to any of the processes, so that all of them end after the same step.

    A context manager: inside the block the signal alone ends nothing. The processes share the
    signal through a collective, for which the host waits for the device. So they do it where the
    host waits for another reason, and about every LOOK_SECONDS: launchers kill the processes that
    are left after half a minute.
    """

    def __init__(self, accelerator: Accelerator, *, step: int) -> None:
        self._accelerator = accelerator
        self._come = threading.Event()
        self._looked_at = step, time.monotonic()
        self._next_look = step

    def __enter__(self) -> "Sigterm":
        self._previous = signal.signal(signal.SIGTERM, lambda *_: self._come.set())
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def stops(self, done: int, *, host_waits: bool) -> bool:
        """Whether to stop after step `done`, equal in all processes. To be called after every step."""
        if self._accelerator.num_processes == 1:
            return self._come.is_set()
        if not host_waits and done < self._next_look:
            return False
        step, then = self._looked_at
        self._looked_at = done, time.monotonic()
        signal_and_seconds = torch.tensor(
            [self._come.is_set(), (self._looked_at[1] - then) / (done - step)], dtype=torch.float32
        )
        num_come, seconds = self._accelerator.reduce(signal_and_seconds.to(self._accelerator.device), "sum").tolist()
        # From the sum over processes, so that all processes look after the same step.
        self._next_look = done + max(1, int(LOOK_SECONDS * self._accelerator.num_processes / seconds))
        return bool(num_come)
