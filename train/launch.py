"""The accelerator of the launched processes: GPUs or CPU, DeepSpeed, FSDP or neither."""

import ctypes
import os
import signal
import sys
import warnings
from datetime import timedelta
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, str_to_bool
from transformers.integrations import unset_hf_deepspeed_config

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that a process gets when its parent ends."""

PATIENCE = timedelta(days=1)
"""Time limit of a collective. Processes may finish their shards hours apart; the libraries' default
is minutes."""

RECORDED_COLLECTIVES = 2000
"""Number of collectives that NCCL writes to a file after a timeout, to show which process is
missing.

It is the default of newer versions of torch; older versions record nothing."""


def launched_with(feature: str) -> bool:
    """Whether `accelerate launch` has turned on a feature: `CPU`, `DEEPSPEED` or `FSDP`."""
    return bool(str_to_bool(os.environ.get(f"ACCELERATE_USE_{feature}", "false")))


def make_accelerator(mixed_precision: str | None = None) -> Accelerator:
    """Build the accelerator of this process, connected with the other processes of the launch.

    On a machine without GPUs, several processes communicate over gloo, with or without DeepSpeed.
    `mixed_precision` is `no` or `bf16`; None takes the launcher's value. Raises ValueError if the
    launch uses DeepSpeed, and DeepSpeed isn't installed.
    """
    _end_with_launcher()
    deepspeed = launched_with("DEEPSPEED")
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
