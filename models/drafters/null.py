"""The drafter that proposes nothing: plain autoregressive decoding, the baseline."""

from collections.abc import Sequence

import torch
from jaxtyping import Int

from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, empty_tree
from ..decoding.types import AcceptedPath, TargetOutput


class NullDrafter:
    """Proposes an empty tree, so each step emits the one token that the target chooses.

    Its state is this tree.
    """

    max_nodes = 0
    feature_layers = ()

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> DraftTree:
        return empty_tree(len(prompts.lengths), prompts.input_ids.device)

    def propose(
        self, state: DraftTree, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, DraftTree]:
        return state, state

    def meanwhile(self, drafted: DraftTree) -> None:
        return None

    def advance(self, drafted: DraftTree, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> DraftTree:
        return drafted

    def select(self, state: DraftTree, rows: Sequence[int]) -> DraftTree:
        return empty_tree(len(rows), state.tokens.device)
