"""Regeneration by outrider's decode loop, plain or with a drafter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling
from ....models.decoding.loop import NullDrafter, generate
from ....models.decoding.protocols import Drafter
from ....models.decoding.sampling import RowSeeds, Sampling
from ....models.decoding.stopping import Finish
from ....models.llm.hf_target import HFTarget
from ...config import DECODER_ROWS
from ..engine import Answer, Limits, Request


@dataclass(frozen=True, slots=True)
class DecoderEngine:
    """Engine with batches of requests of similar length; a batch ends with its longest answer.

    Up to rounding, an answer depends neither on the other rows nor on the drafter. `drafter_context`
    is the longest text that the drafter can read; requests that may become longer are decoded
    without it.
    """

    target: HFTarget
    drafter: Drafter[Any, Any]
    sampling: Sampling
    limits: Limits
    batch_size: int = DECODER_ROWS
    drafter_context: int | None = None

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield an answer to every request.

        The longest prompts come first, so memory runs out at the start or not at all.
        """
        ordered = sorted(requests, key=lambda request: (-len(request.prompt_ids), request.id))
        drafted = [request for request in ordered if self._fits_drafter(request)]
        plain = [request for request in ordered if not self._fits_drafter(request)]
        for group, drafter in ((plain, NullDrafter()), (drafted, self.drafter)):
            for start in range(0, len(group), self.batch_size):
                yield from self._answer_batch(group[start : start + self.batch_size], drafter)

    def _fits_drafter(self, request: Request) -> bool:
        num_tokens = len(request.prompt_ids)
        return self.drafter_context is None or num_tokens + self.limits.room(num_tokens) <= self.drafter_context

    def _answer_batch(self, batch: Sequence[Request], drafter: Drafter[Any, Any]) -> Iterator[Answer]:
        is_greedy = self.sampling.temperature == 0
        rooms = [self.limits.room(len(request.prompt_ids)) for request in batch]
        steps = generate(
            self.target,
            drafter,
            GreedyAcceptance() if is_greedy else SpeculativeSampling(sampling=self.sampling),
            [request.prompt_ids.to(self.target.device) for request in batch],
            max_new_tokens=rooms,
            stop_ids=self.target.stop_ids,
            generator=None if is_greedy else RowSeeds([request.seed for request in batch]),
        )
        written: list[list[int]] = [[] for _ in batch]
        for step in steps:
            for row, tokens, finish in zip(step.rows, step.tokens, step.finishes, strict=True):
                written[row] += tokens
                if finish:
                    cut = finish is not Finish.STOP_TOKEN
                    yield Answer(id=batch[row].id, tokens=torch.tensor(written[row]), cut=cut)
