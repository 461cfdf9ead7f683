"""Tensor parallelism: one copy of a target, sliced over all processes of a launch.

Use it for a target that doesn't fit on one device. Each process holds a slice of each layer's
matrices, and whole copies of the embeddings, the norms and the head (Shoeybi et al. 2019,
Megatron-LM, section 3). The slices follow transformers' plan for the model. All processes compute a
pass together, so each must run it at the same time, on the same texts. In labelling, all processes
are therefore one `Worker`. In training each process has its own texts, and all processes read the
texts of each in turn (`turns`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, gather_object
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from .config import TargetConfig
from .pretrained import read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Unit of parallel work: one process, or all of them if they share one target."""

    index: int
    num_workers: int
    speaks: bool
    """Whether this process writes, or counts, the worker's results."""

    @classmethod
    def of(cls, accelerator: Accelerator, *, tensor_parallel: bool) -> "Worker":
        """Return the worker that this process belongs to."""
        if tensor_parallel:
            return cls(index=0, num_workers=1, speaks=accelerator.is_main_process)
        return cls(index=accelerator.process_index, num_workers=accelerator.num_processes, speaks=True)


REMEDY = "leave target.tensor_parallel out, and quantise the target (target.quantization) if it doesn't fit"


def make_sharding(config: TargetConfig) -> DistributedConfig:
    """Return how transformers slices the model, after checking the launch and the model.

    Raises ValueError if the launch has one process, or if the model can't be sliced evenly.
    """
    # 1. There must be several processes.
    num_processes = PartialState().num_processes
    if num_processes == 1:
        raise ValueError(
            "target.tensor_parallel divides the target among the processes of a launch, and there is one; launch several "
            "(accelerate launch --config_file conf/launch/one_node.yaml), or leave it out"
        )
    # 2. transformers must have a plan for this kind of model.
    model = read_config(config).get_text_config()
    if not getattr(model, "base_model_tp_plan", None):
        raise ValueError(f"transformers has no plan to slice models of type {model.model_type}; {REMEDY}")
    # 3. The sliced dimensions must be divisible by the number of processes.
    sizes = {name: getattr(model, name, None) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    if uneven := {name: size for name, size in sizes.items() if size is not None and size % num_processes}:
        dimensions = " and ".join(f"{name} of {size}" for name, size in uneven.items())
        raise ValueError(
            f"{num_processes} processes can't share the target evenly: it has {dimensions}. Launch a number of processes that "
            f"divides these, or {REMEDY}"
        )
    # 4. Drafters and losses multiply by embeddings and head themselves, so each process has them
    # whole.
    whole = {"lm_head": "replicate", "model.embed_tokens": "replicate"}
    return DistributedConfig(tp_size=num_processes, tp_plan=whole)


def require_whole_ends(model: PreTrainedModel) -> None:
    """Raise ValueError if transformers has sliced the embeddings or the head."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(f"transformers slices the embeddings or the head of {type(model).__name__}; {REMEDY}")


def turns(inputs: dict[str, Any], device: torch.device) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield the inputs of each process in turn, and whether they are this process's inputs."""
    rank = PartialState().process_index
    for index, tensors in enumerate(gather_object([{name: value.cpu() for name, value in inputs.items()}])):
        yield index == rank, {name: value.to(device) for name, value in tensors.items()}


def agreed(flag: bool, device: torch.device) -> bool:
    """Return the main process's flag on all processes, for decisions that depend on the clock."""
    return bool(broadcast(torch.tensor(flag, device=device)))
