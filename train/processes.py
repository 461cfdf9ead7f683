"""How the processes of a training are launched, and how they stop together."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import DistributedType

from .launch import launched_with

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


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


@contextmanager
def catching_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, in place of ending the process."""
    event = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop_agreed(sigterm: threading.Event, accelerator: Accelerator, *, host_waits: bool) -> bool:
    """Whether to stop after this step. Several processes agree on it, and only at steps where the host waits anyway."""
    if accelerator.num_processes == 1:
        return sigterm.is_set()
    if not host_waits:
        return False
    if sigterm.is_set():
        accelerator.set_trigger()
    return bool(accelerator.check_trigger())
