"""One copy of a target for all processes of a launch, where it doesn't fit on one device: tensor parallelism.

Every process holds a slice of each layer's matrices, and all of the embeddings, the norms and the head (Shoeybi et al. 2019,
Megatron-LM, section 3), by the plan that transformers has for the model. A pass is then the work of all processes: each must
make it at the same time, on the same texts. So in a distillation they are one `Worker`, and in a training, where each has texts
of its own, they read everybody's in turn (`turns`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, gather_object
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from .config import TargetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Who does a part of some work with the target: a process, or all of them together where they hold one copy of it."""

    index: int
    num_workers: int
    speaks: bool
    """Whether this process is the one that writes, or counts, what the worker has done."""

    @classmethod
    def of(cls, accelerator: Accelerator, *, tensor_parallel: bool) -> "Worker":
        """The worker that this process is, or is a part of."""
        if tensor_parallel:
            return cls(index=0, num_workers=1, speaks=accelerator.is_main_process)
        return cls(index=accelerator.process_index, num_workers=accelerator.num_processes, speaks=True)


REMEDY = "leave target.tensor_parallel out, and quantise the target (target.quantization) if it doesn't fit"


def make_sharding(config: TargetConfig) -> DistributedConfig:
    """How transformers is to slice the model. Raises ValueError where the launch or the model doesn't allow that."""
    num_processes = PartialState().num_processes
    if num_processes == 1:
        raise ValueError(
            "target.tensor_parallel divides the target among the processes of a launch, and there is one; launch several "
            "(accelerate launch --config_file conf/launch/one_node.yaml), or leave it out"
        )
    model = AutoConfig.from_pretrained(
        config.name_or_path, revision=config.revision, trust_remote_code=config.trust_remote_code
    ).get_text_config()
    if not getattr(model, "base_model_tp_plan", None):
        raise ValueError(f"transformers has no plan to slice models of type {model.model_type}; {REMEDY}")
    sizes = {name: getattr(model, name, None) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    if uneven := {name: size for name, size in sizes.items() if size is not None and size % num_processes}:
        dimensions = " and ".join(f"{name} of {size}" for name, size in uneven.items())
        raise ValueError(
            f"{num_processes} processes can't share the target evenly: it has {dimensions}. Launch a number of processes that "
            f"divides these, or {REMEDY}"
        )
    # Drafters and losses multiply by these themselves, in each process as often as it needs.
    whole = {"lm_head": "replicate", "model.embed_tokens": "replicate"}
    return DistributedConfig(tp_size=num_processes, tp_plan=whole)


def require_whole_ends(model: PreTrainedModel) -> None:
    """Raise ValueError where embeddings or head were sliced too."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(f"transformers slices the embeddings or the head of {type(model).__name__}; {REMEDY}")


def turns(inputs: dict[str, Any], device: torch.device) -> Iterator[tuple[bool, dict[str, Any]]]:
    """The tensors that each process has brought, one process after the other, and whether they are this process's own."""
    own = PartialState().process_index
    for index, each in enumerate(gather_object([{name: value.cpu() for name, value in inputs.items()}])):
        yield index == own, {name: value.to(device) for name, value in each.items()}


def agreed(flag: bool, device: torch.device) -> bool:
    """What the main process says, for decisions that are made by the clock."""
    return bool(broadcast(torch.tensor(flag, device=device)))
