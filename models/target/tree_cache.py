"""A KV cache that holds committed texts and, behind each, the nodes of its draft tree.

    row 0   a b c d|x y z . . .         | = lengths[0] = 4, then the entries of the last pass
    row 1   e f|x y z . . . . .         | = lengths[1] = 2

Buffers are allocated once and written in place. A pass writes its entries right behind each row's committed ones and sees the
first `extent` columns; a mask hides those that a query must not see. Nothing moves until the owner keeps some of the entries.

Committed columns are never written again, except by `rewind`, `select` and `restart`. So a
`CacheSnapshot` needs to name no more than how many columns were committed at its time.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from transformers.cache_utils import Cache, CacheLayerMixin

from ..decoding.types import Counts

EXTENT_STEP = 256
"""Columns by which the part of a cache grows that passes see, where each new length of it is
compiled or recorded."""

ACCELERATOR_EXTENT_STEP = 512
"""The same on an accelerator, in every form. A thousand columns more cost hundredths of a
millisecond there, a recording tenths of a second; and kernels copy a mask whose rows don't begin at
multiples of 16 bytes."""


def extent_step(device: torch.device, *, is_fixed: bool) -> int:
    """Return the columns by which the part of a cache grows that masked passes see; 1 on a CPU
    unless shapes are fixed."""
    if device.type != "cpu":
        return ACCELERATOR_EXTENT_STEP
    return EXTENT_STEP if is_fixed else 1


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the cache: keys and values, [batch, head, capacity, head_dim]."""

    is_sliding = False  # layers with a window keep everything too: the mask hides what is out of it

    def __init__(self, cache: "TreeCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._place_keys, self._place_values = self.cache.reserve(key_states), self.cache.reserve(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.cache.write(self._place_keys, key_states), self.cache.write(self._place_values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        return self.cache.extent - self.cache.num_written

    def get_max_length(self) -> int:
        return self.cache.capacity


KeptText = list[torch.Tensor]
"""A text's keys and values, a tensor [slot, head, token, head_dim] of each buffer."""

Place = tuple[int, int]
"""Index of a buffer, and of the slot in it."""


class TreeCache(Cache):
    """The layers of a model. All tensors of one shape lie in one buffer, [slot, batch, head, capacity, head_dim], so that
    committing is one gather for all layers.

    Passes under a mask see a multiple of `extent_step` columns. With `is_fixed`, every pass over as
    many tokens reads and writes the same memory with the same shapes, whatever the rows' lengths:
    what compiled code and CUDA graphs need.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        device: torch.device,
        *,
        extent_step: int = 1,
        is_fixed: bool = False,
    ) -> None:
        super().__init__(layers=[TreeCacheLayer(self) for _ in range(num_layers)])
        self.extent_step, self.is_fixed = extent_step, is_fixed
        self.capacity = self._rounded(capacity)
        self.max_batch = batch
        self._host_lengths: tuple[int, ...] = ()
        self._version = self._oldest_version = 0
        self.extent = 0
        self.num_written = 0
        self._offset = 0
        # All memory is allocated outside inference mode, so that it can be written in any mode.
        with torch.inference_mode(False):
            self._lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self._buffers: list[torch.Tensor] = []
        self._used: list[int] = []
        self._columns: slice | Int[torch.Tensor, "batch entry"] = slice(0, 0)

    @property
    def lengths(self) -> Counts:
        """Committed tokens of each row. Later passes write to its tensor."""
        return Counts(self._lengths[: self.batch], self._host_lengths)

    @property
    def batch(self) -> int:
        return len(self._host_lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have committed equally many tokens."""
        return min(self._host_lengths) == max(self._host_lengths)

    def fits(self, batch: int, capacity: int) -> bool:
        """Whether another batch can be read into the same memory."""
        return batch <= self.max_batch and capacity <= self.capacity

    def restart(self) -> None:
        """Forget all rows, and be ready for a batch of at most as many as the first."""
        self._host_lengths = ()
        self._forget_snapshots()
        self._lengths.zero_()
        for buffer in self._buffers:
            buffer.zero_()  # what is masked must still be a number

    @torch.inference_mode(False)
    def reserve(self, states: torch.Tensor) -> Place:
        """A slot for tensors like `states`, in the buffer of their shape."""
        _, num_heads, _, head_dim = states.shape
        for index, buffer in enumerate(self._buffers):
            if buffer.shape[2::2] == (num_heads, head_dim) and self._used[index] < len(buffer):
                self._used[index] += 1
                return index, self._used[index] - 1
        left = 2 * len(self.layers) - sum(self._used)  # layers are mostly alike: room for all that are to come
        # Zeros, since what lies between a short row and the longest one is masked, and NaN times 0 would still be NaN.
        self._buffers.append(states.new_zeros(left, self.max_batch, num_heads, self.capacity, head_dim))
        self._used.append(1)
        return len(self._buffers) - 1, 0

    @torch.inference_mode(False)
    def trim(self) -> None:
        """After the first pass: give back the slots that no layer took, which models with layers of several shapes leave."""
        self._buffers = [
            buffer if used == len(buffer) else buffer[:used].clone()
            for buffer, used in zip(self._buffers, self._used, strict=True)
        ]

    def begin_prefill(self, batch: int, num_entries: int) -> None:
        """Prepare the first pass, over `num_entries` tokens in each of `batch` rows."""
        self._host_lengths = (0,) * batch
        self._version += 1
        self.num_written = self.extent = num_entries
        self._columns = slice(0, num_entries)

    def begin_pass(self, num_entries: int, *, offset: int = 0, is_masked: bool = True) -> bool:
        """Prepare a pass over `num_entries` tokens per row, behind `offset` entries of earlier
        passes that aren't committed.

        Without a mask the pass sees exactly the columns that are written. Returns whether the cache
        was too small: it then has doubled, and moved.
        """
        self.num_written, self._offset = num_entries, offset
        self._version += 1
        end = max(self._host_lengths) + offset + num_entries
        has_moved = end > self.capacity
        if has_moved:
            self._grow(max(end, 2 * self.capacity))
        self.extent = self._rounded(end) if is_masked else end
        return has_moved

    def locate(self) -> None:
        """Find the columns that the pass writes: the part of its beginning that a CUDA graph must do again each time."""
        self._columns = self._behind(self.num_written, offset=self._offset, fixed=self.is_fixed)

    def write(self, place: Place, states: torch.Tensor) -> torch.Tensor:
        """Write a layer's new keys or values, and return all that the pass sees of them."""
        buffer = self._buffers[place[0]]
        slot = buffer[place[1], : states.shape[0]]
        if isinstance(self._columns, slice):
            slot[:, :, self._columns] = states
        elif torch.compiler.is_compiling():
            torch.ops.outrider.write_columns(buffer, place[1], self._columns, states)
        else:
            _write_columns(buffer, place[1], self._columns, states)
        return slot[:, :, : self.extent]

    def keep(self, entries: Int[torch.Tensor, "batch kept"] | None, counts: Counts) -> None:
        """Commit the first `counts` of the `entries` of each row's last pass, in that order; forget the others.

        A row that keeps fewer than are named must name others all the same (any), which are soon overwritten. None keeps the
        pass's first entries, which lie where they belong.
        """
        if entries is not None:
            columns = self._behind(entries.shape[1])
            for buffer in self._buffers:
                _move(buffer[:, : self.batch], self._lengths[: self.batch, None] + entries, columns)
        self._version += 1
        self._lengths[: self.batch].add_(counts.device)
        self._host_lengths = tuple(length + count for length, count in zip(self._host_lengths, counts.host, strict=True))

    def rewind(self, num_tokens: Counts) -> None:
        """Forget the last committed tokens, so many in each row."""
        self.keep(None, -num_tokens)
        self._forget_snapshots()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only. They ascend, so none is overwritten before it has
        moved; the last one may be named again."""
        for place, row in enumerate(rows):
            if place != row:
                self._lengths[place] = self._lengths[row]
                for buffer in self._buffers:
                    buffer[:, place] = buffer[:, row]
        self._host_lengths = tuple(self._host_lengths[row] for row in rows)
        self._forget_snapshots()

    def snapshot(self) -> "CacheSnapshot":
        """Return the texts as they are committed now, and the entries behind them, as a value."""
        return CacheSnapshot(cache=self, version=self._version, lengths=self._host_lengths)

    def _forget_snapshots(self) -> None:
        """Take note that committed columns of earlier snapshots are gone."""
        self._version += 1
        self._oldest_version = self._version

    @torch.inference_mode(False)
    def copy_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> "TreeCache":
        """Return a cache of these rows, in memory of its own, with the first `lengths` columns of each."""
        other = copy(self)
        other.layers = [copy(layer) for layer in self.layers]
        for layer in other.layers:
            assert isinstance(layer, TreeCacheLayer)
            layer.cache = other
        other.max_batch, other._host_lengths = len(rows), tuple(lengths)
        other._oldest_version = other._version
        index, end = torch.tensor(rows, device=self._lengths.device), max(lengths)
        other._lengths = torch.tensor(lengths, device=self._lengths.device)
        other._buffers, other._used = [], list(self._used)
        for buffer in self._buffers:
            num_slots, _, num_heads, capacity, head_dim = buffer.shape
            other._buffers.append(buffer.new_zeros(num_slots, len(rows), num_heads, capacity, head_dim))
            other._buffers[-1][:, :, :, :end] = buffer[:, :, :, :end].index_select(1, index)
        return other

    def take(self, row: int) -> KeptText:
        """Copy a row's committed keys and values to the host."""
        length = self._host_lengths[row]
        texts = [buffer[:, row, :, :length] for buffer in self._buffers]
        if self._lengths.device.type == "cpu":
            return [text.clone() for text in texts]
        # Into pinned memory, all copies under way at once: into ordinary memory each would be
        # staged, and waited for.
        copies = [torch.empty(text.shape, dtype=text.dtype, pin_memory=True).copy_(text, non_blocking=True) for text in texts]
        torch.accelerator.current_stream(self._lengths.device).synchronize()
        return copies

    @torch.inference_mode(False)
    def put(self, texts: Sequence[KeptText]) -> None:
        """Add rows behind those that are there: texts that were taken from a cache of the same model."""
        self._version += 1
        if not self._buffers:  # nothing was read yet; the layers will find their slots in the order in which they did before
            for kept in texts[0]:
                num_slots, num_heads, _, head_dim = kept.shape
                shape = (num_slots, self.max_batch, num_heads, self.capacity, head_dim)
                self._buffers.append(torch.zeros(shape, dtype=kept.dtype, device=self._lengths.device))
                self._used.append(0)
        for text in texts:
            row, length = self.batch, text[0].shape[2]
            for buffer, kept in zip(self._buffers, text, strict=True):
                buffer[:, row, :, :length] = kept.to(buffer.device)
            self._lengths[row] = length
            self._host_lengths += (length,)

    def _rounded(self, num_columns: int) -> int:
        return -(-num_columns // self.extent_step) * self.extent_step

    @torch.inference_mode(False)
    def _grow(self, capacity: int) -> None:
        more = self._rounded(capacity) - self.capacity
        self._buffers = [torch.nn.functional.pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]
        self.capacity += more

    def _behind(self, num_entries: int, *, offset: int = 0, fixed: bool = False) -> slice | Int[torch.Tensor, "batch entry"]:
        """The `num_entries` columns `offset` behind each row's committed ones: a slice where all rows are equally long, unless
        the columns must be looked up again each time (`fixed`)."""
        if self.is_even and not fixed:
            start = self._host_lengths[0] + offset
            return slice(start, start + num_entries)
        return self._lengths[: self.batch, None] + torch.arange(offset, offset + num_entries, device=self._lengths.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The texts that a cache held at one moment: a value, although the cache is written on."""

    cache: TreeCache
    version: int
    lengths: tuple[int, ...]

    @property
    def is_newest(self) -> bool:
        """Whether the cache hasn't been written since. If so, the entries behind the texts are still there, too."""
        return self.cache._version == self.version

    def writable(self) -> TreeCache:
        """Return a cache with these texts that may be written: the snapshot's own if it is the newest, otherwise a copy.

        Raises RuntimeError where the memory has been taken over.
        """
        return self.cache if self.is_newest else self._copy(range(len(self.lengths)))

    def select(self, rows: Sequence[int]) -> "CacheSnapshot":
        """Return a snapshot of these rows. Memory of a fixed address is taken over, all other memory is copied."""
        if not self.cache.is_fixed:
            return self._copy(rows).snapshot()
        cache = self.writable()
        cache.select(rows)
        return cache.snapshot()

    def _copy(self, rows: Sequence[int]) -> TreeCache:
        if self.version < self.cache._oldest_version:
            raise RuntimeError(
                "the memory of this drafter's state was taken over by a later batch, or by fewer rows of its own: passes that "
                "are compiled or recorded have one memory. Begin the text again, or turn target.compiled and "
                "target.cuda_graphs off"
            )
        return self.cache.copy_rows(rows, [self.lengths[row] for row in rows])


def _write_columns(buffer: torch.Tensor, slot: int, columns: torch.Tensor, states: torch.Tensor) -> None:
    """Write [batch, head, entry, head_dim] to the columns [batch, entry] of a slot."""
    buffer[slot, : len(states)].scatter_(2, columns[:, None, :, None].expand(states.shape), states)


# To the compiler an operator of its own: a scatter into a part of a buffer it turns into a copy of the whole.
torch.library.custom_op("outrider::write_columns", _write_columns, mutates_args={"buffer"})


def _move(
    buffer: torch.Tensor, source: Int[torch.Tensor, "batch kept"], target: slice | Int[torch.Tensor, "batch kept"]
) -> None:
    """Copy columns of a [slot, batch, head, column, head_dim] buffer, row by row of the batch."""
    if len(source) == 1:
        kept = buffer.index_select(3, source[0])
    else:
        shape = (*buffer.shape[:3], source.shape[1], buffer.shape[4])
        kept = buffer.gather(3, source[None, :, None, :, None].expand(shape))
    if isinstance(target, slice):
        buffer[:, :, :, target] = kept
    else:
        buffer.scatter_(3, target[None, :, None, :, None].expand(kept.shape), kept)
