"""Differences between launches of a training: one process, DDP, ZeRO of DeepSpeed, FSDP2.

The loop passes the loss and marks a step's last micro-batch; these functions do what each launch
needs then. Only the drafter is wrapped, never the target.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from ..models.drafters.base import TrainableDrafter
from .config import TrainConfig

BUCKET_MIB = 100
"""Gradients that DDP exchanges at a time. A drafter's backward is short, so fewer and larger
exchanges than by default."""


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def sharding(accelerator: Accelerator) -> str | None:
    """Return the kind of sharding, `zero1` to `zero3` or `fsdp`; None without sharding."""
    if uses_deepspeed(accelerator):
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return "fsdp" if accelerator.distributed_type == DistributedType.FSDP else None


def describe_launch(accelerator: Accelerator) -> dict[str, Any]:
    """Everything of a launch that decides what is learned, as JSON values."""
    sharded = {} if (kind := sharding(accelerator)) is None else {"sharding": kind}
    return {"num_processes": accelerator.num_processes, **sharded, "mixed_precision": accelerator.mixed_precision}


def needs_whole_copy(accelerator: Accelerator) -> bool:
    """Whether the trained module can't draft: its weights are split, or have 16 bits."""
    kind = sharding(accelerator)
    return kind in ("zero3", "fsdp") or (uses_deepspeed(accelerator) and accelerator.mixed_precision != "no")


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    unused_parameters: bool,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap the model and its optimizer for the launch.

    With `unused_parameters` some of the model's parameters get no gradient, and DDP must look for
    them in every step.
    """
    accelerator.free_memory()  # of the training before this one
    if uses_deepspeed(accelerator):
        from deepspeed.utils import set_z3_leaf_modules  # an optional package, and slow to import

        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=config.batch_size,
            # The loop marks the last micro-batch, and has divided by the number of the whole step's labels.
            gradient_accumulation_steps=1,
            train_batch_size=config.batch_size * accelerator.num_processes,
            gradient_clipping=config.max_grad_norm or 0.0,
        )
        # ZeRO-3 must gather a drafter's weights at once, not module by module. Every gathering needs
        # all processes, but they differ in which modules they run, and how often: the loss is
        # computed in chunks of labels.
        set_z3_leaf_modules(model, [type(model)])
    accelerator.ddp_handler = DistributedDataParallelKwargs(
        find_unused_parameters=unused_parameters, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB
    )
    prepared: tuple[nn.Module, torch.optim.Optimizer] = accelerator.prepare(model, optimizer)
    return prepared


@contextmanager
def micro_batch(accelerator: Accelerator, model: Any, *, last: bool) -> Iterator[None]:
    """Exchange gradients after the `last` micro-batch of a step only."""
    if uses_deepspeed(accelerator):
        model.set_gradient_accumulation_boundary(last)
        yield
    elif last:
        yield
    else:
        with accelerator.no_sync(model):
            yield


def make_anchor(accelerator: Accelerator) -> torch.Tensor:
    """Make a zero to add to the loss, which shows ZeRO-3 the end of the backward pass.

    ZeRO-3 reduces a leaf module's gradients when the gradient of its input is ready. A batch needs
    no gradient, so this zero is an input that does. It is created first, and autograd runs in
    reverse, so its gradient is ready after all others.
    """
    return torch.zeros((), device=accelerator.device, requires_grad=sharding(accelerator) == "zero3")


def backward(accelerator: Accelerator, model: Any, loss: torch.Tensor) -> None:
    """Add the loss's gradient to those of the step."""
    if uses_deepspeed(accelerator):
        model.backward(loss)  # accelerator.backward would end a step with every micro-batch
    else:
        accelerator.backward(loss)


def finish_step(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
) -> torch.Tensor:
    """Clip the gradients, run the optimizer, reset the gradients; return their norm before."""
    if uses_deepspeed(accelerator):
        model.step()
        return torch.as_tensor(model.get_global_grad_norm(), dtype=torch.float32, device=accelerator.device)
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def gather_weights(accelerator: Accelerator, trained: TrainableDrafter, whole: TrainableDrafter) -> None:
    """Copy all parameters of `trained` into `whole`, in float32, in every process.

    All processes must call it together.
    """
    sources = dict(trained.named_parameters())
    for name, parameter in whole.named_parameters():
        parameter.copy_(_full(accelerator, sources[name]))


def _full(accelerator: Accelerator, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if not uses_deepspeed(accelerator):
        return parameter
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    of_optimizer: torch.Tensor | None = safe_get_full_fp32_param(parameter)
    if of_optimizer is not None:
        return of_optimizer.view(getattr(parameter, "ds_shape", parameter.shape))
    with GatheredParameters([parameter]):  # one that isn't trained
        return parameter.detach().clone()


@contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Use TF32 for float32 matrix products inside the block.

    It is several times faster on a GPU. TF32 has float32's range and 10 bits of its fraction, which
    is enough for gradients. Only the drafter's forward and backward use it. Labelling, evaluation
    and validation don't, since they compare tokens, and the target's states must be the same in all
    of them. On a CPU it changes nothing, because PyTorch's switch may mean bf16 there. A lower
    precision that is already set stays.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cpu" or before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
