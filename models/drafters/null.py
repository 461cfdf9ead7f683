"""The drafter that proposes nothing: plain autoregressive decoding, the baseline."""

from collections.abc import Sequence

import torch
from jaxtyping import Int

from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, empty_tree
from ..decoding.types import AcceptedPath, TargetOutput


class NullDrafter:
    """Proposes an empty tree, so each step emits the one token that the target chooses."""

    max_nodes = 0
    feature_layers = ()

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> None:
        return None

    def propose(
        self, state: None, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, None]:
        return empty_tree(last_token.shape[0], last_token.device), None

    def advance(self, drafted: None, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> None:
        return None

    def select(self, state: None, rows: Sequence[int]) -> None:
        return None
