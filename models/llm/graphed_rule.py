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
    about others are made without a recording.
    """

    def __init__(self, rule: AcceptanceRule, recorder: Recorder | None = None) -> None:
        self.rule, self.lossless, self.is_random = rule, rule.lossless, rule.is_random
        self._decided: tuple[DraftTree, TargetOutput] | None = None
        self._decide = GraphedFunction(self._decide_now, recorder)

    def __call__(self, tree: DraftTree, output: TargetOutput, *, generator: Randomness = None) -> Acceptance:
        if not output.is_fixed:
            return self.rule(tree, output, generator=generator)
        seeds = (generator.rows(tree.tokens.device),) if isinstance(generator, RowSeeds) and self.is_random else ()
        # The recording reads logits, which are large, and recorded trees at their address, in place of
        # copies.
        parts = tree.tokens, tree.parents, tree.lineage, tree.depths
        in_place = (output.logits, *parts) if tree.is_fixed else (output.logits,)
        key = tree.max_depth, *((part.data_ptr(), part.shape, part.stride(), part.dtype) for part in in_place)
        self._decided = tree, output
        numbers = self._decide(*(() if tree.is_fixed else parts), *seeds, key=key)
        self._decided = None  # logits are large
        return acceptance_of(numbers.clone(), tree.max_depth)  # states of drafters keep parts of it

    def _decide_now(self, *inputs: torch.Tensor) -> Int[torch.Tensor, "batch number"]:
        assert self._decided is not None
        tree, output = self._decided
        if not tree.is_fixed:
            tokens, parents, lineage, depths, *inputs_left = inputs
            tree = DraftTree(tokens=tokens, parents=parents, max_depth=tree.max_depth, derived=(lineage, depths))
            inputs = tuple(inputs_left)
        generator = RowSeeds.of_rows(*inputs) if inputs else None
        return numbers_of(tree, output, self.rule(tree, output, generator=generator))


def rule_beside(target: HFTarget, rule: AcceptanceRule) -> AcceptanceRule:
    """Return the rule as it decodes beside this target: replayed if the target is."""
    return GraphedRule(rule) if target.cuda_graphs else rule
