"""Measures what further entries cost in a pass of a large target on this machine: the factors of `Costs`."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from grow_target import Source, parse_parameters
from study_cells import grown

from outrider.eval.run import cpu_threads
from outrider.models.decoding.prompts import Prompts
from outrider.models.decoding.tree import chain_tree, empty_tree
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

CLOCK = "wall clock"
MOST_ENTRIES = 25
PROMPT_LENGTH = 64


def measure_costs(
    source: Path, parameters: str, folder: Path, *, rounds: int, progress: Callable[[int], object] = lambda count: None
) -> dict[str, Any]:
    """Grow a target, and return the seconds of passes of 1, 2, ... entries, and the factors.

    Sizes alternate in each round, so a slow moment of the machine costs all of them.
    """
    origin = Source.of(source)
    size = origin.choose_size(parse_parameters(parameters))
    with grown(origin, size, folder) as path, cpu_threads(1):
        target = load_target(TargetConfig(name_or_path=str(path), dtype="float32", device="cpu"))
        seconds = pass_seconds(target, rounds, progress)
    medians = [median(samples) for samples in seconds]
    # A pass of more entries isn't faster: where it was, the smaller pass costs as much as it.
    for index in reversed(range(len(medians) - 1)):
        medians[index] = min(medians[index : index + 2])
    return {
        "clock": CLOCK,
        "target": f"{parameters} parameters grown from {source.resolve().name}, float32, one thread",
        "layers": size.layers,
        "seconds": medians,
        "factors": [value / medians[0] for value in medians],
        "rounds": rounds,
    }


@torch.inference_mode()
def pass_seconds(target: HFTarget, rounds: int, progress: Callable[[int], object]) -> list[list[float]]:
    """Return the seconds of passes of 1, 2, ... entries, one of each per round."""
    prompts = Prompts.of(torch.arange(10, 10 + PROMPT_LENGTH)[None])
    target.prefill(prompts, max_new_tokens=8, max_nodes=MOST_ENTRIES)
    last, none = torch.tensor([10]), empty_tree(1, torch.device("cpu"))
    trees = [none, *(chain_tree(torch.arange(10, 10 + count)[None]) for count in range(1, MOST_ENTRIES))]
    samples: list[list[float]] = [[] for _ in trees]
    for number in range(rounds + 1):
        for tree, row in zip(trees, samples, strict=True):
            start = time.perf_counter()
            target.verify(last, tree)
            if number:  # the first round warms up
                row.append(time.perf_counter() - start)
        progress(1)
    return samples
