"""Short runs of the stages' own steps. `--plan` extrapolates their times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from jaxtyping import Int
from tqdm import tqdm

from ..data.collate import collate
from ..data.config import DataConfig
from ..data.types import UNKNOWN, Conversation, DistilledExample, DrafterBatch, Example, TargetReads, TopTokens, Turn
from ..distill.config import DistillConfig
from ..distill.label.run import LabellingStats, label_shard
from ..distill.plan import total
from ..distill.regenerate.engine import Limits
from ..distill.regenerate.engines.registry import open_engine
from ..distill.regenerate.run import answer_conversations, answer_limits
from ..eval.measure.timing import time_generation
from ..models.decoding import GreedyAcceptance
from ..models.decoding.stopping import Finish
from ..models.drafters import NullDrafter, build_drafter
from ..models.drafters.saved.build import DrafterSpec
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import agreed
from ..models.machine import synchronize
from ..train.batches import PAD_ID, target_reads, with_hidden_states
from ..train.config import TrainConfig
from ..train.missed_by import open_other
from ..train.parallel import make_anchor, tensor_float32
from ..train.setup import LossModule, make_objective, make_optimizer

SECONDS = 8.0
"""About the time of one measurement."""
FIRST_SIZE = 16
"""Tokens of the first portion: it ends within seconds on a slow machine, too."""
REPEATS = 5
"""Most portions of the largest size."""
CONVERSATIONS = 16
"""Conversations that are answered together."""

T = TypeVar("T")


def grow(step: Callable[[int], T], largest: int, target: HFTarget) -> list[T]:
    """Run a step of growing size for about SECONDS, and return the results of the largest size.

    The first size is FIRST_SIZE, and each further one twice as large, while the clock leaves time
    for it. A step of size `largest` is repeated. The first step of all isn't measured: it allocates
    memory and chooses kernels.
    """
    size, results, started = min(FIRST_SIZE, largest), list[T](), time.perf_counter()
    step(size)
    while True:
        begin = time.perf_counter()
        results.append(step(size))
        synchronize(target.device)
        now = time.perf_counter()
        growth = 1 if size == largest else 2
        ends = now + growth * (now - begin) > started + SECONDS or len(results) == REPEATS
        if agreed(ends, target.device) if target.tensor_parallel else ends:
            return results
        if growth == 2:
            size, results = min(2 * size, largest), []


# --- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A sample of answers, cut where the time of the measurement ended."""

    seconds: float
    num_answers: int
    num_tokens: int
    num_ended: int
    """Answers that the target ended, not a limit."""
    examples: Sequence[Example] = ()

    def mean_tokens(self, most: int) -> float:
        """Return the mean length of answers of at most `most` tokens.

        As if each token were the last one with equal probability: so answers that were cut count, too.
        """
        probability = self.num_ended / self.num_tokens
        return (1 - (1 - probability) ** most) / probability if probability else float(most)


def sample_answers(
    config: DistillConfig, data: DataConfig, target: HFTarget, conversations: Sequence[Conversation]
) -> tuple[Answers, float]:
    """Answer the first questions of some conversations by the run's engine, up to a growing length.

    Also returns the estimated seconds of one of these answers in full length.
    """
    # 1. Two lengths give the time of the prompts, and that of each further token.
    limits, timed = answer_limits(config, data, target), list[tuple[int, Answers]]()
    chosen = [replace(conversation, turns=first_exchange(conversation)) for conversation in conversations[:CONVERSATIONS]]

    def answer(size: int) -> Answers:
        short = Limits(max_new_tokens=size, max_tokens=limits.max_tokens)
        with open_engine(config, target, short) as engine, tqdm(disable=True) as progress:
            begin = time.perf_counter()
            answered, counts = answer_conversations(chosen, target, engine, limits=short, seed=config.seed, progress=progress)
            seconds = time.perf_counter() - begin
        if not counts.num_answers:
            raise ValueError(f"none of the target's answers to {len(chosen)} conversations can be used")
        answers = Answers(
            seconds=seconds,
            num_answers=counts.num_answers,
            num_tokens=counts.num_tokens,
            num_ended=counts.num_answers - counts.num_cut,
            examples=[example.to_example() for example in answered],
        )
        timed.append((size, answers))
        return answers

    last = grow(answer, limits.max_new_tokens, target)[-1]
    # 2. A batch ends with its longest answer: about twice as long as the mean.
    length, longest = timed[-1][0], min(limits.max_new_tokens, 2 * last.mean_tokens(limits.max_new_tokens))
    shorter = [(size, answers.seconds) for size, answers in timed if size < length]
    per_token = (last.seconds - shorter[-1][1]) / (length - shorter[-1][0]) if shorter else last.seconds / length
    seconds = last.seconds + max(0.0, per_token) * max(0.0, longest - length)
    return last, seconds / last.num_answers


def first_exchange(conversation: Conversation) -> tuple[Turn, ...]:
    """Return the turns up to the first answer."""
    roles = [turn.role for turn in conversation.turns]
    return conversation.turns[: roles.index("assistant") + 1] if "assistant" in roles else conversation.turns


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDecoding:
    """Times of a batch of plain decoding."""

    prefill_seconds: float
    seconds_per_token: float
    """Seconds of a step, which decodes a token of each answer."""
    answers: Answers

    def batch_seconds(self, num_tokens: float) -> float:
        """Return the seconds of a batch of answers of `num_tokens` tokens."""
        return self.prefill_seconds + self.seconds_per_token * max(0.0, num_tokens - 1)


def sample_decoding(target: HFTarget, prompts: Sequence[Int[torch.Tensor, " _"]], max_new_tokens: int) -> PlainDecoding:
    """Answer a batch of prompts by plain decoding, up to a growing length."""
    room = target.context_length - max_new_tokens
    on_device = [prompt[:room].long().to(target.device) for prompt in prompts]

    def decode(size: int) -> PlainDecoding:
        generation = time_generation(
            target,
            NullDrafter(),
            GreedyAcceptance(),
            on_device,
            max_new_tokens=size,
            stop_ids=target.stop_ids,
            seeds=[0] * len(on_device),
        )
        finishes = [finish for step in generation.steps for finish in step.finishes]
        answers = Answers(
            seconds=generation.prefill_seconds + generation.decode_seconds,
            num_answers=len(on_device),
            num_tokens=sum(len(tokens) for step in generation.steps for tokens in step.tokens),
            num_ended=finishes.count(Finish.STOP_TOKEN),
        )
        return PlainDecoding(
            prefill_seconds=generation.prefill_seconds,
            seconds_per_token=generation.decode_seconds / max(1, len(generation.steps) - 1),
            answers=answers,
        )

    decoded = grow(decode, max_new_tokens, target)
    target.release_cache()
    return min(decoded, key=lambda timed: timed.answers.seconds)


# --- labels


def sample_labels(
    config: DistillConfig, target: HFTarget, texts: Sequence[Example]
) -> tuple[LabellingStats, list[DistilledExample]]:
    """Label parts of texts. Returns the work of the largest batches, and all labelled parts."""
    source, labelled = cycle(texts), list[DistilledExample]()

    def label(size: int) -> LabellingStats:
        parts, num_tokens = list[Example](), 0
        while num_tokens < size:
            parts.append(cut(next(source), size - num_tokens))
            num_tokens += len(parts[-1].input_ids)
        examples, stats = label_shard(config, target, parts, tqdm(disable=True))
        labelled.extend(examples)
        return stats

    most = min(config.batch_tokens, sum(len(text.input_ids) for text in texts))
    return total(LabellingStats, grow(label, most, target)), labelled


def cut(text: Example, size: int) -> Example:
    """Return `size` tokens of a text, around the start of its answer."""
    part = around_answer(text, size)
    return replace(text, input_ids=text.input_ids[part], loss_mask=text.loss_mask[part])


def around_answer(text: Example, size: int) -> slice:
    """Return where `size` tokens of a text begin and end: half of them in its first answer."""
    wanted = text.wanted.nonzero()
    middle = int(wanted[0]) if len(wanted) else 0
    start = max(0, min(middle - size // 2, len(text.input_ids) - size))
    return slice(start, start + size)


# --- training


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """A micro-batch of a training, and the optimizer's step after it."""

    num_tokens: int
    batch_seconds: float
    update_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """Times of a training with a fresh drafter, and the drafter's size."""

    seconds_per_step: float
    num_parameters: int


def sample_training(
    config: TrainConfig,
    spec: DrafterSpec,
    target: HFTarget,
    examples: Sequence[DistilledExample],
    accelerator: Accelerator,
    *,
    tokens_per_text: float,
    positions_per_text: float,
) -> TrainingSample:
    """Train a fresh drafter on parts of labelled texts. Each process measures its own steps.

    The exchange of gradients, the reading of shards and the writing of checkpoints aren't measured.
    """
    # 1. The drafter and what it learns from, as in a training.
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    set_seed(config.seed)
    drafter = build_drafter(spec, target).train()
    if config.activation_checkpointing:
        drafter.checkpoint_activations()
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(count_tokens(examples, target.vocab_size))
    optimizer, _ = make_optimizer(drafter, config)
    objective = make_objective(config, target)
    other = None if config.missed_by is None else open_other(config.missed_by, target)
    model, reads = LossModule(drafter, objective), target_reads(drafter, objective, other)
    tokens_per_batch = config.batch_size * tokens_per_text
    positions = min(config.max_positions or tokens_per_batch, config.batch_size * positions_per_text)
    source = cycle(examples)

    def train(size: int) -> TrainedBatch:
        # 2. A micro-batch: collation, the target's states, forward and backward.
        begin = time.perf_counter()
        parts = [cut_labelled(next(source), size) for _ in range(config.batch_size)]
        num_tokens = sum(len(part.example.input_ids) for part in parts)
        thinned = replace(config, max_positions=max(1, round(positions * num_tokens / tokens_per_batch)))
        batch = with_hidden_states(draw_batch(thinned, parts, reads), target, reads, other)
        with accelerator.autocast(), tensor_float32(accelerator.device):
            sums, *_ = model(batch, make_anchor(accelerator))
        sums.sum().backward()
        synchronize(target.device)
        # 3. The optimizer's step, as after the last micro-batch.
        middle = time.perf_counter()
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(target.device)
        update_seconds = time.perf_counter() - middle
        return TrainedBatch(num_tokens=num_tokens, batch_seconds=middle - begin, update_seconds=update_seconds)

    # 4. A step of full size. Another program's burst doesn't count in a median.
    trained = grow(train, max(len(example.example.input_ids) for example in examples), target)
    per_token = median(batch.batch_seconds / batch.num_tokens for batch in trained)
    return TrainingSample(
        seconds_per_step=per_token * tokens_per_batch * config.gradient_accumulation
        + median(batch.update_seconds for batch in trained),
        num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
    )


def cut_labelled(example: DistilledExample, size: int) -> DistilledExample:
    """Return `size` tokens of a labelled text, around the start of its answer."""
    part, top = around_answer(example.example, size), example.top
    return DistilledExample(
        example=cut(example.example, size),
        continuations=example.continuations[part],
        hidden_states=None if example.hidden_states is None else example.hidden_states.tokens(part.start, part.stop),
        layers={layer: states.tokens(part.start, part.stop) for layer, states in example.layers.items()},
        top=None if top is None else TopTokens(tokens=top.tokens[part], log_probs=top.log_probs[part]),
    )


def draw_batch(config: TrainConfig, examples: Sequence[DistilledExample], reads: TargetReads) -> DrafterBatch:
    """Return a micro-batch of these texts, with the states of the target that they hold."""
    stored = TargetReads(
        hidden_states=reads.hidden_states and all(example.hidden_states is not None for example in examples),
        layers=reads.layers if all(set(reads.layers) <= example.layers.keys() for example in examples) else (),
        top=reads.top,
    )
    return collate(
        list(examples),
        max_positions=config.max_positions,
        generator=torch.Generator().manual_seed(config.seed),
        labels=config.labels,
        pad_id=PAD_ID,
        reads=stored,
        packing=config.packing,
    )


def count_tokens(examples: Sequence[DistilledExample], vocab_size: int) -> Int[torch.Tensor, " vocab"]:
    """Count the tokens of the labels."""
    labels = torch.cat([example.continuations.flatten() for example in examples])
    return labels[labels != UNKNOWN].bincount(minlength=vocab_size)
