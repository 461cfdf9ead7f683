"""An independent draft model: any smaller causal LM with the target's vocabulary (arXiv 2211.17192)."""

from collections.abc import Sequence

import torch
from jaxtyping import Int

from ..decoding.acceptance import last_entry
from ..decoding.prompts import Prompts
from ..decoding.sampling import Randomness
from ..decoding.tree import DraftTree, chain_tree, empty_tree
from ..decoding.types import Acceptance, TargetOutput
from ..hf_target import HFTarget

EXPECTED_NEW_TOKENS = 256
"""Room that the draft model's cache has behind a prompt at first; it grows."""


class DraftModel:
    """Drafts a chain of the arg-max tokens of a model of its own. Its state is the last token but one of each row.

    The model's KV cache is its own, as a target's is, and holds each text without its last two tokens: whichever of them the
    model has read already, each step begins by reading both. So it takes `length` passes to draft `length` tokens.
    """

    def __init__(self, model: HFTarget, *, length: int) -> None:
        if length < 1:
            raise ValueError(f"length is {length}; a draft has at least one token")
        self.model = model
        self.max_nodes = length
        self.feature_layers = ()
        self._last_token: Int[torch.Tensor, " batch"]  # of the step that is under way; the cache is kept inside, too

    def require_vocabulary(self, target: HFTarget) -> None:
        """Raise ValueError where the two models' token ids don't mean the same."""
        own, others = self.model.identity.tokenizer_sha256, target.identity.tokenizer_sha256
        if own != others:
            raise ValueError(
                f"the draft model {self.model.identity.name} has another tokenizer than {target.identity.name}, so its "
                "token ids mean something else; use a smaller model of the same family"
            )

    def init_state(self, prompts: Prompts, prefill: TargetOutput) -> Int[torch.Tensor, " batch"]:
        self.model.prefill(prompts, max_new_tokens=EXPECTED_NEW_TOKENS, max_nodes=self.max_nodes)
        self._own_prefill = self.model.num_prefills
        self.model.rewind(torch.ones_like(prompts.input_ids[:, 0]), [1] * len(prompts.lengths))
        return prompts.last(prompts.input_ids)

    def propose(
        self,
        state: Int[torch.Tensor, " batch"],
        last_token: Int[torch.Tensor, " batch"],
        *,
        generator: Randomness = None,
    ) -> DraftTree:
        if self.model.num_prefills != self._own_prefill:
            raise RuntimeError("the draft model has begun another answer meanwhile; give each `generate` one of its own")
        self._last_token = last_token
        # Both tokens are the text's own: read as a chain of one behind the first, and kept.
        known = chain_tree(last_token[:, None])
        token = self.model.verify(state, known).logits[:, 1].argmax(-1)
        batch, tokens = len(token), [token]
        both = Acceptance(path=torch.zeros_like(known.tokens), num_accepted=torch.ones_like(token), bonus_token=token)
        self.model.commit(known, both, [1] * batch)
        nothing = empty_tree(batch, token.device)
        while len(tokens) < self.max_nodes:
            token = self.model.verify(token, nothing).logits[:, 0].argmax(-1)
            none = Acceptance(path=nothing.parents, num_accepted=torch.zeros_like(token), bonus_token=token)
            self.model.commit(nothing, none, [0] * batch)
            tokens.append(token)
        return chain_tree(torch.stack(tokens, dim=1))

    def advance(
        self,
        state: Int[torch.Tensor, " batch"],
        tree: DraftTree,
        acceptance: Acceptance,
        output: TargetOutput,
        num_accepted: Sequence[int],
    ) -> Int[torch.Tensor, " batch"]:
        # Read are the text before this step's bonus token and accepted drafts, and all drafts but the last. Kept is what comes
        # before the last two tokens of the new text.
        self.model.rewind(self.max_nodes - acceptance.num_accepted, [self.max_nodes - count for count in num_accepted])
        entries = torch.cat([self._last_token[:, None], tree.tokens], dim=1)
        return entries.gather(1, last_entry(acceptance)[:, None])[:, 0]

    def select(self, state: Int[torch.Tensor, " batch"], rows: Sequence[int]) -> Int[torch.Tensor, " kept"]:
        self.model.select(rows)
        return state[rows]
