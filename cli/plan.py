"""`--plan`: estimate time, memory and disk of the unfinished stages, without writing files."""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ..data.decontamination import PromptOverlap
from ..data.manifest import MANIFEST_FILE
from ..data.shards import label_store, read_shard
from ..data.sources import load_conversations
from ..data.suites import PromptSet
from ..data.types import DistilledExample, Example
from ..distill.estimate import (
    TIME,
    estimate,
    estimate_regeneration,
    estimate_table,
    format_time,
    make_table,
    regeneration_table,
)
from ..distill.label.continuations import require_branch_attention
from ..distill.label.features import free_bytes
from ..distill.label.run import label_shard, load_examples, missing_examples
from ..distill.regenerate.run import missing_conversations
from ..eval.config import BOTH
from ..eval.estimate import estimate_evaluation
from ..eval.records.names import SUMMARY_FILE
from ..models.drafters.saved.folder import WEIGHTS_FILE
from ..models.export.registry import holds_kind
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import Worker
from ..train.checkpoint import latest_checkpoint, step_of
from ..train.division import with_accumulation
from ..train.estimate import TrainingEstimate, estimate_training
from ..train.results import CHECKPOINTS_DIR, describe_run, is_trained
from .config import DrafterRun, RunConfig

WIDTH = 80
SLOW = 10
"""Tokens a second below which a speed has decimal places."""
BUSY = 0.5
"""Load of the machine per core, before anything is measured, above which the times are called rough."""
SAMPLE_TEXTS = 32
"""Maximum number of texts for timing steps of training."""
SAMPLE_PORTION = 4
LABELLING_SECONDS = 5.0
"""Without a shard, texts are labelled for this time, SAMPLE_PORTION texts at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Estimate for one stage."""

    table: Table
    seconds: float
    num_bytes: int = 0


def print_plan(
    config: RunConfig,
    target: HFTarget,
    folder: Path,
    accelerator: Accelerator,
    *,
    overlap: PromptOverlap | None,
    suites: Sequence[PromptSet] | None,
) -> None:
    """Print a table for each unfinished stage, and one line for the whole run.

    All processes measure; the first one prints. `suites` is None if the evaluation's prompts can't
    be read: then the evaluation isn't planned.
    """
    load, num_threads = os.getloadavg()[0], torch.get_num_threads()

    # 1. Plan each stage. Training needs the examples of the distillation.
    plans: dict[str, list[StagePlan]] = {}
    examples: list[Example] = []
    drafter_bytes = {run.drafter_dir: _file_bytes(run.drafter_dir / WEIGHTS_FILE) for run in config.drafter_runs()}
    if "distill" in config.stages:
        plans["distill"], examples = _plan_distill(config, target, folder, accelerator, overlap)
    if "train" in config.stages:
        trained = _plan_train(config, target, folder, accelerator, examples, overlap)
        plans["train"] = [_training_plan(config, run, estimate) for run, estimate in trained]
        drafter_bytes |= {run.drafter_dir: estimate.drafter_bytes for run, estimate in trained}
    if "eval" in config.stages and suites is not None and accelerator.is_main_process:
        is_done = not plans.get("train") and (folder / "eval" / SUMMARY_FILE).is_file()
        plans["eval"] = [] if is_done else [_plan_eval(config, suites, target)]
    if "export" in config.stages:
        plans["export"] = [_plan_export(config, drafter_bytes)]

    # 2. Print the tables.
    if accelerator.is_main_process:
        _print(plans, folder, load, num_threads)
    accelerator.wait_for_everyone()


def _print(plans: Mapping[str, Sequence[StagePlan]], folder: Path, load: float, num_threads: int) -> None:
    console = Console(highlight=False)
    console.width = min(WIDTH, console.width)
    for name, stages in plans.items():
        for stage in stages:
            console.print(stage.table)
        if not stages:
            console.print(f"{name}: finished in {folder}\n", soft_wrap=True)
    stages = [stage for plan in plans.values() for stage in plan]
    if stages:
        console.print(f"Speeds are measured with {num_threads} CPU thread(s) per process (num_threads).\n")
    if load > BUSY * (os.cpu_count() or 1):
        console.print(
            f"Other programs were running (load {load:.1f} on {os.cpu_count()} cores): on a CPU the real times may be several "
            "times longer or shorter. Plan again when the machine is idle.\n"
        )
    needed, free = sum(stage.num_bytes for stage in stages), free_bytes(folder)
    short = " [bold red]NOT ENOUGH[/]" if needed > free else ""
    seconds = sum((stage.seconds for stage in stages), 0.0)
    console.print(
        f"[bold]Whole run: {format_time(seconds)}, {_size(needed)} on disk[/] ({_size(free)} are free){short}", soft_wrap=True
    )


def _plan_distill(
    config: RunConfig, target: HFTarget, folder: Path, accelerator: Accelerator, overlap: PromptOverlap | None
) -> tuple[list[StagePlan], list[Example]]:
    """Plan the unfinished part of the distillation, and return its examples too.

    If answers are regenerated, the examples are estimates of the future ones.
    """
    data, options = config.data, config.distill
    num_workers = Worker.of(accelerator, tensor_parallel=target.tensor_parallel).num_workers
    plans: list[StagePlan] = []
    examples: list[Example] = []
    if options.mode == "regenerate":
        conversations, unread = load_conversations(data, overlap)
        dropped = Counter[str]()
        if missing := missing_conversations(options, data, target, conversations, folder / "answers"):
            answers, examples = estimate_regeneration(options, data, target, missing, unread, num_workers)
            plans.append(StagePlan(table=regeneration_table(answers), seconds=answers.seconds))
    else:
        examples, dropped = load_examples(data, target.tokenizer, overlap)
        examples = missing_examples(options, data, target, examples, folder / "distill")
    if examples:
        require_branch_attention(target, max(len(example.input_ids) for example in examples) + max(options.horizon - 2, 0))
        accelerator.wait_for_everyone()
        labels = estimate(options, target, examples, dropped, folder, num_workers)
        plans.append(StagePlan(table=estimate_table(labels), seconds=labels.seconds, num_bytes=labels.num_bytes))
    return plans, examples


def _plan_train(
    config: RunConfig,
    target: HFTarget,
    folder: Path,
    accelerator: Accelerator,
    examples: Sequence[Example],
    overlap: PromptOverlap | None,
) -> list[tuple[DrafterRun, TrainingEstimate]]:
    """Estimate each training that isn't finished."""
    # 1. Find the unfinished trainings, and the steps of their checkpoints.
    unfinished = []
    manifest_file = folder / "distill" / MANIFEST_FILE
    for run in config.drafter_runs():
        steps_done = 0
        if manifest_file.is_file() and (manifest := label_store(folder / "distill").load()).complete:
            options = with_accumulation(run.train, accelerator.num_processes)
            if is_trained(options, describe_run(options, run.drafter, manifest, accelerator), run.train_dir, run.drafter_dir):
                continue
            checkpoint = latest_checkpoint(run.train_dir / CHECKPOINTS_DIR)
            steps_done = 0 if checkpoint is None else step_of(checkpoint)
        unfinished.append((run, steps_done))
    if not unfinished:
        return []

    # 2. Time steps of each on the same labelled examples.
    sample = _labelled_sample(config, target, folder, examples, overlap)
    return [
        (run, estimate_training(run.train, run.drafter, target, sample, accelerator, steps_done=steps_done))
        for run, steps_done in unfinished
    ]


def _labelled_sample(
    config: RunConfig, target: HFTarget, folder: Path, examples: Sequence[Example], overlap: PromptOverlap | None
) -> list[DistilledExample]:
    """Return some examples with labels, from a finished shard or labelled now."""
    store = label_store(folder / "distill")
    if (store.directory / MANIFEST_FILE).is_file() and (entry := store.read_entry(0)) is not None:
        return read_shard(store.directory, entry)[:SAMPLE_TEXTS]
    texts = list(examples) or load_examples(config.data, target.tokenizer, overlap)[0]
    drawn, labelled = Random(0).sample(texts, min(SAMPLE_TEXTS, len(texts))), list[DistilledExample]()
    started = time.perf_counter()
    with tqdm(disable=True) as progress:
        while len(labelled) < len(drawn) and time.perf_counter() - started < LABELLING_SECONDS:
            portion = drawn[len(labelled) : len(labelled) + SAMPLE_PORTION]
            labelled += label_shard(config.distill, target, portion, progress)[0]
    return labelled


def _training_plan(config: RunConfig, run: DrafterRun, plan: TrainingEstimate) -> StagePlan:
    name = f" {run.drafter_dir.parent.name}" if config.variants else ""
    memory = (
        f"{_size(plan.target_bytes)} target + {_size(plan.state_bytes)} drafter (weights, gradients, AdamW) + at most "
        f"{_size(plan.chunk_bytes)} a tensor of logits (computed; activations come on top)"
    )
    beside = [f"copies for checkpoints {_seconds(plan.checkpoint_seconds)}"]
    if run.train.validation_texts:
        beside.append(f"validation {_seconds(plan.validation_seconds)}, at the speed of plain decoding")
    rows = {
        "drafter": f"{run.drafter.kind}, {plan.parameters:,} parameters",
        "steps": f"{plan.num_steps:,} of {plan.texts_per_step:,} texts, about {plan.tokens_per_step:,.0f} tokens",
        "speed": f"{plan.seconds_per_step:.3g} s a step, measured on a fresh drafter (median)",
        "beside": ", ".join(beside),
        TIME: format_time(plan.seconds),
        "memory": memory,
        "disk": f"{_size(plan.disk_bytes)}: {plan.num_checkpoints - 1} checkpoints, one more while it is written, and drafters "
        "(computed)",
    }
    return StagePlan(table=make_table(f"train{name}", rows), seconds=plan.seconds, num_bytes=plan.disk_bytes)


def _plan_eval(config: RunConfig, suites: Sequence[PromptSet], target: HFTarget) -> StagePlan:
    num_drafters = sum(len(run.settings) + bool(config.eval.merge) for run in config.drafter_runs())
    num_methods = 1 + len(config.eval.baselines) + num_drafters
    if config.eval.decode == BOTH:  # each drafter once more
        num_methods += len(config.eval.baselines) + len(config.drafter_runs()) * (1 + bool(config.eval.merge))
    plan = estimate_evaluation(config.eval, suites, num_methods, target)
    speeds = ", ".join(f"{_speed(speed)} in batches of {size}" for size, speed in plan.tokens_per_second.items())
    rows = {
        "answers": f"{plan.num_answers:,}: {plan.num_prompts:,} prompts x {num_methods} methods x temperatures, batch sizes, "
        "turns and repeats",
        "speed": f"plain decoding, tokens a second: {speeds} (measured)",
        TIME: f"{format_time(plan.seconds)}, if all answers reach {plan.max_new_tokens} tokens at the speed of plain decoding",
    }
    return StagePlan(table=make_table("eval", rows), seconds=plan.seconds)


def _plan_export(config: RunConfig, drafter_bytes: Mapping[Path, int]) -> StagePlan:
    num_bytes = sum(
        drafter_bytes[run.drafter_dir] * (1 + sum(holds_kind(name, run.drafter.kind) for name in config.export.formats))
        for run in config.drafter_runs()
    )
    rows = {"disk": f"{_size(num_bytes)} for the package and {len(config.export.formats)} format(s) (computed)"}
    return StagePlan(table=make_table("export", rows), seconds=0.0, num_bytes=num_bytes)


def _speed(tokens_per_second: float) -> str:
    """Format a speed; that of a target with a memory budget may be below 1."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= SLOW else f"{tokens_per_second:.2g}"


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_time(seconds)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
