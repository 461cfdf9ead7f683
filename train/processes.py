"""The accelerator of a training's processes, and how they start and stop together."""

import ctypes
import logging
import os
import signal
import sys
import time
import warnings
from contextlib import ExitStack
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, parse_flag_from_env
from transformers.integrations import unset_hf_deepspeed_config

logger = logging.getLogger(__name__)

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
LOOK_SECONDS = 5.0
STEP_PATIENCE = timedelta(hours=1)
"""Limit of a collective after the first step of a training.

The other processes then wait for one process's share of a step or of a validation, or for the main
process to write a checkpoint: minutes, also on a slow disk.
"""


def require_supported_launch(accelerator: Accelerator) -> None:
    """Raise ValueError for a launch that would train otherwise than configured."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but accelerate sees {accelerator.num_processes}: each would train alone, "
            "and write the same files. On a CPU, set ACCELERATE_USE_CPU=true and use accelerate launch --multi_gpu"
        )
    for feature, kind in (("DEEPSPEED", DistributedType.DEEPSPEED), ("FSDP", DistributedType.FSDP)):
        if parse_flag_from_env(f"ACCELERATE_USE_{feature}") and accelerator.distributed_type != kind:
            raise ValueError(
                f"the launch sets {feature}, and accelerate runs {accelerator.distributed_type.value} instead, which shards "
                "nothing. It supports FSDP only on GPUs, and DeepSpeed on a CPU only without ACCELERATE_USE_CPU. "
                "Launch with another file of conf/launch/"
            )
    if accelerator.distributed_type == DistributedType.DEEPSPEED and (
        clipping := accelerator.state.deepspeed_plugin.gradient_clipping
    ) not in ("auto", None):
        raise ValueError(
            f"the launch sets gradient_clipping to {clipping}; leave it out, and set train.max_grad_norm, "
            "which can differ between the trainings of a recipe"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"accelerate is set to {accelerator.gradient_accumulation_steps} gradient accumulation steps; leave it at 1 and "
            "set train.gradient_accumulation, which weighs micro-batches by their labels"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"training in mixed precision {accelerator.mixed_precision!r} isn't supported; use bf16 or no")


def limit_waiting(accelerator: Accelerator, stack: ExitStack) -> None:
    """Limit the time in which processes wait for each other to STEP_PATIENCE, until the stack ends.

    A longer wait ends the training. All processes call it after their first step: before it and after
    the training the limit is PATIENCE, because compiling and other stages take longer. DeepSpeed's own
    groups keep PATIENCE, but every step counts its labels in the default group.
    """
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()  # none may still be in its first step
        _limit_collectives(STEP_PATIENCE)
        stack.callback(_limit_collectives, PATIENCE)


def _limit_collectives(limit: timedelta) -> None:
    """Set the time limit of the default group's collectives, for NCCL and gloo."""
    torch.distributed.distributed_c10d._set_pg_timeout(limit)  # torch has no public name for it


class Sigterm:
    """Record of a SIGTERM or Ctrl-C to any process.

    All processes then end after the same step.

    A context manager: inside the block the first signal alone ends nothing; a second Ctrl-C raises
    KeyboardInterrupt at once. The end of the block raises KeyboardInterrupt after a Ctrl-C, and
    SystemExit after a SIGTERM, also if the signal came after the last step. The processes share
    the signal through a collective, for which the host waits for the device. So they do it where the
    host waits for another reason, and about every LOOK_SECONDS: launchers kill the processes that
    are left after half a minute.
    """

    def __init__(self, accelerator: Accelerator, *, step: int) -> None:
        self._accelerator = accelerator
        self._has_come = False
        self._is_interrupt = False
        self._done = step
        self._looked_at = step, time.monotonic()
        self._next_look = step

    def __enter__(self) -> "Sigterm":
        self._previous: dict[int, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate)}
        # Background jobs of a shell ignore SIGINT, and a caller may handle it in another way.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _terminate(self, *_: object) -> None:
        self._has_come = True

    def _interrupt(self, *_: object) -> None:
        """Handle Ctrl-C: the first one stops after the step, the second one at once."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._is_interrupt = self._has_come = True

    def __exit__(self, error: object, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is None and self.stops(self._done, host_waits=True):
            if self._is_interrupt:
                raise KeyboardInterrupt
            logger.warning("stopped by SIGTERM after step %d; the same command resumes there", self._done)
            raise SystemExit(SIGTERM_EXIT_CODE)

    def stops(self, done: int, *, host_waits: bool) -> bool:
        """Whether to stop after step `done`, equal in all processes.

        To be called after every step.
        """
        self._done = done
        if self._accelerator.num_processes == 1:
            return self._has_come
        if not host_waits and done < self._next_look:
            return False
        step, then = self._looked_at
        self._looked_at = done, time.monotonic()
        signal_and_seconds = torch.tensor(
            [self._has_come, (self._looked_at[1] - then) / max(done - step, 1)], dtype=torch.float32
        )
        num_come, seconds = self._accelerator.reduce(signal_and_seconds.to(self._accelerator.device), "sum").tolist()
        # From the sum over processes, so that all processes look after the same step.
        self._next_look = done + max(1, int(LOOK_SECONDS * self._accelerator.num_processes / max(seconds, 1e-6)))
        return bool(num_come)


PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that a process gets when its parent ends."""

PATIENCE = timedelta(days=1)
"""Time limit of a collective. Processes may finish their shards hours apart; the libraries' default
is minutes."""

RECORDED_COLLECTIVES = 2000
"""Number of collectives that NCCL writes to a file after a timeout, to show which process is
missing.

It is the default of newer versions of torch; older versions record nothing."""


def make_accelerator(mixed_precision: str | None = None) -> Accelerator:
    """Build the accelerator of this process, connected with the other processes of the launch.

    On a machine without GPUs, several processes communicate over gloo, with or without DeepSpeed.
    `mixed_precision` is `no` or `bf16`; None takes the launcher's value. Raises ValueError if the
    launch uses DeepSpeed, and DeepSpeed isn't installed.
    """
    _end_with_launcher()
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if deepspeed:
        # DeepSpeed uses deprecated names of torch, which warns at every call.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if deepspeed and find_spec("deepspeed") is None:
        raise ValueError(
            "the launch uses DeepSpeed, which is not installed: pip install 'outrider[deepspeed]', or launch with a "
            "configuration without it, such as conf/launch/one_node_fsdp2.yaml"
        )
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # Without it DeepSpeed, if it is installed, prints which device it detects.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # an older name of the variable below
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    if on_cpu and deepspeed:
        # accelerate looks for a backend of GPUs only, and the processes would not be connected.
        patience = InitProcessGroupKwargs(timeout=PATIENCE, backend="gloo")
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate ignores DeepSpeed
        _spare_deepspeed_compiling()
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=on_cpu and not deepspeed and "LOCAL_RANK" in os.environ,
        kwargs_handlers=[patience],
    )
    # Else transformers would partition every model that it loads from now on. The target must
    # stay whole.
    unset_hf_deepspeed_config()
    return accelerator


def _end_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the launcher ends.

    `accelerate launch` doesn't pass its own to a single process.
    """
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _spare_deepspeed_compiling() -> None:
    """Turn off DeepSpeed's collectives through shared memory, and use gloo.

    DeepSpeed would compile them for minutes.
    """
    import deepspeed.ops  # an optional package, and slow to import

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
