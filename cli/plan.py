"""`--plan`: time, memory and disk of the unfinished stages, without writing files.

Each stage runs its own step for some seconds (see `samples`), and prints its estimate at once. Work
is counted; sizes of memory and disk follow from shapes.
"""

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
from accelerate import Accelerator
from rich.console import Console

from ..data.collate import text_continuations
from ..data.config import SELF, DataConfig
from ..data.conversations import Conversation
from ..data.manifest import MANIFEST_FILE
from ..data.shards import label_store
from ..data.sources import PromptOverlap
from ..data.suites import PromptSet
from ..data.types import DistilledExample, Example
from ..distill.label.continuations import require_labels
from ..distill.label.features import bytes_per_token, free_bytes
from ..distill.label.run import load_examples, missing_examples
from ..distill.regenerate.engines.registry import tried_rows
from ..distill.regenerate.run import answer_limits, count_turns, load_questions, missing_conversations
from ..distill.regenerate.self_written import sample_conversations
from ..eval.config import BOTH
from ..eval.measure.plan import first_turn_ids
from ..eval.records.names import SUMMARY_FILE
from ..models.drafters.scoring import max_chunk
from ..models.llm.hf_target import HFTarget
from ..models.llm.tensor_parallel import Worker
from ..train.checkpoint import latest_checkpoint, step_of
from ..train.config import with_accumulation
from ..train.parallel import describe_launch
from ..train.results import CHECKPOINTS_DIR, describe_run, is_trained
from .config import DrafterRun, RunConfig
from .init import FIRST_TRY
from .samples import batch_seconds, mean_tokens, sample_decoding, sample_labels, sample_training

BUSY = 0.5
"""Load of the machine per core, before anything is measured, above which the times are called rough."""
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
class PlannedTexts:
    """The texts of a run: some of them with labels, and the means of all."""

    labelled: Sequence[DistilledExample]
    num_texts: int
    num_missing: int
    """Texts without labels."""
    tokens_per_text: float
    positions_per_text: float


class Planner:
    """The plan of one run. All processes measure; the first one prints."""

    def __init__(self, config: RunConfig, target: HFTarget, folder: Path, accelerator: Accelerator, scratch: Path) -> None:
        self.config, self.target, self.folder, self.accelerator, self.scratch = config, target, folder, accelerator, scratch
        self.num_workers = Worker.of(accelerator, tensor_parallel=target.tensor_parallel).num_workers
        self.seconds, self.num_bytes = defaultdict[str, float](float), 0
        """Seconds of each stage, and bytes of all."""
        self.texts: PlannedTexts | None = None
        self.console = Console(highlight=False, quiet=not accelerator.is_main_process)

    def print(self, overlap: PromptOverlap | None, suites: Sequence[PromptSet] | None) -> None:
        """Measure and print each stage, and last the whole run.

        `suites` is None if the evaluation's prompts can't be read: then the evaluation isn't planned.
        """
        stages, load = self.config.stages, os.getloadavg()[0]
        self._say(f"Each stage runs for some seconds, with {torch.get_num_threads()} CPU thread(s) per process.")
        trainings = self._unfinished_trainings() if "train" in stages else []
        is_labelled = self._is_labelled()
        if "distill" in stages and is_labelled:
            self._say(f"distill: finished in {self.folder}")
        if trainings or ("distill" in stages and not is_labelled):
            self.texts = texts = self._labels(overlap, only_sample="distill" not in stages or is_labelled)
            for run, steps_done in trainings:
                self._training(run, steps_done, texts)
        if "train" in stages and not trainings:
            self._say(f"train: finished in {self.folder}")
        if "eval" in stages and suites is not None and self.accelerator.is_main_process:
            if trainings or not (self.folder / "eval" / SUMMARY_FILE).is_file():
                self._evaluation(suites)
            else:
                self._say(f"eval: finished in {self.folder}")
        self._whole(load)
        self.accelerator.wait_for_everyone()

    # --- the stages

    def _labels(self, overlap: PromptOverlap | None, *, only_sample: bool) -> PlannedTexts:
        """Plan the answers and labels that are missing. Labels parts of some texts for the training, too."""
        # 1. The texts. Regenerated ones have the prompts of the data, and answers of a sampled length.
        options, target = self.config.distill, self.target
        data = self._questions(only_sample=only_sample)
        texts, _ = load_examples(data, target, overlap, unanswered=options.engine is not None)
        num_tokens, num_positions = count(texts)
        missing, is_regenerated = texts, options.engine is not None
        if is_regenerated:
            conversations, _ = load_questions(data, target, overlap)
            answers = count_turns(conversations) * self._answer_tokens(conversations, texts, data, only_sample=only_sample)
            num_tokens, num_positions = round(num_tokens - num_positions + answers), round(answers)
        elif not only_sample:  # raises ValueError if the folder is another run's
            missing = missing_examples(options, data, target, texts, self.folder / "distill")
        longest = max(len(text.input_ids) for text in texts)
        if is_regenerated:
            longest = min(longest, answer_limits(options, data, target).max_tokens)
        require_labels(target, longest, options.horizon, branches=options.decodes_branches)
        self.accelerator.wait_for_everyone()
        # 2. Label parts of some.
        self._say("labels: the target labels parts of some texts ...")
        with target.packed_where_faster():
            work, labelled = sample_labels(options, target, Random(0).sample(texts, len(texts)))
        per_position = work.num_branch_tokens / max(1, work.num_positions)
        if options.is_greedy:  # the target's own greedy answers are their own labels, without further passes
            per_position = 0.0
            for number, one in enumerate(labelled):
                labels = text_continuations(one.example.input_ids, one.example.loss_mask, options.horizon)
                labelled[number] = replace(one, continuations=labels)
        seconds_per_read = work.seconds / (work.num_text_tokens + work.num_branch_tokens)
        num_read = num_tokens + num_positions * per_position
        sample = PlannedTexts(
            labelled=labelled,
            num_texts=len(texts),
            num_missing=len(missing),
            tokens_per_text=num_tokens / len(texts),
            positions_per_text=num_positions / len(texts),
        )
        if only_sample:
            return sample
        # 3. Scale up to the texts without labels.
        rest, num_shards = len(missing) / len(texts), math.ceil(len(missing) / options.shard_examples)
        share = math.ceil(num_shards / self.num_workers) / num_shards  # of the process with the most shards
        per_token = bytes_per_token(options, target.hidden_size, labelled=num_positions / num_tokens)
        self._add(
            "labels",
            seconds=num_read * seconds_per_read * rest * share,
            num_bytes=int(num_tokens * rest * per_token),
            lines=[
                f"{len(missing):,} texts of about {num_tokens * rest:,.0f} tokens, {num_positions * rest:,.0f} with a label",
                f"the target agrees with {100 * work.agreement:.0f} % of the text",
                f"it reads {num_read / num_tokens:.2f} tokens for each token of text, {1 / seconds_per_read:,.0f} a second",
            ],
        )
        return sample

    def _questions(self, *, only_sample: bool) -> DataConfig:
        """Plan the conversations that the target begins. Returns the data with a sample of them."""
        config = self.config
        if any(source.source == SELF for source in config.data.all_sources):
            self._say("questions: the target begins some conversations ...")
        data, planned = sample_conversations(config.distill, config.data, self.target, self.folder / "questions", self.scratch)
        for one in planned if not only_sample else ():
            kept = f"{one.num_kept} of {one.num_sampled} that were tried can be used"
            seconds = one.seconds / self.num_workers
            self._add("questions", seconds=seconds, lines=[f"{one.num_missing:,} conversations that the target begins; {kept}"])
        return data

    def _answer_tokens(
        self, conversations: Sequence[Conversation], texts: Sequence[Example], data: DataConfig, *, only_sample: bool
    ) -> float:
        """Plan the answers that are missing. Returns the mean length of an answer."""
        options = self.config.distill
        missing = missing_conversations(options, data, self.target, list(conversations), self.folder / "answers")
        limit = min(options.max_new_tokens, data.max_length)
        longest = max(len(prompt_of(text)) for text in texts) + limit + 1
        size = tried_rows(options, self.target, longest)
        self._say("answers: the target answers some prompts by plain decoding ...")
        self.target.choose_linears()
        decoded = sample_decoding(self.target, [prompt_of(text) for text in texts[:size]], limit)
        self.target.plain_linears()
        mean = mean_tokens(decoded, limit)
        if missing and not only_sample:
            # A batch ends with its longest answer.
            num_batches = math.ceil(count_turns(missing) / size / self.num_workers)
            self._add(
                "answers",
                seconds=num_batches * batch_seconds(decoded, float(min(limit, 2 * mean))),
                lines=[f"{count_turns(missing):,} answers of about {mean:,.0f} tokens, in batches of {size}"],
            )
        return mean

    def _is_labelled(self) -> bool:
        shards = self.folder / "distill"
        return (shards / MANIFEST_FILE).is_file() and label_store(shards).load().complete

    def _unfinished_trainings(self) -> list[tuple[DrafterRun, int]]:
        """Return the unfinished trainings, each with the steps of its last checkpoint."""
        unfinished = []
        manifest = label_store(self.folder / "distill").load() if self._is_labelled() else None
        for run in self.config.drafter_runs():
            steps_done = 0
            if manifest is not None:
                options = with_accumulation(run.train, self.accelerator.num_processes)
                described = describe_run(options, run.drafter, manifest, describe_launch(self.accelerator))
                if is_trained(options, described, run.train_dir, run.drafter_dir):
                    continue
                checkpoint = latest_checkpoint(run.train_dir / CHECKPOINTS_DIR)
                steps_done = 0 if checkpoint is None else step_of(checkpoint)
            unfinished.append((run, steps_done))
        return unfinished

    def _training(self, run: DrafterRun, steps_done: int, texts: PlannedTexts) -> None:
        # 1. The steps that are left.
        target, options = self.target, with_accumulation(run.train, self.accelerator.num_processes)
        name = self.name_of(run)
        self._say(f"{name}: a fresh {run.drafter.kind} learns from these labels ...")
        means = {"tokens_per_text": texts.tokens_per_text, "positions_per_text": texts.positions_per_text}
        seconds_per_step, num_parameters = sample_training(
            options, run.drafter, target, texts.labelled, self.accelerator, **means
        )
        num_steps = options.steps - steps_done
        num_texts = options.batch_size * options.gradient_accumulation * self.accelerator.num_processes
        seconds, lines, num_tokens = num_steps * seconds_per_step, list[str](), num_texts * texts.tokens_per_text
        # 2. Measurements on held-out texts: plain decoding answers them once, the drafter each time.
        if options.validation_texts:
            prompts = [prompt_of(example.example) for example in texts.labelled[: options.batch_size]]
            decoded = sample_decoding(target, prompts, options.validation_tokens)
            times = math.ceil(options.steps / (options.validate_every or options.steps)) + 1
            num_batches = math.ceil(options.validation_texts / self.num_workers / options.batch_size)
            validation = times * num_batches * batch_seconds(decoded, float(options.validation_tokens))
            lines.append(f"validation: {format_time(validation)}, at the speed of plain decoding")
            seconds += validation
        # 3. Memory and disk, from shapes.
        drafter_bytes = num_parameters * FLOAT_BYTES
        num_labels = math.ceil(options.batch_size * texts.positions_per_text) * self.config.distill.horizon
        logits = FLOAT_BYTES * min(max_chunk(target.device), num_labels * target.vocab_size)
        sizes = {"target": target.weight_bytes, "drafter and AdamW": STATE_COPIES * drafter_bytes, "a tensor of logits": logits}
        memory = [f"{what} {format_size(num_bytes)}" for what, num_bytes in sizes.items()]
        num_copies = CHECKPOINT_COPIES * (options.keep_checkpoints + 1) + 2  # one more checkpoint while it is written
        self._add(
            name,
            seconds=seconds,
            num_bytes=drafter_bytes * num_copies,
            lines=[
                f"{run.drafter.kind} of {num_parameters:,} parameters",
                f"{num_steps:,} steps of {seconds_per_step:.3g} s, {num_texts:,} texts and {num_tokens:,.0f} tokens",
                *lines,
                f"memory: {', '.join(memory)}; activations come on top",
            ],
        )

    def name_of(self, run: DrafterRun) -> str:
        """Return the name of a training."""
        return f"train {run.drafter_dir.parent.name}" if self.config.variants else "train"

    def _evaluation(self, suites: Sequence[PromptSet]) -> None:
        """Plan the evaluation from the times and the lengths of some plain answers."""
        # 1. Time plain decoding at each batch size.
        config, target = self.config.eval, self.target
        self._say("eval: plain decoding answers some prompts ...")
        shuffled = [prompt for suite in suites for prompt in Random(0).sample(suite.prompts, len(suite.prompts))]
        chosen = shuffled[: max(SAMPLED_PROMPTS, *config.batch_sizes)]
        prompts = [first_turn_ids(prompt, target.tokenizer)[0] for prompt in chosen]
        target.choose_linears()
        some = sample_decoding(target, prompts[:SAMPLED_PROMPTS], config.max_new_tokens)
        mean = mean_tokens(some, config.max_new_tokens)
        by_size = {size: sample_decoding(target, prompts[:size], config.max_new_tokens) for size in config.batch_sizes}
        # 2. Each method answers all turns. Some prompts are answered once more, with phases timed.
        num_drafted = self._num_drafted()
        methods = len(config.temperatures) * (1 + num_drafted / DRAFTED_SPEEDUP)
        turns = [sum(len(prompt.turns) for prompt in suite.prompts) for suite in suites]
        profiled = sum(
            number * config.profile_prompts / len(suite.prompts) for number, suite in zip(turns, suites, strict=True)
        )
        num_batched = sum(turns) * config.repeats + profiled
        seconds = sum(num_batched / size * methods * batch_seconds(decoded, mean) for size, decoded in by_size.items())
        speeds = [
            f"{size * mean / batch_seconds(decoded, mean):,.3g} in batches of {size}" for size, decoded in by_size.items()
        ]
        num_answers = sum(turns) * config.repeats * len(config.temperatures) * len(by_size) * (1 + num_drafted)
        self._add(
            "eval",
            seconds=seconds,
            lines=[
                f"{num_answers:,} answers by {1 + num_drafted} methods, of about {mean:,.0f} tokens",
                f"plain decoding, tokens a second: {', '.join(speeds)}",
                f"drafts are assumed to make it {DRAFTED_SPEEDUP:g}x as fast",
            ],
        )

    def _num_drafted(self) -> int:
        """Count the methods of the evaluation without plain decoding."""
        config, runs = self.config.eval, self.config.drafter_runs()
        merged = len(runs) * bool(config.merge)
        num_drafted = len(config.baselines) + sum(len(run.settings) for run in runs) + merged
        return num_drafted + (len(config.baselines) + len(runs) + merged if config.decode == BOTH else 0)

    # --- the terminal

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def _add(self, name: str, *, seconds: float, num_bytes: int = 0, lines: Sequence[str]) -> None:
        """Add a stage to the whole, and print it."""
        self.seconds[name] += seconds
        self.num_bytes += num_bytes
        disk = f", {format_size(num_bytes)} on disk" if num_bytes else ""
        self.console.print(f"[bold]{name}: {format_time(seconds)}{disk}[/]", soft_wrap=True)
        for line in lines:
            self._say(f"  {line}")

    def _whole(self, load: float) -> None:
        """Print the sums, and what makes them doubtful."""
        if load > BUSY * (os.cpu_count() or 1):
            self._say(
                f"Other programs were running (load {load:.1f} on {os.cpu_count()} cores): on a CPU the real times may be "
                "several times longer or shorter. Plan again when the machine is idle."
            )
        free = free_bytes(self.folder)
        short = " [bold red]NOT ENOUGH[/]" if self.num_bytes > free else ""
        sums = f"Whole run: {format_time(sum(self.seconds.values()))}, {format_size(self.num_bytes)} on disk"
        self.console.print(f"[bold]{sums}[/] ({format_size(free)} are free){short}", soft_wrap=True)
        if sum(self.seconds.values()) > LONG_SECONDS:
            self._say(f"For a first try of some minutes, add: {FIRST_TRY} output_dir=outputs/try")


def prompt_of(text: Example) -> torch.Tensor:
    """Return the tokens before the first answer, or the whole text if it has none."""
    wanted = text.wanted.nonzero()
    return text.input_ids[: int(wanted[0]) + 1] if len(wanted) else text.input_ids


def count(texts: Sequence[Example]) -> tuple[int, int]:
    """Count tokens, and positions that get labels."""
    return sum(len(text.input_ids) for text in texts), sum(int(text.wanted.sum()) for text in texts)


def format_time(seconds: float) -> str:
    """Format an estimated time, such as `about 1:02:03`."""
    return f"about {timedelta(seconds=round(seconds))}"


def format_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
