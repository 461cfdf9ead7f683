"""Rehearsal of a training with its real target, before any long work.

A few made tokens are labelled. Each drafter computes its loss and the gradient on them, and drafts
tokens that the target verifies. These are the functions of the stages themselves. So what a target's
architecture and a drafter can't do together fails here, and not after hours of distillation.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate import Accelerator
from tqdm import tqdm

from ..data.collate import text_continuations
from ..data.manifest import Manifest
from ..data.types import DistilledExample, Example
from ..distill.config import DistillConfig
from ..distill.label.continuations import require_labels
from ..distill.label.run import label_shard
from ..models.decoding import GreedyAcceptance, generate
from ..models.drafters import build_drafter
from ..models.drafters.base import TrainableDrafter
from ..models.drafters.saved.folder import WEIGHTS_FILE
from ..models.llm.hf_target import HFTarget
from ..models.machine import is_for_users
from ..train.batches import require_packing, target_reads, with_hidden_states
from ..train.parallel import needs_whole_copy
from ..train.setup import check_shards, make_objective, validation_room
from .config import DrafterRun
from .samples import count_tokens, draw_batch

log = logging.getLogger(__name__)

LENGTHS = (11, 8)
"""Tokens of the made texts: of different lengths, as in any batch."""
PROMPT_TOKENS = 4
NEW_TOKENS = 4
FIRST_TOKEN = 3
RAW_ERRORS = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError, ValueError)
"""Errors that name no remedy. A ValueError of the project is a message, and passes unchanged."""


@contextmanager
def works_together(target: HFTarget, kind: str | None = None) -> Iterator[None]:
    """Turn raw errors into one ValueError that names the target's architecture and the drafter.

    Without a kind, the target does something alone. Memory that runs out stays its own error.
    """
    try:
        yield
    except RAW_ERRORS as error:
        if is_for_users(error):
            raise
        model, text = type(target.model).__name__, " ".join(f"{type(error).__name__}: {error}".split())
        if kind is None:
            raise ValueError(f"{model} can't be labelled ({text}); choose another target") from error
        others = " or ".join(other for other in ("redrafter", "medusa") if other != kind)
        raise ValueError(
            f"{model} and the drafter {kind} don't work together ({text}); choose another drafter, such as {others}, or "
            "another target"
        ) from error


def rehearse(runs: Sequence[DrafterRun], labels: DistillConfig | Manifest, target: HFTarget, accelerator: Accelerator) -> int:
    """Label, train and decode a few tokens with each drafter that isn't trained yet.

    `labels` are the options of the distillation, or the manifest of finished labels: then the made
    texts are labelled by themselves. All processes do the same. Returns the number of tokens that
    target and drafters can read.

    Raises ValueError that names the target's architecture, the drafter and what fails.
    """
    waiting = [run for run in runs if not (run.drafter_dir / WEIGHTS_FILE).exists()]
    if not waiting:
        return target.context_length
    # Compiled or recorded passes would take minutes.
    eager = target
    if target.has_fixed_shapes:
        eager = HFTarget(target.model, target.tokenizer, target.identity, tensor_parallel=target.tensor_parallel)
    kinds = dict.fromkeys(run.drafter.kind for run in waiting)
    if accelerator.is_main_process:
        log.info("trying the recipe on %d tokens: labels, and the training and drafts of %s", sum(LENGTHS), ", ".join(kinds))
    with works_together(eager):
        examples = make_examples(labels, eager)
    contexts = [target.context_length]
    for run in waiting:
        with works_together(eager, run.drafter.kind):
            drafter = build_drafter(run.drafter.in_setting(run.settings[0]), eager)
            rehearse_loss(run, drafter, labels, examples, eager, accelerator)
            rehearse_decoding(drafter, examples, eager)
        contexts += [] if drafter.context_length is None else [drafter.context_length]
    eager.release_cache()
    return min(contexts)


def make_examples(labels: DistillConfig | Manifest, target: HFTarget) -> list[DistilledExample]:
    """Label texts of a few tokens, of which all but the first are an answer."""
    # 1. The texts, as short as a short context demands.
    room = target.context_length - labels.horizon
    examples = []
    for number, length in enumerate(LENGTHS):
        ids = torch.arange(FIRST_TOKEN, FIRST_TOKEN + min(length, room)) % target.vocab_size
        examples.append(Example(id=str(number), input_ids=ids, loss_mask=torch.arange(len(ids)) >= PROMPT_TOKENS))
    # 2. Their labels.
    if isinstance(labels, Manifest):
        return [
            DistilledExample(
                example=example,
                # Other tokens than the text's, so that branches are tried, too.
                continuations=text_continuations(example.input_ids.flip(0), example.loss_mask, labels.horizon),
            )
            for example in examples
        ]
    longest = max(len(example.input_ids) for example in examples)
    require_labels(target, longest, labels.horizon, branches=labels.decodes_branches)
    labelled, _ = label_shard(labels, target, examples, tqdm(disable=True))
    return labelled


def rehearse_loss(
    run: DrafterRun,
    drafter: TrainableDrafter,
    labels: DistillConfig | Manifest,
    examples: Sequence[DistilledExample],
    target: HFTarget,
    accelerator: Accelerator,
) -> None:
    """Compute one loss and its gradient, as in a training step."""
    config = replace(run.train, batch_size=len(examples), global_batch_size=None)
    validation_room(config, drafter, target)
    if drafter.wants_token_counts:
        drafter.choose_draft_vocabulary(count_tokens(examples, target.vocab_size))
    objective = make_objective(config, target)
    reads = target_reads(drafter, objective)
    if isinstance(labels, Manifest):
        check_shards(config, labels, reads, target)
    if reads.top and examples[0].top is None:
        return  # the made texts have no top tokens, while the finished labels have some
    batch = draw_batch(config, examples, reads).decoded()
    lacks_states = (reads.hidden_states and batch.hidden_states is None) or (bool(reads.layers) and batch.features is None)
    if config.packing and lacks_states and not isinstance(labels, Manifest):
        require_packing(target)
    batch = with_hidden_states(batch, target, reads)
    drafter.train()
    # Where the processes share the weights, a gradient of all of them may not fit into one.
    with torch.set_grad_enabled(not needs_whole_copy(accelerator)), accelerator.autocast():
        loss = drafter.loss(batch, objective).sums.sum()
    if loss.requires_grad:
        loss.backward()
    drafter.zero_grad()


def rehearse_decoding(drafter: TrainableDrafter, examples: Sequence[DistilledExample], target: HFTarget) -> None:
    """Decode a few tokens of two prompts, in the target's type, as in an evaluation."""
    drafter.to(target.dtype).eval().requires_grad_(False)
    prompts = [item.example.input_ids[: PROMPT_TOKENS + row].to(target.device) for row, item in enumerate(examples)]
    for _ in generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=NEW_TOKENS):
        pass
