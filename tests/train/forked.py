"""Shared code of launched and killed runs: forked processes, FSDP2, and a drafter whose training uses random numbers."""

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tqdm import tqdm

from outrider.data.types import DrafterBatch
from outrider.models.drafters.objective import Loss, Objective
from outrider.models.drafters.redrafter import Redrafter


class DropoutDrafter(Redrafter):
    """ReDrafter with dropout, so that resuming must restore the random state too.

    It counts its losses.
    """

    calls = 0

    def loss(self, batch: DrafterBatch, objective: Objective) -> Loss:
        DropoutDrafter.calls += 1
        hidden_states = torch.nn.functional.dropout(batch.hidden_states, 0.1, self.training)
        return super().loss(replace(batch, hidden_states=hidden_states), objective)


def fork(processes: int, work: Callable[[], Any]) -> list[int]:
    """Do the work in a number of forked processes; return their ids.

    If there are several, they join in torch.distributed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gc.freeze()  # garbage collection in children skips the objects of imports
    pids = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            # Forked processes share tqdm's lock, which stays locked if its holder is killed.
            tqdm.set_lock(RLock())
            if processes > 1:
                launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in launch.items()}, MASTER_ADDR="127.0.0.1")
            code: Any = 1
            try:
                work()
                code = 0
            except SystemExit as stopped:
                code = stopped.code
            finally:
                if code == 1:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(code)
        pids.append(pid)
    return pids


def ends(pids: list[int]) -> list[int]:
    """Wait for processes; return their exit codes (a negative one is the signal)."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_on_call(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """Kill this process at call `number` of `owner.name`, before or after the call."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            kill()
        result = original(*args, **kwargs)
        if calls == number:
            kill()
        return result

    setattr(owner, name, counted)


def with_fsdp2(accelerator: Accelerator) -> Accelerator:
    """Enable FSDP2 on a CPU: accelerate allows FSDP only on accelerators, but its code works."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
    )
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator
