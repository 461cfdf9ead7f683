"""Measurement of tokens per step during training, by decoding held-out prompts.

The estimate over training batches (`estimate_tokens_per_step`) is no replacement, for three
reasons. It counts all positions of a text equally, but decoding starts a step where the last one
ended, which is mostly where drafting is hard. Its texts were not written by the target. And it
assumes a chain, though the drafter proposes a tree.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Int

from ..data.collate import collate, text_continuations
from ..data.manifest import Manifest
from ..data.shards import read_shard
from ..data.types import TOKENS_ONLY, DistilledExample, DrafterBatch, Example
from ..models.decoding import GreedyAcceptance, generate
from ..models.decoding.protocols import Drafter
from ..models.drafters import NullDrafter
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.objective import Loss, Objective
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import Worker
from .batches import TextLocation, derived_seed, target_reads, with_hidden_states
from .metrics import LOSS_FIELDS, add_losses, summarize

SHARDS_READ = 4
"""Least number of shards from which held-out texts are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A held-out text: its location, and the prompt at its start."""

    location: TextLocation
    prompt: Int[torch.Tensor, " seq"]


def hold_out(shards_dir: Path, manifest: Manifest, count: int, *, seed: int, max_prompt_tokens: int) -> list[HeldOut]:
    """Draw `count` texts with the seed.

    Each has an answer after a prompt of at most `max_prompt_tokens` tokens. The prompt is the part
    before the first answer. Raises ValueError if there are too few such texts, or if none would be
    left for training.
    """
    if not count:
        return []
    num_texts = sum(len(entry.ids) for entry in manifest.shards)
    if count >= num_texts:
        raise ValueError(
            f"train.validation_texts is {count}, and the shards hold {num_texts} texts: none would be left for training; "
            "lower train.validation_texts, or distil more"
        )
    random = Random(derived_seed(seed, "validation"))
    # Only from a few shards, drawn at random, because reading a shard takes time.
    per_shard = math.ceil(count / min(SHARDS_READ, len(manifest.shards)))
    held_out, left = list[HeldOut](), list[HeldOut]()
    for shard in random.sample(range(len(manifest.shards)), len(manifest.shards)):
        usable = []
        for row, distilled in enumerate(read_shard(shards_dir, manifest.shards[shard], TOKENS_ONLY)):
            wanted = distilled.example.wanted.nonzero()
            if len(wanted) and int(wanted[0]) < max_prompt_tokens:
                prompt = distilled.example.input_ids[: int(wanted[0]) + 1]
                usable.append(HeldOut(location=(shard, row), prompt=prompt))
        chosen = random.sample(usable, min(per_shard, count - len(held_out), len(usable)))
        held_out += chosen
        if len(held_out) == count:
            return held_out
        taken = {text.location for text in chosen}
        left += [text for text in usable if text.location not in taken]
    # Some shards have fewer than their share.
    missing = count - len(held_out)
    if missing <= len(left):
        return held_out + random.sample(left, missing)
    raise ValueError(
        f"train.validation_texts is {count}, and only {len(held_out) + len(left)} have a prompt of at most {max_prompt_tokens} "
        "tokens with an answer after it; lower train.validation_texts or train.validation_tokens"
    )


@dataclass(frozen=True)
class Validator:
    """Measurement of a drafter on held-out prompts, each process on its share.

    It is deterministic.
    """

    held_out: Sequence[HeldOut]
    _: KW_ONLY
    target: HFTarget
    objective: Objective
    horizon: int
    max_new_tokens: int
    batch_size: int
    accelerator: Accelerator
    _answers: dict[int, list[int]] = field(default_factory=dict, init=False)
    """Answers by plain decoding, from the first call on."""

    @cached_property
    def _worker(self) -> Worker:
        return Worker.of(self.accelerator, tensor_parallel=self.target.tensor_parallel)

    @cached_property
    def _mine(self) -> range:
        return range(self._worker.index, len(self.held_out), self._worker.num_workers)

    def __call__(self, drafter: TrainableDrafter) -> dict[str, Any]:
        """Measure the loss over all processes, calibrate the drafter with it, and decode. Returns a record.

        The loss covers every position of the target's own answers. Tokens per step are those of greedy decoding with the
        drafter's tree, with bonus tokens, without prefills. They are None if every answer ended with its first token.
        """
        was_training = drafter.training
        drafter.eval()
        try:
            if not self._answers:
                self._answers.update(self._decode(NullDrafter())[0])
            loss = self._loss(drafter)
            drafter.calibrate(loss)
            answers, num_steps = self._decode(drafter)
        finally:
            drafter.train(was_training)
            self.target.release_cache()
        num_tokens = sum(len(answer) - 1 for answer in answers.values())  # the first token is of the prefill
        counts = torch.tensor([num_tokens, num_steps], device=self.target.device) * self._worker.speaks
        num_tokens, num_steps = self.accelerator.reduce(counts, "sum").tolist()
        means = summarize(loss)
        return {
            "validation_tokens_per_step": num_tokens / num_steps if num_steps else None,
            "validation_loss": means["loss"],
            "validation_accuracy_by_depth": means["accuracy_by_depth"],
        }

    def _decode(self, drafter: Drafter[Any, Any]) -> tuple[dict[int, list[int]], int]:
        """Return the answers to this process's prompts, and the verify steps of all rows."""
        answers: dict[int, list[int]] = {row: [] for row in self._mine}
        num_steps = 0
        for start in range(0, len(self._mine), self.batch_size):
            rows = self._mine[start : start + self.batch_size]
            for step in generate(
                self.target,
                drafter,
                GreedyAcceptance(),
                [self.held_out[row].prompt.to(self.target.device) for row in rows],
                max_new_tokens=self.max_new_tokens,
                stop_ids=self.target.stop_ids,
            ):
                for row, tokens in zip(step.rows, step.tokens, strict=True):
                    answers[rows[row]] += tokens
                num_steps += 0 if step.is_prefill else len(step.rows)
        return answers, num_steps

    @torch.no_grad()
    def _loss(self, drafter: TrainableDrafter) -> Loss:
        """Return the sums of the objective over all processes."""
        total: Loss | None = None
        objective = replace(self.objective, teacher="full")  # nothing is stored for the target's own answers
        reads = target_reads(drafter, objective)
        for start in range(0, len(self._mine), self.batch_size):
            batch = self._batch(self._mine[start : start + self.batch_size])
            loss = drafter.loss(with_hidden_states(batch, self.target, reads), objective)
            total = add_losses(total, loss)
        assert total is not None, "every process has a prompt"
        sums = {name: getattr(total, name) * self._worker.speaks for name in LOSS_FIELDS}
        return Loss(**self.accelerator.reduce(sums, "sum"))

    def _batch(self, rows: Sequence[int]) -> DrafterBatch:
        """Build a batch of prompts and answers.

        The labels are the answers' next tokens, since the target wrote them.
        """
        examples = []
        for row in rows:
            prompt = self.held_out[row].prompt
            input_ids = torch.cat([prompt, torch.tensor(self._answers[row])])
            example = Example(
                id=f"validation-{row}", input_ids=input_ids, loss_mask=torch.arange(len(input_ids)) >= len(prompt)
            )
            continuations = text_continuations(example.input_ids, example.loss_mask, self.horizon)
            examples.append(DistilledExample(example=example, continuations=continuations))
        # All positions are used, so no random number is drawn.
        return collate(examples, max_positions=None, generator=torch.Generator(), labels="distilled")
