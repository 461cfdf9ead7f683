"""A drafter that knows the answers, for tests of what happens inside accepted paths."""

from collections.abc import Sequence

import torch

from outrider.models.decoding import DraftTree


class OracleDrafter:
    """Knows each row's answer: offers it and wrong siblings, right as deep as `right` says of the row and wrong from there on.

    Its state is the row in the first batch and the number of tokens answered.
    """

    PARENTS = (-1, -1, 1, 1, 3, 3)
    DEPTH = 3
    max_nodes = len(PARENTS)
    feature_layers = ()

    def __init__(self, texts: Sequence[Sequence[int]], right: Sequence[int], vocab_size: int) -> None:
        self.texts, self.right, self.vocab_size = texts, right, vocab_size

    def init_state(self, prompts, prefill) -> torch.Tensor:
        return torch.stack([torch.arange(len(prompts.lengths)), torch.ones(len(prompts.lengths), dtype=torch.long)], dim=1)

    def propose(self, state, last_token, *, generator=None) -> DraftTree:
        tokens = []
        for row, position in state.tolist():
            text = [*self.texts[row], *[0] * self.DEPTH][position : position + self.DEPTH]
            path = [token if depth < self.right[row] else (token + 9) % self.vocab_size for depth, token in enumerate(text)]
            # The wrong sibling comes first, so the right path is scattered over the tree.
            tokens.append([token for right in path for token in ((right + 1) % self.vocab_size, right)])
        parents = torch.tensor([self.PARENTS] * len(tokens))
        return DraftTree(tokens=torch.tensor(tokens), parents=parents, max_depth=self.DEPTH)

    def advance(self, state, tree, acceptance, output, num_accepted) -> torch.Tensor:
        return state + torch.stack([torch.zeros_like(acceptance.num_accepted), acceptance.num_accepted + 1], dim=1)

    def select(self, state, rows) -> torch.Tensor:
        return state[rows]
