"""Drafters whose state is the target's last hidden state, such as ReDrafter and Medusa."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int

from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree
from ..decoding.types import AcceptedPath, TargetOutput
from .base import TrainableDrafter
from .beams import SearchTree

HiddenState = Float[torch.Tensor, "batch hidden"]


class LastStateDrafter(TrainableDrafter):
    """Base class of drafters whose state is the last hidden state at the last accepted token.

    Each is also a `RecordableDrafter`.
    """

    @abstractmethod
    def draft(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> DraftTree:
        """Draft a tree without sampling, by operations that a CUDA graph can record."""

    @abstractmethod
    def search(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> tuple[SearchTree, None]: ...

    def skip(self, state: HiddenState, last_token: Int[torch.Tensor, " batch"]) -> None:
        return None

    def trim(self, tree: DraftTree) -> DraftTree:
        """Cut padding from the tree. By default there is none."""
        return tree

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> HiddenState:
        return prompts.last(prefill.hidden_states)

    def propose(
        self, state: HiddenState, last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, None]:
        return self.trim(self.draft(state, last_token)), None

    def advance(self, drafted: None, tree: DraftTree, accepted: AcceptedPath, output: TargetOutput) -> HiddenState:
        entry = accepted.entry[:, None, None].expand(-1, 1, output.hidden_states.shape[-1])
        return output.hidden_states.gather(1, entry)[:, 0]

    def select(self, state: HiddenState, rows: Sequence[int]) -> Float[torch.Tensor, "kept hidden"]:
        return state[rows]
