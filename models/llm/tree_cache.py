"""A KV cache that holds committed texts and, after each text, the nodes of its draft tree.

    row 0   a b c d|x y z . . .         | = lengths[0] = 4, then the entries of the last pass
    row 1   e f|x y z . . . . .         | = lengths[1] = 2

Buffers are allocated once and written in place. A pass writes its entries directly after each
row's committed columns. It sees the first `extent` columns; a mask hides the columns that a query
must not see. Nothing moves until the owner keeps some of the entries.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from transformers.cache_utils import Cache, CacheLayerMixin

from ...data.device import copied_to_host
from ..decoding.types import Counts
from .recurrent_states import RecurrentStates, State

EXTENT_STEP = 256
"""`extent` is a multiple of this number of columns if each new extent is compiled or recorded."""

ACCELERATOR_EXTENT_STEP = 512
"""The same step on an accelerator: a thousand columns more cost hundredths of a millisecond there, and a
recording tenths of a second. Kernels also copy a mask whose rows don't begin at multiples of 16 bytes."""


def extent_step(device: torch.device, *, is_fixed: bool) -> int:
    """Return the step in columns by which the extent of masked passes grows.

    It is 1 on a CPU unless shapes are fixed.
    """
    if device.type != "cpu":
        return ACCELERATOR_EXTENT_STEP
    return EXTENT_STEP if is_fixed else 1


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view of the cache: keys and values, [batch, head, capacity, head_dim]."""

    # Layers with a window keep all columns too: the mask hides those outside the window.
    is_sliding = False

    def __init__(self, cache: "TreeCache") -> None:
        super().__init__()
        # Weak: in a circle with its layers, a cache of gigabytes would wait for the garbage collector.
        self._cache = weakref.ref(cache)
        self._index_slot: Slot | None = None

    @property
    def cache(self) -> "TreeCache":
        cache = self._cache()
        assert cache is not None, "a layer lives as long as its cache"
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_slot, self._value_slot = self.cache.reserve(key_states), self.cache.reserve(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.cache.write(self._key_slot, key_states), self.cache.write(self._value_slot, value_states)

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Write the keys of an index [batch, token, width], by which a layer chooses keys; return those of all columns."""
        if self._index_slot is None:
            self._index_slot = self.cache.reserve(states[:, None])
        return self.cache.write(self._index_slot, states[:, None])[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        return self.cache.extent - self.cache.num_written

    def get_max_length(self) -> int:
        return self.cache.capacity


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text that left the batch, on the host."""

    length: int
    columns: list[torch.Tensor]
    """Its keys and values: [slot, head, token, head_dim] for each buffer."""
    states: list[State]
    """The states of recurrent layers after it: [1, ...]."""


Slot = tuple[int, int]
"""Index of a buffer, and of the slot in it."""


class TreeCache(Cache):
    """KV cache of a model's layers, with draft trees after the committed texts.

    All tensors of one shape are slots of one buffer, [slot, batch, head, capacity, head_dim]; so
    committing is one gather for all layers.

    Passes with a mask see a multiple of `extent_step` columns. With `is_fixed`, every pass over the
    same number of tokens reads and writes the same memory with the same shapes, whatever the rows'
    lengths: compiled code and CUDA graphs need this. `num_present` is the number of layers that
    write; others have no keys, or are in other processes. `layer_devices` are those of the keys and values.
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
        num_present: int | None = None,
        layer_devices: Sequence[torch.device] = (),
        recurrent: RecurrentStates | None = None,
    ) -> None:
        super().__init__(layers=[TreeCacheLayer(self) for _ in range(num_layers)])
        self._num_layers_on = Counter(layer_devices)
        self._num_present = num_layers if num_present is None else num_present
        self.extent_step, self.is_fixed = extent_step, is_fixed
        self.capacity, self.max_batch = self._rounded(capacity), batch
        self._host_lengths: tuple[int, ...] = ()
        self.extent = self._least_extent = self.num_written = self._offset = 0
        self.num_moves = 0
        """How often the cache was too small and moved. Recordings made before are then invalid."""
        # Memory that is allocated outside inference mode can be written in any mode.
        with torch.inference_mode(False):
            self._lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self._buffers: list[torch.Tensor] = []
        self._used: list[int] = []
        self._columns: slice | Int[torch.Tensor, "batch entry"] = slice(0, 0)
        self._copied_columns: dict[torch.device, torch.Tensor] = {}
        self.recurrent = recurrent
        """The states of recurrent layers; None for a model without such layers."""

    @property
    def lengths(self) -> Counts:
        """Committed tokens of each row. Later passes write to its device tensor."""
        return Counts(self._lengths[: self.batch], self._host_lengths)

    @property
    def batch(self) -> int:
        return len(self._host_lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have committed equally many tokens."""
        return min(self._host_lengths) == max(self._host_lengths)

    def fits(self, batch: int, capacity: int) -> bool:
        """Return whether another batch fits into the same memory."""
        return batch <= self.max_batch and capacity <= self.capacity

    def restart(self) -> None:
        """Drop all rows. The next batch has at most as many rows as the first."""
        self._host_lengths, self._least_extent = (), 0
        self._lengths.zero_()
        for buffer in self._buffers:
            buffer.zero_()  # masked values must be finite too
        if self.recurrent is not None:
            self.recurrent.restart()

    @torch.inference_mode(False)
    def reserve(self, states: torch.Tensor) -> Slot:
        """Return a free slot for tensors like `states`, in the buffer of their shape."""
        _, num_heads, _, head_dim = states.shape
        for index, buffer in enumerate(self._buffers):
            is_alike = (*buffer.shape[2::2], buffer.device) == (num_heads, head_dim, states.device)
            if is_alike and self._used[index] < len(buffer):
                self._used[index] += 1
                return index, self._used[index] - 1
        # Most layers are alike: room for all that follow on this device. Layers of some kinds take more than two slots.
        num_layers = self._num_layers_on[states.device] if self._num_layers_on else self._num_present
        here = (used for used, buffer in zip(self._used, self._buffers, strict=True) if buffer.device == states.device)
        shape = (max(2, 2 * num_layers - sum(here)), self.max_batch, num_heads, self.capacity, head_dim)
        self._buffers.append(states.new_zeros(shape))  # masked columns must be finite: NaN times 0 is NaN
        self._used.append(1)
        return len(self._buffers) - 1, 0

    @torch.inference_mode(False)
    def trim(self) -> None:
        """Free unused slots after the first pass.

        Models with layers of several shapes leave some unused.
        """
        self._buffers = [
            buffer if used == len(buffer) else buffer[:used].clone()
            for buffer, used in zip(self._buffers, self._used, strict=True)
        ]

    def begin_prefill(self, batch: int, num_entries: int) -> None:
        """Prepare the first pass, over `num_entries` tokens in each of `batch` rows."""
        self._host_lengths = (0,) * batch
        self.num_written = self.extent = num_entries
        self._columns = slice(0, num_entries)

    def begin_pass(self, num_entries: int, *, offset: int = 0, is_masked: bool = True) -> bool:
        """Prepare a pass over `num_entries` tokens per row, after `offset` uncommitted entries.

        Those entries come from earlier passes. Without a mask the pass sees exactly the written
        columns. Returns whether the cache was too small; it has then doubled and moved.
        """
        self.num_written, self._offset = num_entries, offset
        end = max(self._host_lengths) + offset + num_entries
        has_moved = end > self.capacity
        if has_moved:
            self._grow(max(end, 2 * self.capacity))
        self.extent = max(self._rounded(end), self._least_extent) if is_masked else end
        return has_moved

    def reserve_columns(self, num_columns: int) -> int:
        """Make room for `num_columns` entries after each text, which several passes will write.

        All these passes then see the same number of columns, which is returned: a recording of them
        serves all texts for which it is equal.
        """
        end = max(self._host_lengths) + num_columns
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity))
        self._least_extent = self._rounded(end)
        return self._least_extent

    def locate(self) -> None:
        """Compute the columns that the pass writes. A CUDA graph must repeat this each time."""
        self._columns = columns = self._behind(self.num_written, offset=self._offset, fixed=self.is_fixed)
        if self._num_layers_on and not isinstance(columns, slice):
            self._copied_columns = {device: columns.to(device) for device in self._num_layers_on}

    def write(self, slot: Slot, states: torch.Tensor) -> torch.Tensor:
        """Write a layer's new keys or values, and return all columns that the pass sees."""
        buffer_index, slot_index = slot
        buffer = self._buffers[buffer_index]
        stored = buffer[slot_index, : states.shape[0]]
        if isinstance(self._columns, slice):
            stored[:, :, self._columns] = states
        elif torch.compiler.is_compiling():
            torch.ops.outrider.write_columns(buffer, slot_index, self._columns, states)
        else:
            write_columns(buffer, slot_index, self._copied_columns.get(buffer.device, self._columns), states)
        return stored[:, :, : self.extent]

    def states(self, num_columns: int) -> list[tuple[torch.Tensor, ...]]:
        """Return the keys and the values of each layer of this process, in the first columns."""
        layers = (layer for layer in self.layers if isinstance(layer, TreeCacheLayer) and layer.is_initialized)
        slots = ((layer._key_slot, layer._value_slot) for layer in layers)
        return [tuple(self._buffers[index][slot, : self.batch, :, :num_columns] for index, slot in pair) for pair in slots]

    def keep(self, entries: Int[torch.Tensor, "batch kept"] | None, counts: Counts) -> None:
        """Commit the first `counts` of each row's `entries` after the text; drop what isn't listed.

        Entries are committed in their order. Those listed behind them become the first entries
        after the longer text, in their order, until a pass overwrites them. So a later pass can
        read on behind them (its `offset` is their number). A row that commits fewer entries than
        others lists arbitrary ones there. None lists the entries as they are, in the right columns;
        with negative counts it removes the last committed tokens.
        """
        if self.recurrent is not None:
            self.recurrent.keep(entries, counts.host)
        self.keep_on_device(entries, counts.device)
        self.count(counts.host)

    def keep_on_device(
        self, entries: Int[torch.Tensor, "batch kept"] | None, counts: Int[torch.Tensor, " batch"], *, fixed: bool = False
    ) -> None:
        """Do the device's part of `keep`; with `fixed`, so that a recording can repeat it."""
        if entries is not None:
            source, columns = self._lengths[: self.batch, None] + entries, self._behind(entries.shape[1], fixed=fixed)
            for buffer in self._buffers:
                move_columns(buffer[:, : self.batch], source, columns)
        self._lengths[: self.batch].add_(counts)

    def count(self, counts: Sequence[int]) -> None:
        """Do the host's part of `keep`: add `counts` to the rows' lengths."""
        self._host_lengths = tuple(length + count for length, count in zip(self._host_lengths, counts, strict=True))

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch.

        No row moves back (`rows[i] >= i`), so none is overwritten before it has moved. The last row may be repeated.
        """
        for index, row in enumerate(rows):
            if index != row:
                self._lengths[index] = self._lengths[row]
                for buffer in self._buffers:
                    buffer[:, index] = buffer[:, row]
        self._host_lengths = tuple(self._host_lengths[row] for row in rows)
        if self.recurrent is not None:
            self.recurrent.select(rows)

    def take(self, row: int) -> KeptText:
        """Copy a row's committed keys and values, and its states, to the host."""
        length = self._host_lengths[row]
        columns = copied_to_host([buffer[:, row, :, :length] for buffer in self._buffers], self._lengths.device)
        return KeptText(length, columns, self.recurrent.take(row) if self.recurrent is not None else [])

    @torch.inference_mode(False)
    def put(self, texts: Sequence[KeptText]) -> None:
        """Append rows with texts that `take` copied from a cache of the same model."""
        # If nothing was read yet, allocate the buffers. Layers reserve slots in the same order as before.
        if not self._buffers:
            for kept in texts[0].columns:
                num_slots, num_heads, _, head_dim = kept.shape
                shape = (num_slots, self.max_batch, num_heads, self.capacity, head_dim)
                self._buffers.append(torch.zeros(shape, dtype=kept.dtype, device=self._lengths.device))
                self._used.append(0)
        for text in texts:
            row, length = self.batch, text.length
            for buffer, kept in zip(self._buffers, text.columns, strict=True):
                buffer[:, row, :, :length] = kept.to(buffer.device)
            self._lengths[row] = length
            self._host_lengths += (length,)
        if self.recurrent is not None and texts:
            self.recurrent.put([text.states for text in texts])

    def _rounded(self, num_columns: int) -> int:
        return -(-num_columns // self.extent_step) * self.extent_step

    @torch.inference_mode(False)
    def _grow(self, capacity: int) -> None:
        more = self._rounded(capacity) - self.capacity
        self._buffers = [torch.nn.functional.pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]
        self.capacity += more
        self.num_moves += 1

    def _behind(self, num_entries: int, *, offset: int = 0, fixed: bool = False) -> slice | Int[torch.Tensor, "batch entry"]:
        """Return the `num_entries` columns that start `offset` after each row's committed columns.

        They are a slice if all rows are equally long. With `fixed` they are always a tensor, which
        a recording can recompute.
        """
        if self.is_even and not fixed:
            start = self._host_lengths[0] + offset
            return slice(start, start + num_entries)
        return self._lengths[: self.batch, None] + torch.arange(offset, offset + num_entries, device=self._lengths.device)


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
