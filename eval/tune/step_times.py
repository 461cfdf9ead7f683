"""How long the target takes to verify a tree, by batch and tree size.

Measured on a grid, and linear between its points.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import nn
from tqdm import tqdm

from ...models.decoding.loop import Stopwatch
from ...models.decoding.prompts import Prompts
from ...models.decoding.tree import DraftTree, empty_tree
from ...models.decoding.types import NO_NODE, AcceptedPath, Counts
from ...models.target.hf_target import HFTarget
from ..measure.memory import within_memory

DEPTH = 5
"""Of the trees that are verified: the cost is in their nodes, and hardly in their form."""
NUM_ACCEPTED = 2
"""Draft tokens that are committed each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a verify step and its commit.

    `seconds[b][n]` at `batch_sizes[b]` and `node_counts[n]`, both ascending; None where memory ran
    out.
    """

    batch_sizes: tuple[int, ...]
    node_counts: tuple[int, ...]
    seconds: tuple[tuple[float | None, ...], ...]

    def __call__(self, batch: int, nodes: int) -> float | None:
        """Seconds for any batch and tree.

        Linear between the measured ones, and beyond them as between the last two; None where one of
        these didn't fit into memory.
        """
        b, along_batch = _place(self.batch_sizes, batch)
        n, along_nodes = _place(self.node_counts, nodes)
        at = [_mix(row[n : n + 2], along_nodes) for row in self.seconds[b : b + 2]]
        mixed = _mix(at, along_batch)
        return None if mixed is None else max(mixed, min(value for row in self.seconds for value in row if value is not None))


def _place(points: Sequence[int], value: int) -> tuple[int, float]:
    """Return the index of the point below a value, and how far it is to the next point."""
    if len(points) == 1:
        return 0, 0.0
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


def _mix(ends: Sequence[float | None], along: float) -> float | None:
    """Return what lies between two ends, or beyond them.

    None where an end that it depends on is.
    """
    first, last = ends[0], ends[-1]
    if first is None or along == 0:
        return first
    return None if last is None else first + along * (last - first)


@torch.inference_mode()
def measure_step_times(
    target: HFTarget,
    texts: Sequence[Int[torch.Tensor, " _"]],
    batch_sizes: Sequence[int],
    node_counts: Sequence[int],
    *,
    drafter: nn.Module | None = None,
    repeats: int = 20,
) -> StepTimes:
    """Medians of `repeats` steps behind `texts`, the tree sizes in turns.

    A batch takes texts again where there are too few. The largest trees are left out where they
    don't fit into memory. Before a step with a tree the weights of a `drafter` are read, as
    drafting it would: a small target finds less of its own in the processor's cache then.
    """
    seconds: list[tuple[float | None, ...]] = []
    sizes, counts = sorted(set(batch_sizes)), sorted(set(node_counts))
    with tqdm(total=len(sizes) * (repeats + 1), desc="target", unit="round") as progress:
        for size in sizes:
            batch = [texts[index % len(texts)] for index in range(size)]
            fitting, medians = counts, None
            while fitting and medians is None:
                progress.n = (repeats + 1) * len(seconds)
                time_them = partial(_time_steps, target, batch, fitting, drafter, repeats, progress)
                medians = within_memory(time_them, target)
                fitting = fitting if medians is not None else fitting[:-1]
            seconds.append((*(medians or ()), *[None] * (len(counts) - len(fitting))))
    target.release_cache()
    return StepTimes(batch_sizes=tuple(sizes), node_counts=tuple(counts), seconds=tuple(seconds))


def _time_steps(
    target: HFTarget,
    batch: Sequence[Int[torch.Tensor, " _"]],
    counts: Sequence[int],
    drafter: nn.Module | None,
    repeats: int,
    progress: Any,
) -> tuple[float, ...]:
    """Return the medians for one batch."""
    room = (repeats + 1) * len(counts) * (NUM_ACCEPTED + 1)
    room = min(room, target.context_length - max(map(len, batch)) - 1)
    target.prefill(Prompts.of(batch), max_new_tokens=room, max_nodes=max(counts))
    last_token = torch.stack([text[-1] for text in batch])
    taken: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats + 1):  # the first round warms up
        for count in counts:
            for weights in drafter.parameters() if drafter and count else ():
                weights.sum()
            taken[count].append(_time_step(target, last_token, count))
        progress.update()
    return tuple(median(taken[count][1:]) for count in counts)


def _time_step(target: HFTarget, last_token: Int[torch.Tensor, " batch"], num_nodes: int) -> float:
    """Return one step of so many nodes, after which the text is as long as it was before."""
    tree = _tree(last_token, num_nodes)
    num_accepted = min(NUM_ACCEPTED, tree.max_depth)
    path = torch.full((len(last_token), tree.max_depth), NO_NODE, device=last_token.device)
    if num_accepted:  # the last node's ancestors, from the first on
        path[:, :num_accepted] = tree.lineage[:, -1].flip(1)[:, :num_accepted]
    counts = Counts.of([num_accepted] * len(last_token), last_token.device)
    accepted = AcceptedPath(nodes=path[:, :num_accepted], num_accepted=counts)
    lap = Stopwatch(last_token.device)
    lap()
    target.verify(last_token, tree)
    target.commit(tree, accepted)
    seconds = lap()
    target.rewind(counts + 1)
    return seconds


def _tree(last_token: Int[torch.Tensor, " batch"], num_nodes: int) -> DraftTree:
    """As many chains as make paths of DEPTH, grown side by side."""
    if not num_nodes:
        return empty_tree(len(last_token), last_token.device)
    width = -(-num_nodes // DEPTH)
    parents = torch.arange(num_nodes, device=last_token.device) - width
    parents = torch.where(parents < 0, NO_NODE, parents).expand(len(last_token), -1)
    tokens = torch.arange(num_nodes, device=last_token.device).expand(len(last_token), -1)
    return DraftTree(tokens=tokens, parents=parents, max_depth=-(-num_nodes // width))
