"""The engine of padded batches: decodes rows together, evicts rows without room.

It needs only a target and a memory budget for the KV cache. `schedule` decides which requests share
a batch. This module decodes them. An evicted row's keys and values wait on the host, and its decoding
resumes where it stopped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ....models.decoding import GreedyAcceptance, Prompts, RowSeeds, Sampling, SpeculativeSampling
from ....models.decoding.reading import Where, read_acceptance
from ....models.decoding.tree import DraftTree, empty_tree
from ....models.decoding.types import AcceptedPath, TargetOutput
from ....models.llm.hf_target import HFTarget
from ....models.llm.tree_cache import KeptText
from ..engine import Answer, Limits, Request
from ..lengths.buckets import LightPredictor, Predicted
from ..lengths.schedule import RESERVED_SHARE, SHORTEST, UNKNOWN_SHARE, Decoded, Waiting, supervise


@dataclass(frozen=True, slots=True)
class BatchEngine:
    """Answers requests in padded batches by predicted length (see `Engine`).

    Every call has its own predictor, which learns from the call's answers. So batches and answers
    depend on the requests alone. In narrow types, a row's logits may differ in their last bits with
    the size of its batch; that size is the same in every run, too.
    """

    target: HFTarget
    sampling: Sampling
    limits: Limits
    budget_tokens: int
    """Tokens whose keys and values a batch may hold."""
    state_tokens: int = 0
    """Tokens whose keys and values take as much memory as the states of a row's recurrent layers."""

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield an answer to every request, batch by batch.

        Each prompt leaves room within the limits, and the budget holds the longest text of the limits.
        """
        if not requests:
            return
        decoder = BatchDecoder(self.target, requests, self.sampling, self.limits)
        reservation = Predicted(
            LightPredictor(),
            requests,
            share=RESERVED_SHARE,
            part=SHORTEST.part,
            unknown=max(1, math.ceil(UNKNOWN_SHARE * self.limits.max_new_tokens)),
        )
        lengths = [self.state_tokens + len(request.prompt_ids) for request in requests]
        for batch in supervise(lengths, decoder.rooms, SHORTEST, reservation, decoder.decode, budget=self.budget_tokens):
            yield from (decoder.answer_of(row.index) for row, decoded in batch if decoded.ended)


@torch.inference_mode()
def cache_bytes(target: HFTarget) -> tuple[int, int]:
    """Return the bytes of one token's keys and values in all layers, and of the states of a text.

    For ordinary attention they are layers x 2 x KV heads x head size x bytes of an element, and 0. It
    is measured by reading a token, so it is also right for layers of different shapes.
    """
    token = torch.zeros(1, dtype=torch.long, device=target.device)
    target.prefill(Prompts.of([token]), max_new_tokens=1, max_nodes=0)
    kept = target.take(0)
    target.release_cache()
    return sum(one.nbytes for one in kept.columns), sum(one.nbytes for state in kept.states for one in state.values())


class BatchDecoder:
    """Decodes batches of one call's requests, and keeps their answers so far."""

    def __init__(self, target: HFTarget, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> None:
        self.target = target
        self.requests = requests
        self.rule = GreedyAcceptance() if sampling.temperature == 0 else SpeculativeSampling(sampling=sampling)
        self.stop_ids = frozenset(target.stop_ids)
        self.rooms = [limits.room(len(request.prompt_ids)) for request in requests]
        assert min(self.rooms) >= 1, "each prompt leaves room for an answer"
        self.tokens: list[list[int]] = [[] for _ in requests]
        self._evicted: dict[int, KeptText] = {}

    def answer_of(self, index: int) -> Answer:
        tokens = self.tokens[index]
        return Answer(id=self.requests[index].id, tokens=torch.tensor(tokens), cut=tokens[-1] not in self.stop_ids)

    def is_ended(self, index: int) -> bool:
        tokens = self.tokens[index]
        return tokens[-1] in self.stop_ids or len(tokens) == self.rooms[index]

    @torch.inference_mode()
    def decode(self, batch: Sequence[Waiting], limits: Sequence[int], least: int) -> list[Decoded]:
        """Decode one batch (see `schedule.Decode`)."""
        # A row leaves when its answer ends, or has so many tokens: then it is evicted, as the last few rows of a batch are.
        leave_at = {row.index: row.num_written + limit for row, limit in zip(batch, limits, strict=True)}
        rows = self._begin(batch, leave_at)
        unfinished = self._going_on(rows, leave_at)
        while len(unfinished) >= max(1, least):
            if len(unfinished) < len(rows):
                places = closed_up([index in unfinished for index in rows])
                self.target.select(places)
                rows = [rows[place] for place in places]
            self._step(rows)
            unfinished = self._going_on(rows, leave_at)
        self._evict(rows, unfinished)
        return [Decoded(num_new=len(self.tokens[row.index]) - row.num_written, ended=self.is_ended(row.index)) for row in batch]

    def _begin(self, batch: Sequence[Waiting], leave_at: dict[int, int]) -> list[int]:
        """Prefill new rows and restore evicted ones. Return the order of the rows in the target."""
        fresh = [row.index for row in batch if row.index not in self._evicted]
        evicted = [row.index for row in batch if row.index in self._evicted]
        prompts = [self.requests[index].prompt_ids.long().to(self.target.device) for index in fresh]
        capacity = max(len(self.requests[index].prompt_ids) + length for index, length in leave_at.items())
        texts = [self._evicted.pop(index) for index in evicted]
        output = self.target.resume(Prompts.of(prompts) if prompts else None, texts, capacity=capacity)
        if output is not None:
            tree = empty_tree(len(fresh), self.target.device)
            accepted = self._accept(tree, output, fresh)
            for index, new in zip(fresh, accepted.new_tokens, strict=True):
                self.tokens[index] += new
        return fresh + evicted

    def _step(self, rows: Sequence[int]) -> None:
        """Decode one token for every row."""
        last = torch.tensor([self.tokens[index][-1] for index in rows], device=self.target.device)
        tree = empty_tree(len(rows), self.target.device)
        output = self.target.verify(last, tree)
        accepted = self._accept(tree, output, rows)
        self.target.commit(tree, accepted)
        for index, new in zip(rows, accepted.new_tokens, strict=True):
            self.tokens[index] += new

    def _accept(self, tree: DraftTree, output: TargetOutput, rows: Sequence[int]) -> AcceptedPath:
        seeds = RowSeeds([self.requests[index].seed for index in rows], [len(self.tokens[index]) for index in rows])
        acceptance = self.rule(tree, output, generator=seeds)
        return read_acceptance(tree, output, acceptance, self._where(rows))

    def _going_on(self, rows: Sequence[int], leave_at: dict[int, int]) -> list[int]:
        """Return the rows that stay in the batch; evict those that leave before their answers end."""
        unended = [index for index in rows if not self.is_ended(index)]
        self._evict(rows, [index for index in unended if len(self.tokens[index]) == leave_at[index]])
        return [index for index in unended if len(self.tokens[index]) < leave_at[index]]

    def _evict(self, rows: Sequence[int], indices: Sequence[int]) -> None:
        self._evicted |= {index: self.target.take(rows.index(index)) for index in indices}

    def _where(self, rows: Sequence[int]) -> Where:
        """Return the names of the rows' next tokens."""
        return lambda row, place: (
            f"token {len(self.tokens[rows[row]]) + 1 + place} of the answer to {self.requests[rows[row]].id}"
        )


def closed_up(stays: Sequence[bool]) -> list[int]:
    """Return the places of the rows that stay. The last rows fill the free places, so that few keys and values are copied."""
    num_rows = sum(stays)
    last = [place for place in range(num_rows, len(stays)) if stays[place]]
    return [place if stays[place] else last.pop() for place in range(num_rows)]
