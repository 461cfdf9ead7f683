"""`outrider forecast`: what training a recipe's drafters is worth, before it is paid for.

Nothing here measures, trains or labels by itself: it calls the stages on a small part of the recipe, and
continues their curve.
"""

import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from tqdm import tqdm

from ..data.config import SELF, DataConfig
from ..data.files import locked, write_json
from ..data.shards import label_store, read_shard, write_shard
from ..data.types import DistilledExample
from ..eval.forecast.measure import (
    PACED_SHARE,
    Certainty,
    ForecastPrompt,
    Steps,
    StepSeconds,
    decode,
    draw_prompts,
    in_turns,
    is_too_long,
    pass_seconds,
    plain_answers,
    step_seconds,
)
from ..eval.forecast.result import Measured, MethodKey, foresee
from ..eval.measure.environment import within_memory
from ..eval.measure.methods import MethodSpec, Settings, acceptance_rule, method_specs, proposer
from ..eval.measure.plan import require_room
from ..eval.records.names import PLAIN_DECODING
from ..eval.run import load_suites
from ..models.decoding.protocols import AcceptanceRule, Drafter
from ..models.drafters import NullDrafter, load_drafter
from ..models.drafters.saved.loading import trained_parts
from ..models.drafters.saved.parts import DrafterParts
from ..models.llm.hf_target import HFTarget
from ..train.config import TrainConfig
from ..train.processes import make_accelerator
from ..train.run import train
from .config import RunConfig
from .errors import starts_again
from .forecast_page import MULTIPLES, print_forecast, record_of
from .plan import Planner
from .run import distil, load_checked_target, prepare, prompt_overlap

log = logging.getLogger(__name__)

FOLDER, FILE = "forecast", "forecast.json"
SIZES = (0.25, 0.5, 1.0)
"""Parts of the labelled sample from which the short trainings learn."""
LABELLING = ("questions", "answers", "labels")
"""Stages of the plan that make labels."""
LABELS_SHARE, TRAINING_SHARE, STEPS_SHARE, PASSES_SHARE = 0.35, 0.35, 0.27, 0.03
"""Parts of the time after the plan for labels and short trainings; and parts of the rest for steps and passes."""
LEAST_LABELS, LEAST_STEPS = 2_000, 16
"""Of the sample, and of the training on its smallest part."""
SMALLER_STEPS = 4
"""Times as many texts in a step of the recipe as in one of a short training, where its batches are so large."""
BATCH_SIZES = (1, 4, 16)
LEAST_PROMPTS, MOST_PROMPTS, MOST_TOKENS, DECODED_TOGETHER = 4, 64, 128, 8
"""Prompts that are decoded, tokens of their answers, and prompts of a batch."""
MOST_SHARDS, READ_SHARDS = 4, 16
"""Shards that a part is written to, and shards that the texts are drawn from."""


def forecast(config: RunConfig, minutes: float) -> None:
    """Measure for about `minutes`, and print the forecast of a recipe. Raises ValueError if it couldn't be trusted."""
    # 1. The plan of the recipe: its hours, memory and disk.
    ends = time.monotonic() + 60 * minutes
    accelerator = make_accelerator(config.mixed_precision)
    if accelerator.num_processes > 1:
        raise ValueError("outrider forecast measures in one process; start it without `accelerate launch`")
    config = replace(config, stages=["distill", "train"])
    prepare(config, accelerator, plan=True)
    suites = load_suites(config.eval)
    target, context_length = load_checked_target(config, accelerator)
    require_room(config.eval, suites, target.tokenizer, context_length)
    prompts = draw_prompts(suites, target, context_length - config.eval.max_new_tokens, MOST_PROMPTS, seed=config.seed)
    if len(prompts) < LEAST_PROMPTS:
        raise ValueError(
            f"eval.suites has {len(prompts)} prompt(s), and a forecast from fewer than {LEAST_PROMPTS} can't be trusted; raise "
            "the limit of a suite, or add one"
        )
    with TemporaryDirectory() as scratch:
        planner = Planner(config, target, Path(config.output_dir), accelerator, Path(scratch))
        planner.print(prompt_overlap(config), None)
    folder = Path(config.output_dir) / FOLDER
    with locked(folder), starts_again("forecast"):
        remove_folders(folder)  # of an interrupted forecast
        # 2. Labels of a few texts, and drafters that learn from parts of them.
        sample = plan_sample(config, planner, seconds=ends - time.monotonic(), minutes=minutes)
        labels = label_sample(config, sample, target, folder / "labels", accelerator)
        texts = draw_texts(labels, sample, config.seed)
        trained = [train_part(config, part, sample, labels, texts, target, folder, accelerator) for part in SIZES]
        # 3. What they and plain decoding do with the evaluation's prompts.
        measured = measure(config, trained, target, prompts, seconds=ends - time.monotonic())
        # 4. Their curves, continued.
        total_labels = label_store(labels).load().num_labels / (1.0 if sample.is_labelled else sample.share)
        forecasts = foresee(measured, total_labels, MULTIPLES, seed=config.seed)
        left = {
            multiple: multiple * sum(planner.seconds.values()) for multiple in ((1.0,) if sample.is_labelled else MULTIPLES)
        }
        print_forecast(config.eval, measured, forecasts, total_labels, left, Console())
        write_json(folder / FILE, record_of(measured, forecasts, total_labels, planner))
        remove_folders(folder)


def remove_folders(folder: Path) -> None:
    """Remove the folders of labels and short trainings, if there are any."""
    for part in [part for part in folder.iterdir() if part.is_dir()]:
        shutil.rmtree(part)


# --- the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The texts that the short trainings learn from, and those of the whole recipe."""

    num_texts: int
    of_texts: int
    is_labelled: bool
    """Whether the recipe's own labels are there."""

    @property
    def share(self) -> float:
        return self.num_texts / self.of_texts


def plan_sample(config: RunConfig, planner: Planner, *, seconds: float, minutes: float) -> Sample:
    """Choose how many texts are labelled and learned from in the time that the plan has left.

    Raises ValueError if they were too few for a forecast.
    """
    texts, cost = planner.texts, planner.seconds
    if texts is None:
        raise ValueError(f"the drafters in {config.output_dir} are trained already; evaluate them: stages=[eval]")
    # 1. The sample that fits the time.
    label_seconds = sum(cost.get(stage, 0.0) for stage in LABELLING) / max(1, texts.num_missing)
    train_seconds = sum(cost[name] for name in cost if name not in LABELLING) / texts.num_texts * sum(SIZES)
    by_time = [seconds * TRAINING_SHARE / train_seconds]
    by_time += [seconds * LABELS_SHARE / label_seconds] if label_seconds else []
    num_texts = min(texts.num_texts, math.floor(min(by_time)))
    # 2. Whether it is enough.
    steps = min(short_training(run.train, 1.0).steps for run in config.drafter_runs()) * SIZES[0] / texts.num_texts
    needed = math.ceil(max(LEAST_LABELS / texts.positions_per_text, LEAST_STEPS / steps))
    if num_texts < needed:
        if needed > texts.num_texts:
            raise ValueError(
                f"the recipe has {texts.num_texts} texts, too few (or train.steps) for a forecast from parts of them, which "
                f"takes {needed}; run it"
            )
        longer = math.ceil(minutes * 1.2 * needed / max(1, num_texts))
        raise ValueError(
            f"minutes is {minutes:g}, in which {max(0, num_texts)} texts can be labelled and learned from; a forecast from "
            f"fewer than {needed} can't be trusted. Set --minutes {longer}"
        )
    of_texts = texts.num_texts
    if not label_seconds:
        manifest = label_store(Path(config.output_dir) / "distill").load()
        of_texts = sum(len(entry.ids) for entry in manifest.shards)
    return Sample(num_texts=min(num_texts, of_texts), of_texts=of_texts, is_labelled=not label_seconds)


def data_of_sample(data: DataConfig, sample: Sample) -> DataConfig:
    """Return the options of the sample's texts, which a seed draws from the recipe's."""
    share = sample.share
    if data.source == SELF:
        assert data.count is not None  # DataSource has checked it
        return replace(data, count=math.ceil(data.count * share))
    sources = [
        source if source.count is None else replace(source, count=math.ceil(source.count * sample.share))
        for source in data.sources
    ]
    return replace(data, sources=sources, limit=sample.num_texts)


def label_sample(config: RunConfig, sample: Sample, target: HFTarget, folder: Path, accelerator: Accelerator) -> Path:
    """Label the sample, unless the recipe's own labels are there. Returns the folder of the labels."""
    if sample.is_labelled:
        return Path(config.output_dir) / "distill"
    options = replace(config, data=data_of_sample(config.data, sample))
    distil(options, target, folder, accelerator)
    return folder / "distill"


def draw_texts(labels: Path, sample: Sample, seed: int) -> list[DistilledExample]:
    """Draw the sample's texts, in random order, from several shards: those of different sources may stand in different ones."""
    random, manifest, texts = Random(seed), label_store(labels).load(), list[DistilledExample]()
    chosen = random.sample(manifest.shards, min(len(manifest.shards), READ_SHARDS))
    for entry in chosen:
        read = read_shard(labels, entry)
        texts += random.sample(read, min(len(read), math.ceil(sample.num_texts / len(chosen))))
    return random.sample(texts, min(len(texts), sample.num_texts))


def train_part(
    config: RunConfig,
    part: float,
    sample: Sample,
    labels: Path,
    texts: Sequence[DistilledExample],
    target: HFTarget,
    folder: Path,
    accelerator: Accelerator,
) -> "Part":
    """Train each drafter on the first part of the texts, for as many epochs as the recipe. Returns their folders."""
    # 1. Shards of these texts.
    examples = list(texts[: max(1, round(len(texts) * part))])
    shards = folder / f"{len(examples)}_texts"
    shards.mkdir(parents=True, exist_ok=True)
    size = math.ceil(len(examples) / MOST_SHARDS)
    starts = range(0, len(examples), size)
    entries = [write_shard(shards, index, examples[start : start + size]) for index, start in enumerate(starts)]
    label_store(shards).save(replace(label_store(labels).load(), shards=entries))
    # 2. The trainings.
    share, drafters = len(examples) / sample.of_texts, dict[Path | DrafterParts, Sequence[dict[str, Any]]]()
    for run in config.drafter_runs():
        options = short_training(run.train, share)
        place = shards / run.drafter_dir.parent.name if config.variants else shards
        train(options, run.drafter, target, shards, place / "train", place / "drafter", accelerator)
        drafters[place / "drafter"] = run.settings
    return Part(num_labels=sum(entry.num_labels for entry in entries), drafters=drafters)


def short_training(config: TrainConfig, share: float) -> TrainConfig:
    """Return the options of a training on a share of the recipe's texts, for as many epochs.

    Few texts are learned in smaller steps, and so in more of them: a few large ones would only warm up, and tell
    nothing of the recipe's many.
    """
    batch_size = max(1, config.batch_size // SMALLER_STEPS)
    smaller = config.batch_size / batch_size
    steps = max(1, round(config.steps * share * smaller))
    return replace(
        config,
        steps=steps,
        batch_size=batch_size,
        max_positions=None if config.max_positions is None else max(1, round(config.max_positions / smaller)),
        warmup_steps=min(round(config.warmup_steps * share * smaller), steps - 1),
        validation_texts=0,
        validate_every=None,
        patience=None,
        checkpoint_every=steps,
        tracker="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the sample, and the drafters that learned from it: their settings by folder."""

    num_labels: int
    drafters: Settings


# --- measurements


def measure(
    config: RunConfig, parts: Sequence[Part], target: HFTarget, prompts: Sequence[ForecastPrompt], *, seconds: float
) -> Measured:
    """Decode the prompts with each drafter of each part, in the time that is left, and time some steps."""
    # 1. The methods, by name: drafters without training, and each drafter of each part in each setting.
    temperatures = config.eval.temperatures
    specs = [method_specs(config.eval, list(part.drafters), part.drafters) for part in parts]
    is_trained = {spec.label: bool(spec.parts.folders) for spec in specs[-1].values()}
    paced = {spec.label for spec in specs[-1].values() if spec.parts.is_merged(spec.setting or {})}
    # 2. Text and tokens per step: all drafters answer a few prompts, and some more while there is time.
    target.choose_linears()
    tokens = min(config.eval.max_new_tokens, MOST_TOKENS)
    decoding_ends = time.monotonic() + (1 - STEPS_SHARE - PASSES_SHARE) * seconds
    decoding: dict[str, Any] = {"max_new_tokens": tokens, "batch_size": DECODED_TOGETHER}
    rules = {temperature: acceptance_rule(config.eval.acceptance, temperature, target) for temperature in temperatures}
    certainty: dict[float, list[Certainty]] = {temperature: [] for temperature in temperatures}
    plain: dict[MethodKey, list[Steps]] = {(label, temperature): [] for label in paced for temperature in temperatures}
    steps: dict[MethodKey, list[list[Steps]]] = {
        (label, temperature): [[] for _ in (parts if trained else parts[:1])]
        for label, trained in is_trained.items()
        for temperature in temperatures
    }
    answered, round_seconds = 0, 0.0
    while answered < len(prompts) and (not answered or time.monotonic() + round_seconds < decoding_ends):
        began, batch = time.monotonic(), prompts[answered : answered + DECODED_TOGETHER]
        for temperature, rule in rules.items():
            certainty[temperature] += plain_answers(target, rule, batch, **decoding)
        plain_seconds = (time.monotonic() - began) * len(batch)  # of one prompt after another
        if not answered and is_too_long(steps, paced, is_trained, plain_seconds, decoding_ends):
            specs = [{name: spec for name, spec in part.items() if spec.label not in paced} for part in specs]
            steps, paced = {key: counts for key, counts in steps.items() if key[0] not in paced}, set()
        if not answered:  # as many prompts as there is time for, but enough to tell something
            rounds = sum(len(counts) * (len(batch) if key[0] in paced else 1) for key, counts in steps.items())
            needed = rounds * PACED_SHARE * plain_seconds / len(batch) / len(temperatures)
            batch = batch[: max(LEAST_PROMPTS, math.floor(len(batch) * (decoding_ends - time.monotonic()) / needed))]
            certainty = {temperature: answers[: len(batch)] for temperature, answers in certainty.items()}
        name = f"prompts {answered + 1} to {answered + len(batch)}, all drafters"
        asked = [(n, spec) for n, part in enumerate(specs) for spec in part.values() if n == 0 or is_trained[spec.label]]
        with tqdm(total=len(batch) * sum(map(len, steps.values())), desc=name, unit="answer") as progress:
            for number, spec in asked:
                loaded = load_drafter(spec.parts, target, **(spec.setting or {}))
                drafter: Drafter[Any, Any] = loaded
                if spec.label in paced:
                    target.choose_linears(*trained_parts(loaded))
                    drafter = proposer(loaded, target)
                    in_turns(target, drafter, rules[temperatures[0]], batch[:1], max_new_tokens=tokens)  # it learns seconds
                is_timed = number == len(specs) - 1 or not is_trained[spec.label]
                for temperature, rule in rules.items():
                    key, how = (spec.label, temperature), {**decoding, "done": progress.update}
                    if spec.label in paced:
                        without, counts = in_turns(target, drafter, rule, batch, is_timed=is_timed, **how)
                        plain[key] += without
                    else:
                        counts = decode(target, drafter, rule, batch, **how)
                    steps[key][number] += counts
        answered, round_seconds = answered + len(batch), time.monotonic() - began
    # 3. Seconds of a step.
    even = [spec for spec in specs[-1].values() if spec.label not in paced]
    sizes = sorted({*BATCH_SIZES, *config.eval.batch_sizes})
    options = {"max_new_tokens": tokens, "uneven": [spec.label for spec in even if not is_trained[spec.label]]}
    passes = within_memory(partial(pass_seconds, target, seconds=PASSES_SHARE * seconds), target)
    timed = time_steps(even, target, rules[temperatures[0]], prompts, sizes, seconds=STEPS_SHARE * seconds, **options)
    target.release_cache()
    return Measured(
        prompts=prompts[:answered],
        num_labels=[part.num_labels for part in parts],
        steps=steps,
        certainty=certainty,
        seconds=timed,
        plain=plain,
        passes=passes or {},
        max_new_tokens=config.eval.max_new_tokens,
        num_decoded=tokens,
    )


def time_steps(
    specs: Sequence[MethodSpec],
    target: HFTarget,
    rule: AcceptanceRule,
    prompts: Sequence[ForecastPrompt],
    sizes: Sequence[int],
    *,
    seconds: float,
    **options: Any,
) -> dict[int, dict[str, StepSeconds]]:
    """Time steps of plain decoding and of each method, by batch size, as far as time and memory are enough."""
    drafters = {spec.label: load_drafter(spec.parts, target, **(spec.setting or {})) for spec in specs}
    target.choose_linears(*(part for drafter in drafters.values() for part in trained_parts(drafter)))
    proposers = {PLAIN_DECODING: NullDrafter(), **{label: proposer(drafter, target) for label, drafter in drafters.items()}}
    timed, ends = dict[int, dict[str, StepSeconds]](), time.monotonic() + seconds
    for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
        began = time.monotonic()
        step = partial(step_seconds, target, proposers, rule, prompts, batch_size=size, **options)
        if (seconds_of_size := within_memory(step, target)) is None:
            if not timed:
                raise ValueError(f"batches of {size} run out of memory; load the target in a narrower type (target.dtype)")
            log.warning("steps of batches of %d run out of memory, and aren't timed", size)
            break
        timed[size] = seconds_of_size
        now = time.monotonic()
        if larger is not None and now + (now - began) * larger / size > ends:
            log.warning("steps of batches above %d would take longer than the time that is left; raise --minutes", size)
            break
    return timed
