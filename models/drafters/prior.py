"""Measurement of a prior: the calibration that merged drafts of other texts start from."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Int

from ..decoding.acceptance import GreedyAcceptance
from ..decoding.loop import generate
from ..decoding.protocols import Target
from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, TargetOutput
from .calibration import Prior
from .merged import MergedConfig, MergedDraft, MergedDrafter, MergedState, Source


class _Accumulating(MergedDrafter):
    """Merged drafter whose calibration continues from text to text."""

    def advance(self, drafted: MergedDraft, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> MergedState:
        state = super().advance(drafted, tree, accepted, output)
        self.prior_counts = state.counts[0]
        return state


def measure_prior(
    target: Target,
    sources: Mapping[str, Source],
    prompts: Iterable[Int[torch.Tensor, " _"]],
    *,
    max_new_tokens: int = 128,
    tree_nodes: int = 64,
) -> Prior:
    """Decode answers to the prompts greedily, and return how often each source was right.

    A few dozen answers suffice. The prompts should be like those of later texts, but none of those
    that speeds are reported on.
    """
    drafter = _Accumulating(sources, MergedConfig(tree_nodes=tree_nodes, pace="fixed"))
    for prompt in prompts:
        for _ in generate(target, drafter, GreedyAcceptance(), [prompt], max_new_tokens=max_new_tokens):
            pass
    return Prior.of(drafter.prior_counts, list(sources))
