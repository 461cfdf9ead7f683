"""`--plan`: time, memory and disk of the unfinished stages, without writing files.

Each stage runs its own step for some seconds (see `samples`), and prints its estimate at once. Work
is counted; sizes of memory and disk follow from shapes.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
from accelerate import Accelerator
from rich.console import Console

from ..data.chat import encode_prompt
from ..data.decontamination import PromptOverlap
from ..data.manifest import MANIFEST_FILE
from ..data.shards import label_store, read_shard
from ..data.sources import describe_drops, load_conversations
from ..data.suites import PromptSet
from ..data.types import DistilledExample, Example, Turn
from ..distill.label.continuations import require_branch_attention
from ..distill.label.features import bytes_per_token, free_bytes
from ..distill.label.run import load_examples, missing_examples
from ..distill.regenerate.run import count_turns, missing_conversations
from ..eval.config import BOTH
from ..eval.records.names import SUMMARY_FILE
from ..eval.run import cpu_threads
from ..models.drafters.chunks import max_chunk
from ..models.drafters.saved.folder import WEIGHTS_FILE
from ..models.export.registry import holds_kind
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import Worker
from ..train.checkpoint import latest_checkpoint, step_of
from ..train.division import with_accumulation
from ..train.results import CHECKPOINTS_DIR, describe_run, is_trained
from .config import DrafterRun, RunConfig
from .samples import PlainDecoding, sample_answers, sample_decoding, sample_labels, sample_training

BUSY = 0.5
"""Load of the machine per core, before anything is measured, above which the times are called rough."""
SAMPLED_TEXTS = 64
SAMPLED_PROMPTS = 8
"""Prompts whose answers show how long answers are."""
DRAFTED_SPEEDUP = 1.5
"""Speed of drafted decoding over plain decoding, which the time of an evaluation assumes."""
FLOAT_BYTES, STATE_COPIES, CHECKPOINT_COPIES = 4, 4, 3
"""Drafters are trained in float32. Memory holds weights, gradients and AdamW's two moments; a
checkpoint has no gradients."""
LONG_SECONDS = 86_400
"""Time of a run from which the plan shows how to try a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Estimate for one stage; `lines` explain it."""

    name: str
    seconds: float = 0.0
    num_bytes: int = 0
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labelled texts: some of them, and the means of all."""

    examples: Sequence[DistilledExample]
    tokens_per_text: float
    positions_per_text: float


class Planner:
    """The plan of one run. All processes measure; the first one prints."""

    def __init__(self, config: RunConfig, target: HFTarget, folder: Path, accelerator: Accelerator) -> None:
        self.config, self.target, self.folder, self.accelerator = config, target, folder, accelerator
        self.num_workers = Worker.of(accelerator, tensor_parallel=target.tensor_parallel).num_workers
        self.stages: list[StagePlan] = []
        self.console = Console(highlight=False, quiet=not accelerator.is_main_process)
        self.load = os.getloadavg()[0]

    def print(self, overlap: PromptOverlap | None, suites: Sequence[PromptSet] | None) -> None:
        """Measure and print each stage, and last the whole run.

        `suites` is None if the evaluation's prompts can't be read: then the evaluation isn't planned.
        """
        self._say(f"Each stage runs for some seconds, with {torch.get_num_threads()} CPU thread(s) per process.")
        stages = self.config.stages
        labels = self._distill(overlap) if "distill" in stages else None
        drafter_bytes = self._train(labels, overlap) if "train" in stages else {}
        if "eval" in stages and suites is not None and self.accelerator.is_main_process:
            self._eval(suites)
        if "export" in stages:
            self._export(drafter_bytes)
        self._print_whole()
        self.accelerator.wait_for_everyone()

    # --- the stages

    def _distill(self, overlap: PromptOverlap | None) -> Labels | None:
        """Plan the unfinished part of the distillation. Returns labelled texts for the training."""
        data, options, target = self.config.data, self.config.distill, self.target
        if options.mode == "regenerate":
            return self._regenerate(overlap)
        texts, dropped = load_examples(data, target.tokenizer, overlap)
        texts = missing_examples(options, data, target, texts, self.folder / "distill")
        if not texts:
            self._print_finished("distill")
            return None
        num_tokens, num_positions = count(texts)
        return self._label(texts, len(texts), num_tokens, num_positions, f"dropped: {describe_drops(dropped)}")

    def _regenerate(self, overlap: PromptOverlap | None) -> Labels | None:
        """Plan the answers, and the labels of texts with answers of the sampled length."""
        data, options, target = self.config.data, self.config.distill, self.target
        conversations, dropped = load_conversations(data, overlap)
        missing = missing_conversations(options, data, target, conversations, self.folder / "answers")
        if not missing:
            self._print_finished("answers")
            return None
        self._say("answers: the target answers some prompts ...")
        answers, seconds = sample_answers(options, data, target, Random(0).sample(missing, len(missing)))
        num_turns, length = count_turns(missing), answers.mean_tokens(options.max_new_tokens)
        self._add(
            StagePlan(
                name="answers",
                seconds=num_turns * seconds * share(len(missing), options.shard_examples, self.num_workers),
                lines=[
                    f"{num_turns:,} answers to {len(missing):,} conversations (dropped: {describe_drops(dropped)})",
                    f"about {length:,.0f} tokens and {seconds:.3g} s each",
                ],
            )
        )
        num_tokens, num_positions = count(answers.examples)
        prompt_tokens = (num_tokens - num_positions) / len(answers.examples)
        per_text, turns = prompt_tokens + length, num_turns / len(missing)
        num_texts = len(missing)
        return self._label(
            answers.examples, num_texts, round(num_turns * per_text), round(num_turns * length), f"{turns:.1f} answers each"
        )

    def _label(self, texts: Sequence[Example], num_texts: int, num_tokens: int, num_positions: int, note: str) -> Labels:
        options, target = self.config.distill, self.target
        require_branch_attention(target, max(len(text.input_ids) for text in texts) + max(options.horizon - 2, 0))
        self.accelerator.wait_for_everyone()
        self._say("labels: the target labels parts of some texts ...")
        work, labelled = sample_labels(options, target, Random(0).sample(list(texts), len(texts)))
        read_per_position = work.num_branch_tokens / max(1, work.num_positions)
        seconds_per_read = work.seconds / (work.num_text_tokens + work.num_branch_tokens)
        num_read = num_tokens + num_positions * read_per_position
        per_token = bytes_per_token(options, target.hidden_size, labelled=num_positions / num_tokens)
        self._add(
            StagePlan(
                name="labels",
                seconds=num_read * seconds_per_read * share(num_texts, options.shard_examples, self.num_workers),
                num_bytes=int(num_tokens * per_token),
                lines=[
                    f"{num_texts:,} texts of {num_tokens:,} tokens ({note})",
                    f"{num_positions:,} positions get labels; the target agrees with {100 * work.agreement:.0f} % of the text",
                    f"it reads {num_read / num_tokens:.2f} tokens for each token of text, {1 / seconds_per_read:,.0f} a second",
                ],
            )
        )
        return Labels(examples=labelled, tokens_per_text=num_tokens / num_texts, positions_per_text=num_positions / num_texts)

    def _train(self, labels: Labels | None, overlap: PromptOverlap | None) -> dict[Path, int]:
        """Plan each unfinished training. Returns the bytes of the drafters, by folder."""
        unfinished = self._unfinished()
        sizes = {run.drafter_dir: file_bytes(run.drafter_dir / WEIGHTS_FILE) for run in self.config.drafter_runs()}
        if not unfinished:
            self._print_finished("train")
            return sizes
        labels = self._stored_labels() or labels or self._labelled_now(overlap)
        for run, steps_done in unfinished:
            sizes[run.drafter_dir] = self._train_drafter(run, steps_done, labels)
        return sizes

    def _unfinished(self) -> list[tuple[DrafterRun, int]]:
        """Return the unfinished trainings, each with the steps of its last checkpoint."""
        unfinished, shards = [], self.folder / "distill"
        manifest = label_store(shards).load() if (shards / MANIFEST_FILE).is_file() else None
        for run in self.config.drafter_runs():
            steps_done = 0
            if manifest is not None and manifest.complete:
                options = with_accumulation(run.train, self.accelerator.num_processes)
                described = describe_run(options, run.drafter, manifest, self.accelerator)
                if is_trained(options, described, run.train_dir, run.drafter_dir):
                    continue
                checkpoint = latest_checkpoint(run.train_dir / CHECKPOINTS_DIR)
                steps_done = 0 if checkpoint is None else step_of(checkpoint)
            unfinished.append((run, steps_done))
        return unfinished

    def _stored_labels(self) -> Labels | None:
        """Return labelled texts of a complete distillation; None if there is none."""
        shards = self.folder / "distill"
        if not (shards / MANIFEST_FILE).is_file() or not (manifest := label_store(shards).load()).complete:
            return None
        num_texts = sum(len(entry.ids) for entry in manifest.shards)
        return Labels(
            examples=read_shard(shards, manifest.shards[0])[:SAMPLED_TEXTS],
            tokens_per_text=manifest.num_tokens / num_texts,
            positions_per_text=manifest.num_labels / num_texts,
        )

    def _labelled_now(self, overlap: PromptOverlap | None) -> Labels:
        texts, _ = load_examples(self.config.data, self.target.tokenizer, overlap)
        self._say("labels: the target labels parts of some texts, for the training ...")
        _, labelled = sample_labels(self.config.distill, self.target, Random(0).sample(texts, len(texts)))
        num_tokens, num_positions = count(texts)
        return Labels(examples=labelled, tokens_per_text=num_tokens / len(texts), positions_per_text=num_positions / len(texts))

    def _train_drafter(self, run: DrafterRun, steps_done: int, labels: Labels) -> int:
        """Plan one training. Returns the bytes of the drafter."""
        # 1. The steps that are left.
        target, options = self.target, with_accumulation(run.train, self.accelerator.num_processes)
        name = f"train {run.drafter_dir.parent.name}" if self.config.variants else "train"
        self._say(f"{name}: a fresh {run.drafter.kind} is trained on parts of some texts ...")
        sample = sample_training(
            options,
            run.drafter,
            target,
            labels.examples,
            self.accelerator,
            tokens_per_text=labels.tokens_per_text,
            positions_per_text=labels.positions_per_text,
        )
        num_steps = options.steps - steps_done
        num_texts = options.batch_size * options.gradient_accumulation * self.accelerator.num_processes
        seconds, lines = num_steps * sample.seconds_per_step, list[str]()
        # 2. Measurements on held-out texts: plain decoding answers the prompts once, the drafter each time.
        if options.validation_texts:
            decoding = self._validation(options.batch_size, options.validation_tokens, labels)
            times = math.ceil(options.steps / (options.validate_every or options.steps)) + 1
            num_batches = math.ceil(options.validation_texts / self.num_workers / options.batch_size)
            validation = times * num_batches * decoding.batch_seconds(options.validation_tokens)
            lines.append(f"validation: {format_seconds(validation)}, at the speed of plain decoding")
            seconds += validation
        # 3. Memory and disk, from shapes.
        drafter_bytes, num_tokens = sample.num_parameters * FLOAT_BYTES, num_texts * labels.tokens_per_text
        state_bytes = STATE_COPIES * drafter_bytes
        logits = min(
            max_chunk(target.device),
            math.ceil(options.batch_size * labels.positions_per_text) * self.config.distill.horizon * target.vocab_size,
        )
        num_copies = CHECKPOINT_COPIES * (options.keep_checkpoints + 1) + 2  # one more checkpoint while it is written
        self._add(
            StagePlan(
                name=name,
                seconds=seconds,
                num_bytes=drafter_bytes * num_copies,
                lines=[
                    f"{run.drafter.kind} of {sample.num_parameters:,} parameters",
                    f"{num_steps:,} steps of {sample.seconds_per_step:.3g} s, {num_texts:,} texts and {num_tokens:,.0f} tokens",
                    *lines,
                    f"memory: {format_size(target.weight_bytes)} target, {format_size(state_bytes)} drafter with AdamW,",
                    f"  at most {format_size(logits * FLOAT_BYTES)} a tensor of logits; activations come on top",
                ],
            )
        )
        return drafter_bytes

    def _validation(self, batch_size: int, num_tokens: int, labels: Labels) -> PlainDecoding:
        prompts = []
        for example in labels.examples[:batch_size]:
            wanted = example.example.wanted.nonzero()
            prompts.append(example.example.input_ids[: int(wanted[0]) + 1 if len(wanted) else None])
        return sample_decoding(self.target, prompts, num_tokens)

    def _eval(self, suites: Sequence[PromptSet]) -> None:
        """Plan the evaluation from the times and the lengths of some plain answers."""
        config, target = self.config.eval, self.target
        if not any(stage.name.startswith("train") for stage in self.stages) and (self.folder / "eval" / SUMMARY_FILE).is_file():
            self._print_finished("eval")
            return
        # 1. Time plain decoding at each batch size.
        self._say("eval: plain decoding answers some prompts ...")
        texts = [prompt.turns[0] for suite in suites for prompt in Random(0).sample(suite.prompts, len(suite.prompts))]
        prompts = [
            encode_prompt([Turn(role="user", content=text)], target.tokenizer)[0] for text in texts[: 4 * SAMPLED_PROMPTS]
        ]
        with cpu_threads(config.num_threads):
            target.choose_linears()
            sample = sample_decoding(target, prompts[:SAMPLED_PROMPTS], config.max_new_tokens).answers
            length = sample.mean_tokens(config.max_new_tokens)
            by_size = {size: sample_decoding(target, prompts[:size], config.max_new_tokens) for size in config.batch_sizes}
        # 2. Each method answers all turns. Some prompts are answered once more, with phases timed.
        num_drafted = self._num_drafted()
        plain_methods = len(config.temperatures) * (1 + num_drafted / DRAFTED_SPEEDUP)
        num_turns = sum(len(prompt.turns) for suite in suites for prompt in suite.prompts)
        profiled = sum(
            math.ceil(config.profile_prompts) * sum(len(prompt.turns) for prompt in suite.prompts) / len(suite.prompts)
            for suite in suites
        )
        seconds = sum(
            (num_turns * config.repeats + profiled) / size * plain_methods * timed.batch_seconds(length)
            for size, timed in by_size.items()
        )
        speeds = ", ".join(
            f"{size * length / timed.batch_seconds(length):,.3g} tokens a second in batches of {size}"
            for size, timed in by_size.items()
        )
        num_answers = num_turns * config.repeats * len(config.temperatures) * len(config.batch_sizes) * (1 + num_drafted)
        self._add(
            StagePlan(
                name="eval",
                seconds=seconds,
                lines=[
                    f"{num_answers:,} answers by {1 + num_drafted} methods, of about {length:,.0f} tokens",
                    f"plain decoding: {speeds}",
                    f"drafts are assumed to make it {DRAFTED_SPEEDUP:g}x as fast",
                ],
            )
        )

    def _num_drafted(self) -> int:
        """Count the methods of the evaluation without plain decoding."""
        config, runs = self.config.eval, self.config.drafter_runs()
        merged = len(runs) * bool(config.merge)
        num_drafted = len(config.baselines) + sum(len(run.settings) for run in runs) + merged
        return num_drafted + (len(config.baselines) + len(runs) + merged if config.decode == BOTH else 0)

    def _export(self, drafter_bytes: Mapping[Path, int]) -> None:
        num_bytes = sum(
            (drafter_bytes.get(run.drafter_dir) or file_bytes(run.drafter_dir / WEIGHTS_FILE))
            * (1 + sum(holds_kind(name, run.drafter.kind) for name in self.config.export.formats))
            for run in self.config.drafter_runs()
        )
        self._add(StagePlan(name="export", num_bytes=num_bytes))

    # --- the terminal

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def _print_finished(self, name: str) -> None:
        self._say(f"{name}: finished in {self.folder}")

    def _add(self, stage: StagePlan) -> None:
        """Keep the estimate of a stage, and print it."""
        self.stages.append(stage)
        disk = f", {format_size(stage.num_bytes)} on disk" if stage.num_bytes else ""
        self.console.print(f"[bold]{stage.name}: {format_time(stage.seconds)}{disk}[/]")
        for line in stage.lines:
            self._say(f"  {line}")

    def _print_whole(self) -> None:
        if self.load > BUSY * (os.cpu_count() or 1):
            self._say(
                f"Other programs were running (load {self.load:.1f} on {os.cpu_count()} cores): on a CPU the real times may be "
                "several times longer or shorter. Plan again when the machine is idle."
            )
        needed, free = sum(stage.num_bytes for stage in self.stages), free_bytes(self.folder)
        seconds = sum(stage.seconds for stage in self.stages)
        short = " [bold red]NOT ENOUGH[/]" if needed > free else ""
        self.console.print(
            f"[bold]Whole run: {format_time(seconds)}, {format_size(needed)} on disk[/] ({format_size(free)} are free){short}",
            soft_wrap=True,
        )
        if seconds > LONG_SECONDS:
            self._say(
                "For a first try of some minutes, add: data.limit=50 train.steps=20 train.warmup_steps=0 output_dir=outputs/try"
            )


def share(num_items: int, shard_items: int, num_workers: int) -> float:
    """Return the share of the work of the process with the most shards, which ends last."""
    num_shards = math.ceil(num_items / shard_items)
    return math.ceil(num_shards / num_workers) / num_shards


def count(texts: Sequence[Example]) -> tuple[int, int]:
    """Count tokens, and positions that get labels."""
    return sum(len(text.input_ids) for text in texts), sum(int(text.wanted.sum()) for text in texts)


def file_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def format_time(seconds: float) -> str:
    """Format an estimated time, such as `about 1:02:03`."""
    return f"about {timedelta(seconds=round(seconds))}"


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_time(seconds)


def format_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
