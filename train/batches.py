"""The order in which training reads the shards: a pure function of seed and position.

So a run resumes in the middle of the data. Texts are numbered through all epochs: position p is
text p % n of epoch p // n. Step s, micro-batch m and process r read `batch_size` texts from
position ((s * accumulation + m) * processes + r) * batch_size, where s counts from 0. So a step
reads the same texts under any division into processes and micro-batches. A run that resumes with
more or fewer texts per step continues at the position that it had reached.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from jaxtyping import Float, Int
from transformers import DynamicCache

from ..data.collate import collate
from ..data.manifest import Manifest
from ..data.shards import read_shard
from ..data.types import TOKENS_ONLY, UNKNOWN, DistilledExample, DrafterBatch, TargetReads
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.labels import known_labels
from ..models.drafters.objective import Objective
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import turns
from ..models.llm.tree_attention import has_only_attention
from .config import TrainConfig

TextLocation = tuple[int, int]
"""Location of a text: its shard, and its row there."""


class BatchStream:
    """The batches of one process, step by step. A shard is read when its first text is needed.

    `held_out` texts are in no batch. `reads` are the states of the target that training needs;
    batches hold those that the shards hold. With `ahead`, a thread makes the batches of the next step
    during this one, in pinned memory: an accelerator then needn't wait for them.
    """

    def __init__(
        self,
        shards_dir: Path,
        manifest: Manifest,
        config: TrainConfig,
        *,
        rank: int,
        num_processes: int,
        held_out: Collection[TextLocation] = (),
        reads: TargetReads = TOKENS_ONLY,
        ahead: bool = False,
    ) -> None:
        if not manifest.num_labels:
            raise ValueError(
                f"the shards in {shards_dir} hold no labelled position, so there is nothing to train on; check the data of the "
                "distillation (are the assistant's answers empty, or cut off by max_length?)"
            )
        assert config.global_batch_size is None, "`with_accumulation` has replaced it"
        self.entries = manifest.shards
        self.config = config
        self.rank = rank
        self.num_processes = num_processes
        self._origin = (0, 0)  # a step, and the position where it begins
        self._sizes = tuple(len(entry.ids) for entry in manifest.shards)
        self._held_out = frozenset(held_out)
        # The cache holds one window of shards: texts of one window follow each other.
        self._reads = manifest.stored(reads)
        read = lru_cache(maxsize=config.shuffle_shards)
        self._read = read(lambda index: read_shard(shards_dir, self.entries[index], self._reads))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") if ahead else None
        self._next: tuple[int, Future[list[DrafterBatch]]] | None = None

    @property
    def step_size(self) -> int:
        """Texts per step, over all processes."""
        return self.config.batch_size * self.config.gradient_accumulation * self.num_processes

    @property
    def num_texts(self) -> int:
        """Texts of an epoch."""
        return sum(self._sizes) - len(self._held_out)

    def position(self, step: int) -> int:
        """Return the position where a step begins."""
        origin_step, origin = self._origin
        return origin + (step - origin_step) * self.step_size

    def start_at(self, step: int, position: int) -> None:
        """Let `step` begin at `position`."""
        self._origin, self._next = (step, position), None

    def batches(self, step: int) -> list[DrafterBatch]:
        """Return this process's micro-batches of a step, on the CPU."""
        ready, self._next = self._next, None
        batches = ready[1].result() if ready is not None and ready[0] == step else self._batches(step)
        if self._thread is not None and step + 1 < self.config.steps:
            self._next = step + 1, self._thread.submit(self._batches, step + 1)
        return batches

    def _batches(self, step: int) -> list[DrafterBatch]:
        batches = [self._batch(step, micro) for micro in range(self.config.gradient_accumulation)]
        pins = self._thread is not None and torch.cuda.is_available()
        return [batch.pinned() for batch in batches] if pins else batches

    def ids(self, step: int) -> list[str]:
        """Return the ids of a step's texts, over all processes, without reading a shard."""
        return [self.entries[shard].ids[row] for shard, row in self._rows(self.position(step), self.step_size)]

    def _batch(self, step: int, micro: int) -> DrafterBatch:
        start = self.position(step) + (micro * self.num_processes + self.rank) * self.config.batch_size
        examples: list[DistilledExample] = [self._read(shard)[row] for shard, row in self._rows(start, self.config.batch_size)]
        generator = torch.Generator().manual_seed(derived_seed(self.config.seed, "positions", step, micro, self.rank))
        return collated(self.config, examples, generator, self._reads)

    def _rows(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return shard and row of the texts at `count` positions from `start` on."""
        rows = []
        for position in range(start, start + count):
            epoch = position // self.num_texts
            order = epoch_order(self._sizes, self.config.seed, epoch, self.config.shuffle_shards, self._held_out)
            shard, row = order[position % self.num_texts].tolist()
            rows.append((shard, row))
        return rows


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def epoch_order(
    sizes: tuple[int, ...], seed: int, epoch: int, window: int, held_out: frozenset[TextLocation] = frozenset()
) -> Int[torch.Tensor, "text 2"]:
    """Return shard and row of every text of an epoch.

    Shards are shuffled, and then the texts of each `window` shards with each other.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
    shards = torch.randperm(len(sizes), generator=generator).tolist()
    parts = []
    for start in range(0, len(shards), window):
        rows = [(shard, row) for shard in shards[start : start + window] for row in range(sizes[shard])]
        texts = torch.tensor([row for row in rows if row not in held_out], dtype=torch.long).view(-1, 2)
        parts.append(texts[torch.randperm(len(texts), generator=generator)])
    return torch.cat(parts)


def label_counts(batch: DrafterBatch) -> Int[torch.Tensor, " depth"]:
    """Count the labels at every depth; a drafter may train fewer depths."""
    return known_labels(batch.continuations[batch.positions]).sum(0)


def count_label_tokens(shards_dir: Path, manifest: Manifest, vocab_size: int) -> Int[torch.Tensor, " vocab"]:
    """Count how often each token occurs in the continuations. Reads every shard."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for entry in manifest.shards:
        counts += count_tokens(read_shard(shards_dir, entry, TOKENS_ONLY), vocab_size)
    return counts


def collated(
    config: TrainConfig, examples: Sequence[DistilledExample], generator: torch.Generator, reads: TargetReads
) -> DrafterBatch:
    """Collate texts as a training's options ask for. `generator` draws the positions that are trained."""
    return collate(
        list(examples),
        max_positions=config.max_positions,
        generator=generator,
        labels=config.labels,
        reads=reads,
        packing=config.packing,
    )


def count_tokens(examples: Sequence[DistilledExample], vocab_size: int) -> Int[torch.Tensor, " vocab"]:
    """Count the tokens of the labels."""
    labels = torch.cat([torch.empty(0, dtype=torch.long), *(example.continuations.flatten() for example in examples)])
    return labels[labels != UNKNOWN].bincount(minlength=vocab_size)


def target_reads(drafter: TrainableDrafter, objective: Objective) -> TargetReads:
    """Return which states of the target the training of this drafter needs."""
    top = objective.loss.needs_teacher and objective.teacher == "top_k"
    return TargetReads(
        hidden_states=drafter.reads_hidden_states or (objective.loss.needs_teacher and not top),
        layers=drafter.feature_layers,
        top=top,
    )


def with_hidden_states(batch: DrafterBatch, target: HFTarget, reads: TargetReads) -> DrafterBatch:
    """Move the batch to the target's device, decode its states, and recompute those that it lacks.

    States keep the target's or the stored type: a drafter casts what it reads, and under autocast a
    copy in float32 would only be cast back.
    """
    batch = batch.to(target.device).decoded()
    last = reads.hidden_states and batch.hidden_states is None
    layers = reads.layers if batch.features is None else ()
    hidden_states, features = states_of_texts(target, batch, last=last, layers=layers)
    return replace(
        batch,
        hidden_states=hidden_states if last else batch.hidden_states,
        features=features if layers else batch.features,
    )


def derived_seed(*parts: object) -> int:
    """Derive a separate seed for each purpose."""
    # A string has the same hash on every machine, and neighbouring steps and ranks get unrelated
    # streams.
    return Random("/".join(map(str, parts))).getrandbits(63)


# --- the target's states at a batch's texts


LastStates = Float[torch.Tensor, "batch seq hidden"]
LayerInputs = Float[torch.Tensor, "batch seq feature"]


@torch.no_grad()
def states_of_texts(
    target: HFTarget, batch: DrafterBatch, *, last: bool, layers: tuple[int, ...]
) -> tuple[LastStates | None, LayerInputs | None]:
    """Return the target's last hidden states (None unless `last`) and the inputs of `layers`.

    The layers' inputs are side by side. The pass runs without gradients and without the head, in
    the target's type. Without `last` it runs no deeper than the last of `layers`. States on padding
    are meaningless.
    """
    if not last and not layers:
        return None, None
    # Rows of one text need no mask: under causal attention no token sees the padding on its right. With a mask,
    # attention would not use its fastest kernels, and the host would wait to check whether the mask hides anything.
    # Packed texts in a row are separated by their positions, which start again at 0: transformers computes the block
    # mask from them.
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.starts is not None:
        inputs["position_ids"] = batch.position_ids
    states, features = None, None
    for is_local, texts in turns(inputs, target.device) if target.tensor_parallel else [(True, inputs)]:
        if "position_ids" not in texts and has_only_attention(target.model):
            texts = {**texts, "past_key_values": PassingCache()}
        outputs = target.read_texts(layers, **texts) if last else (None, target.layer_inputs(layers, **texts))
        if is_local:
            states, features = (None if output is None else output.reshape(*batch.input_ids.shape, -1) for output in outputs)
    return states, features


class PassingCache(DynamicCache):
    """A KV cache that keeps nothing: attention reads the keys and values of the pass itself.

    Without a cache, transformers looks for packed texts in the position ids, and the host waits for
    the result. Layers that read more than keys and values are read without one.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


@torch.no_grad()
def require_packing(target: HFTarget) -> None:
    """Raise ValueError if the target reads texts differently when they are packed into one row.

    Such a target finds positions by more than position ids, or attends across texts.
    """
    text = target.probe_ids[None]
    lengths = [8, 7]
    position_ids = torch.cat([torch.arange(length, device=target.device) for length in lengths])[None]
    together, _ = target.read_texts(input_ids=text, position_ids=position_ids)
    alone = torch.cat([target.read_texts(input_ids=part)[0] for part in text.split(lengths, dim=1)], dim=1).float()
    error = float((together.float() - alone).norm() / alone.norm())
    if not target.is_rounding(error):
        raise ValueError(
            f"{type(target.model).__name__} reads texts differently when they are packed into one row (relative error "
            f"{error:.2g} of its hidden states); set train.packing=false, or store the hidden states that training reads"
        )
