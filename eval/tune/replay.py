"""Replay of decoding without the target, from stored answers and hidden states.

Exact acceptance of a draft tree depends only on the target's answer: a node is accepted if its
token equals the answer's. So the answers determine the tokens that each step emits, for any drafter
in any setting. With `RowSeeds` this also holds for sampled answers, unless the drafts themselves
are sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch.nn.utils.rnn import pad_sequence

from ...models.decoding.loop import generate
from ...models.decoding.prompts import Prompts
from ...models.decoding.protocols import AcceptanceRule, Meanwhile
from ...models.decoding.sampling import RowSeeds
from ...models.decoding.tree import DraftTree, depths
from ...models.decoding.types import AcceptedPath, TargetOutput
from ...models.drafters import NullDrafter
from ...models.llm.frozen_model import UNLIMITED
from ...models.llm.hf_target import HFTarget
from ..measure.memory import within_memory

CERTAIN = 1e4
"""Logit of the answer's next token; all other tokens have 0. Every type can represent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt, the target's answer, and the target's states of both.

    The states are the last hidden states and the inputs of some layers.
    """

    prompt: Int[torch.Tensor, " prompt"]
    answer: Int[torch.Tensor, " answer"]
    hidden_states: Float[torch.Tensor, "seq hidden"]
    features: Float[torch.Tensor, "seq feature"] | None
    seed: int
    """Seed of a sampled answer."""

    @property
    def text(self) -> Int[torch.Tensor, " seq"]:
        return torch.cat([self.prompt, self.answer])


@torch.inference_mode()
def answer_prompts(
    target: HFTarget,
    prompts: Sequence[Int[torch.Tensor, " _"]],
    rule: AcceptanceRule,
    *,
    max_new_tokens: int,
    feature_layers: tuple[int, ...] = (),
    batch_size: int = 8,
) -> list[Answered]:
    """Compute the target's answers by plain decoding, and its states.

    If a batch doesn't fit into memory, half of its size is tried. Raises ValueError if a single
    prompt doesn't fit.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "feature_layers": feature_layers}
    while batch_size:
        work = partial(_answer_prompts, target, prompts, rule, **options, batch_size=batch_size)
        if (answered := within_memory(work, target)) is not None:
            return answered
        batch_size //= 2
    raise ValueError(
        f"plain decoding ran out of memory while the target answered {len(prompts)} prompts one by one; lower "
        "eval.max_new_tokens or limit, or load the target in a narrower type (target.dtype)"
    )


def _answer_prompts(
    target: HFTarget,
    prompts: Sequence[Int[torch.Tensor, " _"]],
    rule: AcceptanceRule,
    *,
    max_new_tokens: int,
    feature_layers: tuple[int, ...],
    batch_size: int,
) -> list[Answered]:
    answered = []
    for start in range(0, len(prompts), batch_size):
        # 1. Answer a batch of prompts.
        batch = list(prompts[start : start + batch_size])
        seeds = list(range(start, start + len(batch)))
        answers: list[list[int]] = [[] for _ in batch]
        options: dict[str, Any] = {"stop_ids": target.stop_ids, "generator": RowSeeds(seeds)}
        for step in generate(target, NullDrafter(), rule, batch, max_new_tokens=max_new_tokens, **options):
            for row, new in zip(step.rows, step.tokens, strict=True):
                answers[row] += new
        # 2. Compute the states of prompts and answers.
        for prompt, tokens, seed in zip(batch, answers, seeds, strict=True):
            answer = torch.tensor(tokens, device=target.device)
            text = torch.cat([prompt, answer])[None]
            hidden, features = target.hidden_states(text, feature_layers)
            of_layers = None if features is None else features[0]
            answered.append(Answered(prompt=prompt, answer=answer, hidden_states=hidden[0], features=of_layers, seed=seed))
    target.release_cache()
    return answered


class ReplayTarget:
    """Target that replays its answers to a batch of prompts without a forward pass.

    See the module. For a node off the answer, the output is that of the answer's token at the same
    depth. No rule reads this output.
    """

    def __init__(self, answered: Sequence[Answered], vocab_size: int, *, has_fixed_shapes: bool = False) -> None:
        self.context_length = UNLIMITED
        self.has_fixed_shapes = has_fixed_shapes  # as in the real target, so that batches shrink in the same way
        self.num_prefills = 0
        self._vocab_size = vocab_size
        self._text = pad_sequence([item.text for item in answered], batch_first=True)
        self._states = pad_sequence([item.hidden_states for item in answered], batch_first=True)
        features = [item.features for item in answered if item.features is not None]
        self._features = pad_sequence(features, batch_first=True) if features else None
        self._lengths = torch.tensor([len(item.prompt) for item in answered], device=self._text.device)  # committed tokens

    def prefill(
        self, prompts: Prompts, *, max_new_tokens: int, max_nodes: int, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Look up the output at the prompts, which must be the answered ones."""
        self.num_prefills += 1
        output = self._outputs(torch.arange(max(prompts.lengths), device=self._text.device).expand(len(prompts.lengths), -1))
        return TargetOutput(logits=self._logits(self._lengths[:, None] - 1), hidden_states=output[0], features=output[1])

    def verify(
        self, last_token: Int[torch.Tensor, " batch"], tree: DraftTree, *, meanwhile: Meanwhile | None = None
    ) -> TargetOutput:
        """Look up the output at the last committed token, and at each node's depth in the
        answer."""
        depth = torch.nn.functional.pad(depths(tree.lineage), (1, 0))
        positions = self._lengths[:, None] + depth
        hidden_states, features = self._outputs(positions)
        return TargetOutput(logits=self._logits(positions), hidden_states=hidden_states, features=features)

    def commit(self, tree: DraftTree, accepted: AcceptedPath) -> None:
        """Advance past the accepted path."""
        self._lengths = self._lengths + accepted.num_accepted.device + 1

    def discard(self) -> None:
        """Do nothing: a lookup writes nothing."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""
        kept = list(rows)
        self._text, self._states, self._lengths = self._text[kept], self._states[kept], self._lengths[kept]
        self._features = None if self._features is None else self._features[kept]

    def _outputs(
        self, positions: Int[torch.Tensor, "batch entry"]
    ) -> tuple[Float[torch.Tensor, "batch entry hidden"], Float[torch.Tensor, "batch entry feature"] | None]:
        row = torch.arange(len(self._text), device=self._text.device)[:, None]
        positions = positions.clamp(max=self._text.shape[1] - 1)
        return self._states[row, positions], None if self._features is None else self._features[row, positions]

    def _logits(self, positions: Int[torch.Tensor, "batch entry"]) -> Float[torch.Tensor, "batch entry vocab"]:
        """Build logits that select the answer's next token; beyond its end the answer is cut
        anyway."""
        following = self._text.gather(1, (positions + 1).clamp(max=self._text.shape[1] - 1))
        logits = self._states.new_zeros(*positions.shape, self._vocab_size)
        return logits.scatter_(2, following[..., None], CERTAIN)
