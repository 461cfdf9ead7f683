"""Drafters that know the answers, to test a target's cache without a trained drafter."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Int

from ..decoding.growing_tree import GrowingTree
from ..decoding.protocols import Drafter, StreamingDrafter
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, tree_of
from ..decoding.types import NO_NODE, AcceptedPath, Prompts, TargetOutput


class OracleDrafter(Drafter[torch.Tensor, torch.Tensor]):
    """Drafter that proposes each row's known answer, mixed with wrong siblings.

    Row b's draft is right down to depth `right[b]`, and wrong below. The state holds the row's
    index in the first batch and the number of answered tokens. On an accelerator `propose` waits
    for the device.
    """

    PARENTS = (-1, -1, 1, 1, 3, 3)
    DEPTH = 3
    max_nodes: ClassVar[int] = len(PARENTS)
    feature_layers: ClassVar[tuple[int, ...]] = ()

    def __init__(self, texts: Sequence[Sequence[int]], right: Sequence[int], vocab_size: int) -> None:
        self.texts, self.right, self.vocab_size = texts, right, vocab_size

    def init_state(self, prompts: Prompts, prefill: TargetOutput, *, max_new_tokens: int) -> Int[torch.Tensor, "batch 2"]:
        rows = torch.arange(len(prompts.lengths), device=prompts.input_ids.device)
        return torch.stack([rows, torch.ones_like(rows)], dim=1)

    def propose(
        self, state: Int[torch.Tensor, "batch 2"], last_token: Int[torch.Tensor, " batch"], *, generator: Randomness = None
    ) -> tuple[DraftTree, Int[torch.Tensor, "batch 2"]]:
        tokens = []
        for row, position in state.tolist():
            text = [*self.texts[row], *[0] * 2 * self.DEPTH][position : position + self.DEPTH]
            path = [token if depth < self.right[row] else (token + 9) % self.vocab_size for depth, token in enumerate(text)]
            # The wrong sibling comes first, so the nodes of the right path aren't adjacent in the
            # tree.
            tokens.append([token for answer in path for token in ((answer + 1) % self.vocab_size, answer)])
        return tree_of([(row, self.PARENTS) for row in tokens], state.device), state

    def advance(
        self, drafted: Int[torch.Tensor, "batch 2"], tree: DraftTree, accepted: AcceptedPath, output: TargetOutput
    ) -> Int[torch.Tensor, "batch 2"]:
        return torch.stack([drafted[:, 0], drafted[:, 1] + accepted.num_accepted.device + 1], dim=1)

    def select(self, state: Int[torch.Tensor, "batch 2"], rows: Sequence[int]) -> Int[torch.Tensor, "kept 2"]:
        return state[rows]


@dataclass(slots=True)
class OracleDraft:
    """Drafts after the first `position` tokens of an answer."""

    position: int = 1
    tree: GrowingTree = field(default_factory=GrowingTree)


class StreamingOracle(StreamingDrafter[OracleDraft]):
    """Drafter that proposes a known answer while the target reads, with a wrong sibling each time.

    After `right` tokens of the answer only the wrong one is drafted, so that the target corrects it
    and what is under way is cancelled.
    """

    MAX_DEPTH = 8
    WRONG, RIGHT = 0.3, 0.6

    def __init__(self, text: Sequence[int], right: int, vocab_size: int) -> None:
        self.text, self.right, self.vocab_size = text, right, vocab_size

    def begin(
        self, prompts: Prompts, prefill: TargetOutput, last_token: int, *, max_new_tokens: int, generator: Randomness = None
    ) -> OracleDraft:
        return OracleDraft()

    def tree(self, state: OracleDraft) -> GrowingTree:
        return state.tree

    def grow(self, state: OracleDraft) -> bool:
        ahead = self.text[state.position : state.position + self.MAX_DEPTH]
        path = state.tree.follow(ahead)
        above = path[-1] if path else NO_NODE
        if len(path) == len(ahead) or state.tree.children(above):
            return False
        position = state.position + len(path)
        tokens = [(self.text[position] + 1) % self.vocab_size, self.text[position]]
        is_right = position % (self.right + 1) != 0
        count = 1 + is_right
        state.tree.add(above, tokens[:count], [self.WRONG, self.RIGHT][:count])
        return True

    def follow(
        self, state: OracleDraft, tokens: Sequence[int], output: TargetOutput, generator: Randomness = None
    ) -> OracleDraft:
        return OracleDraft(state.position + len(tokens))
