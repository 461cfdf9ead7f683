"""Writing and copying columns of a cache's buffers."""

from collections.abc import Sequence

import torch
from jaxtyping import Int


def write_columns(buffer: torch.Tensor, slot: int, columns: torch.Tensor, states: torch.Tensor) -> None:
    """Write [batch, head, entry, head_dim] to the columns [batch, entry] of a slot."""
    stored = buffer[slot, : len(states)]
    if stored.is_cpu:
        stored.transpose(1, 2)[_rows(columns), columns] = states.transpose(1, 2)
    else:
        stored.scatter_(2, columns[:, None, :, None].expand(states.shape), states)


def _rows(columns: torch.Tensor) -> torch.Tensor:
    """Return the row of each column, as an index.

    A CPU scatters numbers of 16 bits up to a thousand times as slowly as it writes to indexed places.
    """
    return torch.arange(len(columns), device=columns.device)[:, None]


# An opaque operator for the compiler, which turns a scatter into a part of a buffer into a copy of
# the whole buffer.
torch.library.custom_op("outrider::write_columns", write_columns, mutates_args={"buffer"})


def move_columns(
    buffer: torch.Tensor, source: Int[torch.Tensor, "batch kept"], target: slice | Int[torch.Tensor, "batch kept"]
) -> None:
    """Copy columns of a [slot, batch, head, column, head_dim] buffer, row by row of the batch."""
    source, target = source.to(buffer.device), target if isinstance(target, slice) else target.to(buffer.device)
    if len(source) == 1:
        kept = buffer.index_select(3, source[0])
    else:
        shape = (*buffer.shape[:3], source.shape[1], buffer.shape[4])
        kept = buffer.gather(3, source[None, :, None, :, None].expand(shape))
    if isinstance(target, slice):
        buffer[:, :, :, target] = kept
    elif buffer.is_cpu:
        buffer.permute(1, 3, 0, 2, 4)[_rows(target), target] = kept.permute(1, 3, 0, 2, 4)
    else:
        buffer.scatter_(3, target[None, :, None, :, None].expand(kept.shape), kept)


def copied_to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors to the host. The host waits for the `device` once."""
    if device.type == "cpu":
        return [tensor.clone() for tensor in tensors]
    # Copies into pinned memory run at once. For others, which are staged, the host waits for each.
    copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True) for one in tensors]
    torch.accelerator.current_stream(device).synchronize()
    return copies
