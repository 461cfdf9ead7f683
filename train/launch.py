"""The accelerator of the processes that a training was launched with: GPUs or a CPU, with DeepSpeed, FSDP or neither."""

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
"""Linux's prctl(2)."""

PATIENCE = timedelta(days=1)
"""Limit of a collective. Processes may finish their shards hours apart, and the libraries' own limit is minutes."""

RECORDED_COLLECTIVES = 2000
"""Last collectives that NCCL writes to a file where one runs into its limit: they show which process didn't come. It is the
default of newer versions of torch; older ones record nothing."""


def launched_with(feature: str) -> bool:
    """Whether `accelerate launch` has a feature turned on: `CPU`, `DEEPSPEED` or `FSDP`."""
    return bool(str_to_bool(os.environ.get(f"ACCELERATE_USE_{feature}", "false")))


def make_accelerator(mixed_precision: str | None = None) -> Accelerator:
    """The accelerator of this process, joined with the others that were launched beside it.

    On a machine without an accelerator several processes meet over gloo, with DeepSpeed or without it, whatever launched them.
    `mixed_precision` is `no` or `bf16`; None takes the launcher's. Raises ValueError where DeepSpeed is asked for and absent.
    """
    _end_with_launcher()
    deepspeed = launched_with("DEEPSPEED")
    if deepspeed:
        # DeepSpeed calls torch by old names, and torch says so at every call.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if deepspeed and find_spec("deepspeed") is None:
        raise ValueError(
            "the launch asks for DeepSpeed, which is not installed: pip install 'outrider[deepspeed]', or launch with a "
            "configuration without it, such as conf/launch/one_node_fsdp2.yaml"
        )
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # where it is installed, DeepSpeed is asked, and says so on stdout
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # an older name of the same
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    if on_cpu and deepspeed:
        # accelerate looks for a backend among accelerators only, and would leave every process alone.
        patience = InitProcessGroupKwargs(timeout=PATIENCE, backend="gloo")
        os.environ.pop("ACCELERATE_USE_CPU", None)  # it would turn DeepSpeed off
        _spare_deepspeed_compiling()
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=on_cpu and not deepspeed and "LOCAL_RANK" in os.environ,
        kwargs_handlers=[patience],
    )
    # transformers would partition every model that is loaded from now on. Only the drafter is; the target stays whole.
    unset_hf_deepspeed_config()
    return accelerator


def _end_with_launcher() -> None:
    """Have Linux send SIGTERM when the launcher dies. Of a single process, `accelerate launch` doesn't pass its own on."""
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _spare_deepspeed_compiling() -> None:
    """On a CPU DeepSpeed would compile, for minutes, an exchange of its own through shared memory; gloo does as well."""
    import deepspeed.ops  # an optional package, and slow to import

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
