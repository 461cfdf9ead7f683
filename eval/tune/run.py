"""Tuning of a drafter to a machine.

The steps are answers, step times, predictions, the choice, and optionally a check of the choice.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ...data.chat import encode_prompt
from ...data.files import write_json
from ...data.types import Turn
from ...models.drafters import load_drafter
from ...models.drafters.base import TrainableDrafter
from ...models.drafters.saved.build import DrafterSpec
from ...models.drafters.saved.loading import LoadedDrafter, trained_parts
from ...models.drafters.saved.parts import DrafterParts, parse_drafter_name
from ...models.drafters.saved.tuned import Choice, describe_setup, read_tuned, save_tuned, tuned_choice, tuned_folder
from ...models.llm.hf_target import HFTarget
from ..config import EvalConfig
from ..measure.environment import describe_environment
from ..measure.memory import within_memory
from ..measure.methods import Drafters, TunedSettings, acceptance_rule
from ..run import cpu_threads, load_suites
from .grids import Grid, candidates, extended, grid_of, is_replayed, measured_settings
from .replay import Answered, answer_prompts
from .search import Prediction, Replay, Setting, Speed, Trial, choose, finalists, measure_all, predict, regret, replay_all
from .step_times import StepTimes, measure_step_times

logger = logging.getLogger(__name__)

TUNING_FILE = "tuning.json"


MAX_EXTENSIONS = 4
"""Number of times that a grid may grow at its edges. An option can reach 16 times its initial
range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A setting that ran out of memory in batches of a size; None is plain decoding."""

    setting: Setting
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Result of tuning."""

    choices: dict[int, Choice]
    """The fastest of the finalists, by batch size."""
    predictions: list[Prediction]
    finals: list[Speed]
    """Measured speeds of plain decoding and of the settings with the fastest predictions. The
    choice is one of them."""
    checked: list[Speed]
    """Measured speeds of every setting, after the choice; empty unless `check` is on."""
    regrets: dict[int, float]
    """Share of the best setting's speed that the choice lacks, by batch size, according to
    `checked`."""
    predicted_regrets: dict[int, float]
    """The same share for the setting with the fastest prediction."""
    step_times: StepTimes | None
    """None if nothing was predicted, since all settings were measured."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Settings that ran out of memory. A batch size has no choice if plain decoding ran out of
    memory."""

    def errors(self, batch_size: int) -> list[float]:
        """Compute the relative errors of the predicted speedups at a batch size."""
        predicted, measured = (_speedups(speeds, batch_size) for speeds in (self.predictions, self.checked))
        return [predicted[setting] / speedup - 1 for setting, speedup in measured.items()]


def _speedups(speeds: Sequence[Speed], batch_size: int) -> dict[str, float]:
    by_setting = {json.dumps(speed.setting): speed.tokens_per_second for speed in speeds if speed.batch_size == batch_size}
    plain = by_setting.pop(json.dumps(None))
    return {setting: speed / plain for setting, speed in by_setting.items()}


def tune(
    config: EvalConfig,
    target: HFTarget,
    name: Path | DrafterParts,
    output_dir: Path,
    *,
    settings: Sequence[dict[str, Any]] | None = None,
    batch_sizes: Sequence[int] = (1,),
    check: bool = False,
    write: bool = True,
) -> Tuning:
    """Choose the drafter's fastest setting for each batch size.

    It is one of `settings`, or of the grid of the drafter's kind, at the first temperature of
    `config`. All results go to `output_dir`. The choice is also written beside the drafter's
    weights. A merged or training-free drafter has few settings, and all of them are measured.

    The grid grows while the setting with the fastest prediction lies at its edge (`extended`).
    Raises ValueError if no prompt fits, if nothing fits into memory, for a drafter with random
    drafts, whose steps can't be replayed, and for a choice that has no folder to be written to.
    """
    # 1. Read the inputs: an unreadable file of earlier choices raises here, before any long work.
    parts = parse_drafter_name(name)
    if write:
        read_tuned(tuned_folder(parts))
    temperature = config.temperatures[0]
    grid: Grid | None = None
    if settings is None and is_replayed(parts, [{}]):
        spec = parts.parts[0].spec()
        grid = grid_of(spec)
        settings = candidates(spec, grid)
    elif settings is None:
        settings = measured_settings(parts)

    # 2. Answer the prompts, and try the settings on the answers.
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(config.num_threads))
        _require_trees_of_the_text(parts, settings)
        drafter = _first_fitting(parts, target, settings)
        target.choose_linears()
        longest = min(target.context_length, drafter.context_length or target.context_length)
        trial = Trial(
            parts=parts,
            target=target,
            rule=acceptance_rule("exact", temperature, target),
            answered=_answers(config, target, longest, drafter.feature_layers, max(batch_sizes)),
        )
        if is_replayed(parts, settings):
            tuning = _tune(
                trial, trained_parts(drafter)[0], Tried(settings=[None, *settings], grid=grid), batch_sizes, check=check
            )
        else:
            tuning = _measure(trial, [None, *settings], batch_sizes)
        setup, environment = describe_setup(target, parts, temperature), describe_environment(target.device)

    # 3. Write the results.
    results = asdict(tuning) | {
        "place": asdict(setup),
        "environment": asdict(environment),
        "num_prompts": len(trial.answered),
        "max_new_tokens": config.max_new_tokens,
    }
    write_json(output_dir / TUNING_FILE, results)
    if write:
        save_tuned(tuned_folder(parts), setup, tuning.choices)
    return tuning


def _first_fitting(parts: DrafterParts, target: HFTarget, settings: Sequence[dict[str, Any]]) -> LoadedDrafter:
    """Load the drafter in the first setting that fits into memory.

    Raises ValueError if none fits. The replay logs and skips settings that don't fit.
    """
    for setting in settings:
        if (drafter := within_memory(partial(load_drafter, parts, target, **setting), target)) is not None:
            return drafter
    raise ValueError(
        f"{parts.name} ran out of memory while it was loaded, in every setting; load the target in a narrower type "
        "(target.dtype) or on a larger device"
    )


def _require_trees_of_the_text(parts: DrafterParts, settings: Sequence[dict[str, Any]]) -> None:
    for setting in settings:
        if any(getattr(config, "temperature", 0.0) for config in parts.configs(setting).values()):
            raise ValueError(
                f"{parts.name} samples its drafts at random{f' with {setting}' if setting else ''}, so its steps can't be "
                "replayed; set its temperature to 0"
            )


@dataclass(slots=True, kw_only=True)
class Tried:
    """Settings tried so far, and the grid that they come from.

    The grid is None if the user listed the settings.
    """

    settings: list[Setting]
    grid: Grid | None

    def extend(self, spec: DrafterSpec, predictions: Sequence[Prediction], batch_sizes: Sequence[int]) -> list[Setting]:
        """Extend the grid if the fastest setting for a batch size lies at its edge.

        Returns the added settings.
        """
        if self.grid is None:
            return []
        grid = self.grid
        for size in batch_sizes:
            drafting = [speed for speed in predictions if speed.batch_size == size and speed.setting is not None]
            best = max(drafting, key=lambda speed: speed.tokens_per_second, default=None)
            grid = grid if best is None or best.setting is None else extended(grid, best.setting)
        added: list[Setting] = [setting for setting in candidates(spec, grid) if setting not in self.settings]
        for name, values in grid.items():
            if further := values[len(self.grid[name]) :]:
                logger.info("the fastest settings have %s at the edge of the grid: trying %s as well", name, further)
        self.grid = grid
        self.settings += added
        return added


def _measure(trial: Trial, settings: Sequence[Setting], batch_sizes: Sequence[int]) -> Tuning:
    """Measure all settings, and choose one for each batch size."""
    finals = [speed for size in batch_sizes for speed in measure_all(trial, settings, size)]
    choices = {size: choose(finals, size) for size in _require_baseline(finals, batch_sizes)}
    left_out = [
        LeftOut(setting=setting, batch_size=size)
        for setting, size in product(settings, batch_sizes)
        if not _sizes_with(setting, finals, [size])
    ]
    nothing: dict[str, Any] = {"predictions": [], "checked": [], "regrets": {}, "predicted_regrets": {}, "step_times": None}
    return Tuning(choices=choices, finals=finals, left_out=left_out, **nothing)


def _require_baseline(speeds: Sequence[Speed], batch_sizes: Sequence[int]) -> list[int]:
    """List the batch sizes at which plain decoding fitted into memory; ValueError if none."""
    if sizes := _sizes_with(None, speeds, batch_sizes):
        return sizes
    raise ValueError(
        f"plain decoding ran out of memory in batches of {', '.join(map(str, batch_sizes))}, so there is no baseline to "
        "compare settings with; lower eval.batch_sizes or eval.max_new_tokens"
    )


def _tune(trial: Trial, drafter: TrainableDrafter, tried: Tried, batch_sizes: Sequence[int], *, check: bool) -> Tuning:
    # 1. Predict the speed of all settings, and measure the fastest ones (with `check`, all).
    times, predictions = _predict_all(trial, drafter, tried, batch_sizes)
    finals: list[Speed] = []
    checked: list[Speed] = []
    for size in _sizes_with(None, predictions, batch_sizes):
        finals += measure_all(trial, finalists(predictions, size), size)
        fitting = [speed.setting for speed in predictions if speed.batch_size == size]
        checked += measure_all(trial, fitting, size) if check else []
    # 2. Leave out batch sizes at which plain decoding didn't fit into memory.
    sizes = _require_baseline(finals, batch_sizes)
    # 3. Choose a setting for each batch size, and compare the choices with the best ones.
    choices = {size: choose(finals, size) for size in sizes}
    predicted_choices = {size: choose(predictions, size) for size in sizes}
    return Tuning(
        choices=choices,
        predictions=predictions,
        finals=finals,
        checked=checked,
        regrets=_regrets(choices, checked),
        predicted_regrets=_regrets(predicted_choices, checked),
        step_times=times,
        left_out=_left_out(tried, predictions, finals, batch_sizes),
    )


def _predict_all(
    trial: Trial, drafter: TrainableDrafter, tried: Tried, batch_sizes: Sequence[int]
) -> tuple[StepTimes, list[Prediction]]:
    """Predict the speeds of all settings, and of those that the grid grows by."""
    replays = replay_all(trial, tried.settings, batch_sizes)
    times = _step_times(trial, drafter, replays, batch_sizes)
    predictions = _predictions(replays, times)
    for _ in range(MAX_EXTENSIONS):
        added = tried.extend(trial.parts.parts[0].spec(), predictions, batch_sizes)
        if not added:
            break
        replays += replay_all(trial, added, batch_sizes)
        if _largest(replays) > max(times.node_counts):
            times = _step_times(trial, drafter, replays, batch_sizes)
        predictions = _predictions(replays, times)
    return times, predictions


def _step_times(trial: Trial, drafter: TrainableDrafter, replays: Sequence[Replay], batch_sizes: Sequence[int]) -> StepTimes:
    """Measure the target's step times for all tree sizes of these replays."""
    # Use half-written answers, since the cost of a step grows with the text.
    texts = [item.text[: len(item.prompt) + len(item.answer) // 2] for item in trial.answered]
    largest = _largest(replays)
    rows, nodes = _powers(max(batch_sizes), *batch_sizes), [0, *_powers(largest, largest)]
    return measure_step_times(trial.target, texts, rows, nodes, drafter=drafter)


def _largest(replays: Sequence[Replay]) -> int:
    return max((step.nodes for replay in replays for step in replay.run.passes), default=0)


def _predictions(replays: Sequence[Replay], times: StepTimes) -> list[Prediction]:
    predicted = (predict(replay, times) for replay in replays)
    return [prediction for prediction in predicted if prediction is not None]


def _sizes_with(setting: Setting, speeds: Sequence[Speed], batch_sizes: Sequence[int]) -> list[int]:
    """List the batch sizes at which a setting has a speed."""
    known = {speed.batch_size for speed in speeds if speed.setting == setting}
    return [size for size in batch_sizes if size in known]


def _regrets(choices: Mapping[int, Choice], checked: Sequence[Speed]) -> dict[int, float]:
    """Compute the regrets by batch size, if the choice and plain decoding were checked.

    All settings share the memory in the check, so it may run out for some.
    """
    return {
        size: regret(choice.setting, checked, size)
        for size, choice in choices.items()
        if all(_sizes_with(setting, checked, [size]) for setting in (None, choice.setting))
    }


def _left_out(
    tried: Tried, predictions: Sequence[Prediction], finals: Sequence[Speed], batch_sizes: Sequence[int]
) -> list[LeftOut]:
    """List the settings without a prediction, and the finalists without a speed."""
    left_out = []
    for setting, size in product(tried.settings, batch_sizes):
        is_predicted, is_measured = (bool(_sizes_with(setting, speeds, [size])) for speeds in (predictions, finals))
        if not is_predicted or (not is_measured and setting in finalists(predictions, size)):
            left_out.append(LeftOut(setting=setting, batch_size=size))
            logger.warning("%s ran out of memory in batches of %d and is left out", setting or "plain decoding", size)
    return left_out


def tuned_settings(config: EvalConfig, target: HFTarget, drafters: Drafters) -> TunedSettings:
    """Look up each drafter's tuned settings by temperature and batch size.

    Raises ValueError if nothing was tuned on this machine.
    """
    with cpu_threads(config.num_threads):
        return {
            drafter: {
                (temperature, size): tuned_choice(drafter, target, batch_size=size, temperature=temperature).setting
                for temperature, size in product(config.temperatures, config.batch_sizes)
            }
            for drafter in drafters
        }


def _powers(largest: int, *others: int) -> list[int]:
    """List the powers of two below the largest value, and the values of `others`."""
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    return sorted({*powers, *others})


def _answers(
    config: EvalConfig, target: HFTarget, longest: int, feature_layers: tuple[int, ...], batch_size: int
) -> list[Answered]:
    """Compute the target's answers to the first turns of the suites' prompts.

    Prompt and answer have at most `longest` tokens. Raises ValueError if no prompt fits, and if the
    answers don't fill a batch of this size.
    """
    # 1. Select the prompts that leave room for an answer.
    prompts = []
    for suite in load_suites(config):
        for prompt in suite.prompts:
            ids = encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0].to(target.device)
            if len(ids) + config.max_new_tokens <= longest:
                prompts.append(ids)
    if not prompts:
        raise ValueError(
            f"no prompt leaves room for {config.max_new_tokens} new tokens in a context of {longest}; lower eval.max_new_tokens"
        )

    # 2. Answer them.
    rule = acceptance_rule("exact", config.temperatures[0], target)
    answered = answer_prompts(target, prompts, rule, max_new_tokens=config.max_new_tokens, feature_layers=feature_layers)
    answered = [item for item in answered if len(item.answer) > 1]  # others end with their prefill
    if not answered:
        raise ValueError("the target's answers to these prompts end with their first token; choose other prompts")
    if len(answered) < batch_size:
        raise ValueError(
            f"the batch size {batch_size} exceeds the {len(answered)} prompts that can be replayed, so no batch would be full; "
            "raise the suite's limit, or lower the batch size"
        )
    return answered
