"""A stage: some layers of the target, and what its process does."""

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
from jaxtyping import Int

from ...decoding.tree import tree_of
from ...decoding.types import Counts
from ..linears import choose_linears
from ..tree_cache import TreeCache
from ..tree_reader import TreeReader
from .links import StageLink
from .messages import Work
from .slices import LayerSlice


class Stage:
    """Layers that handle messages one after the other. What it does depends on the messages only.

    Cancellations come at any time and change nothing that later runs read: a run may be cancelled
    only if none of its entries is kept by a later message. Its entries hold some finite numbers
    then, and masks hide them from all others.
    """

    def __init__(self, layers: LayerSlice) -> None:
        self.layers = layers
        self._reader = TreeReader(layers.model, is_fixed=False, num_present=len(layers.layers))
        self._cache: TreeCache | None = None

    @torch.inference_mode()
    def handle(self, work: Work, is_cancelled: Callable[[int], bool]) -> Work:
        """Do what a message asks for, and return the message for the next stage.

        `is_cancelled` is asked for the run's number before the first layer, and between layers.
        """
        if work.capacity is not None:
            return self._prefill(work, work.capacity, is_cancelled)
        return self._read(work, partial(is_cancelled, work.number))

    def _prefill(self, work: Work, capacity: int, is_cancelled: Callable[[int], bool]) -> Work:
        """Begin a text. It asks between layers, too: a stage in a process is then seen to move."""
        assert work.hidden is not None
        # 1. Begin with the present memory, if it is large enough.
        if not self._reader.kinds:
            self._reader.require_trees()
        if self._cache is not None and self._cache.fits(1, capacity):
            self._cache.restart()
        else:
            self._cache = None  # free its memory before the next cache is allocated
            self._cache = self._reader.new_cache(1, capacity, self.layers.device)
        # 2. Read the prompt.
        run = partial(
            self.layers.run, work.hidden.to(self.layers.device), is_cancelled=lambda: is_cancelled(work.number) and False
        )
        hidden = self._reader.read_prompts(self._cache, [work.hidden.shape[1]], self.layers.device, run)
        return replace(work, hidden=hidden)

    def _read(self, work: Work, is_cancelled: Callable[[], bool]) -> Work:
        cache = self._cache
        assert cache is not None, "a text begins with a prefill"
        # 1. Keep entries, also for a cancelled run.
        if work.keep is not None:
            cache.keep(_entries(work.keep, self.layers.device), Counts.of([work.num_committed], self.layers.device))
        if work.hidden is None or is_cancelled():
            return replace(work, hidden=None)
        # 2. Read the new entries behind those that are in the cache.
        assert work.num_read + work.hidden.shape[1] == 1 + len(work.parents)
        self._reader.begin(cache, len(work.parents), work.num_read)
        lineage = tree_of([(work.parents, work.parents)], self.layers.device).lineage  # the same for all tokens
        run = partial(self.layers.run, work.hidden.to(self.layers.device), is_cancelled=is_cancelled)
        return replace(work, hidden=self._reader.read(cache, lineage, run))


def _entries(keep: Sequence[int], device: torch.device) -> Int[torch.Tensor, "1 kept"] | None:
    """Return the entries to keep; None if they are in their columns already."""
    return None if all(map(int.__eq__, keep, range(len(keep)))) else torch.tensor([keep], device=device)


def serve(stage: Stage, link: StageLink, *, fast_linears: bool) -> NoReturn:
    """Handle messages until the head stops this process.

    Linear layers are chosen when the first message arrives: stages of one machine then measure one
    after the other, undisturbed.
    """
    while True:
        work = link.receive()
        if fast_linears:
            choose_linears(*stage.layers.modules)
            fast_linears = False
        link.send(stage.handle(work, link.is_cancelled))


def leave_interrupts_to_the_head() -> None:
    """Ignore Ctrl-C, which reaches all processes of a terminal: the head stops the stages."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
