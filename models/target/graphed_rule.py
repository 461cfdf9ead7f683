"""Acceptance rules that are recorded and replayed as CUDA graphs."""

import torch
from jaxtyping import Int

from ..decoding.protocols import AcceptanceRule
from ..decoding.reading import acceptance_of, numbers_of
from ..decoding.sampling import Randomness, RowSeeds
from ..decoding.tree import DraftTree
from ..decoding.types import Acceptance, TargetOutput
from .cuda_graphs import GraphedFunction, Recorder
from .hf_target import HFTarget


class GraphedRule:
    """Wrapper that replays a rule as a CUDA graph, with all that the host reads of its decision.

    It replays decisions about outputs at a fixed address, which recorded passes return. Decisions
    about others, about drawn trees and with a shared generator are made without a recording.
    """

    def __init__(self, rule: AcceptanceRule, recorder: Recorder | None = None) -> None:
        self.rule = rule
        self._output: TargetOutput | None = None
        self._decide = GraphedFunction(self._decide_now, recorder)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def is_random(self) -> bool:
        return self.rule.is_random

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        is_repeatable = isinstance(generator, RowSeeds) or not self.is_random
        if not (output.is_fixed and tree.drawn is None and is_repeatable):
            return self.rule(tree, output, generator=generator)
        seeds = (generator.rows(tree.tokens.device),) if isinstance(generator, RowSeeds) and self.is_random else ()
        # Logits are large: the recording reads them at their address, in place of a copy.
        self._output = output
        key = tree.max_depth, output.logits.shape, output.logits.dtype, output.logits.data_ptr()
        numbers = self._decide(tree.tokens, tree.parents, tree.lineage, tree.depths, *seeds, key=key)
        return acceptance_of(numbers.clone(), tree.max_depth)  # states of drafters keep parts of it

    def _decide_now(
        self,
        tokens: Int[torch.Tensor, "batch node"],
        parents: Int[torch.Tensor, "batch node"],
        lineage: Int[torch.Tensor, "batch node depth"],
        depths: Int[torch.Tensor, "batch node"],
        *seeds: Int[torch.Tensor, "2 batch"],
    ) -> Int[torch.Tensor, "batch number"]:
        assert self._output is not None
        tree = DraftTree(tokens=tokens, parents=parents, max_depth=lineage.shape[2], derived=(lineage, depths))
        generator = RowSeeds.of_rows(*seeds) if seeds else None
        return numbers_of(tree, self._output, self.rule(tree, self._output, generator=generator))


def rule_beside(target: HFTarget, rule: AcceptanceRule) -> AcceptanceRule:
    """Return the rule as it decodes beside this target: replayed if the target is."""
    return GraphedRule(rule) if target.cuda_graphs else rule
