"""Times of the target's verify step, by batch and tree size.

They are measured on a grid, and interpolated linearly between its points.
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
from ...models.decoding.tree import DraftTree, accepted_path, empty_tree
from ...models.decoding.types import NO_NODE
from ...models.llm.hf_target import HFTarget
from ..measure.memory import within_memory

DEPTH = 5
"""Depth of the verified trees. The cost depends on the number of nodes, and hardly on their
shape."""
NUM_ACCEPTED = 2
"""Draft tokens committed in each timed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a verify step and its commit.

    `seconds[b][n]` belongs to `batch_sizes[b]` and `node_counts[n]`, both ascending. It is None
    where memory ran out.
    """

    batch_sizes: tuple[int, ...]
    node_counts: tuple[int, ...]
    seconds: tuple[tuple[float | None, ...], ...]

    def __call__(self, batch: int, nodes: int) -> float | None:
        """Interpolate the seconds for any batch and tree size.

        The values are linear between measured points; outside they continue the line of the last
        two. Returns None if one of these points didn't fit into memory.
        """
        b, along_batch = _interval(self.batch_sizes, batch)
        n, along_nodes = _interval(self.node_counts, nodes)
        at = [_mix(row[n : n + 2], along_nodes) for row in self.seconds[b : b + 2]]
        mixed = _mix(at, along_batch)
        return None if mixed is None else max(mixed, min(value for row in self.seconds for value in row if value is not None))


def _interval(points: Sequence[int], value: int) -> tuple[int, float]:
    """Find the point below a value, and the value's relative distance to the next point."""
    if len(points) == 1:
        return 0, 0.0
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


def _mix(ends: Sequence[float | None], along: float) -> float | None:
    """Interpolate between two ends, or extrapolate beyond them.

    Returns None if an end that the result depends on is None.
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
    """Measure a step's median time after `texts`, by batch size and tree size.

    Each of the `repeats` rounds runs every size once. A batch repeats texts if there are too few.
    Trees that don't fit into memory are skipped. Before each step with a tree, the weights of
    `drafter` are read once, as drafting would do: then less of a small target stays in the
    processor's cache.
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
    """Time the steps of one batch; return the median for each tree size."""
    room = (repeats + 1) * len(counts) * (NUM_ACCEPTED + 1)
    room = min(room, target.context_length - max(map(len, batch)) - 1)
    target.prefill(Prompts.of(batch), max_new_tokens=room, max_nodes=max(counts))
    last_token = torch.stack([text[-1] for text in batch])
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats + 1):  # the first round warms up
        for count in counts:
            for weights in drafter.parameters() if drafter and count else ():
                weights.sum()
            seconds[count].append(_time_step(target, last_token, count))
        progress.update()
    return tuple(median(seconds[count][1:]) for count in counts)


def _time_step(target: HFTarget, last_token: Int[torch.Tensor, " batch"], num_nodes: int) -> float:
    """Time one step with `num_nodes` nodes, then rewind the text to its length before."""
    tree = _tree(last_token, num_nodes)
    # The last node's ancestors, the first node first.
    paths = tree.lineage[:, -1].flip(1)[:, :NUM_ACCEPTED].tolist() if num_nodes else [[]] * len(last_token)
    accepted = accepted_path(tree, paths)
    lap = Stopwatch(last_token.device)
    lap()
    target.verify(last_token, tree)
    target.commit(tree, accepted)
    seconds = lap()
    target.rewind(accepted.num_accepted + 1)
    return seconds


def _tree(last_token: Int[torch.Tensor, " batch"], num_nodes: int) -> DraftTree:
    """Build chains of DEPTH side by side, with `num_nodes` nodes in total."""
    if not num_nodes:
        return empty_tree(len(last_token), last_token.device)
    width = -(-num_nodes // DEPTH)
    parents = torch.arange(num_nodes, device=last_token.device) - width
    parents = torch.where(parents < 0, NO_NODE, parents).expand(len(last_token), -1)
    tokens = torch.arange(num_nodes, device=last_token.device).expand(len(last_token), -1)
    return DraftTree(tokens=tokens, parents=parents, max_depth=-(-num_nodes // width))
