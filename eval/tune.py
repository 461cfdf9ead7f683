"""Tuning a drafter to a machine: answers, times, predictions, the choice, and on request what it is worth."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int

from ..data.chat import encode_prompt
from ..data.files import write_json
from ..data.types import Turn
from ..models.drafters import load_drafter
from ..models.drafters.tuned import Choice, describe_place, read_tuned, save_tuned, tuned_choice
from ..models.hf_target import HFTarget
from ..models.packing import packed_linears
from .config import EvalConfig
from .environment import describe_environment
from .replay import answer_prompts
from .run import Settings, acceptance_rule, cpu_threads, load_suites
from .step_times import StepTimes, measure_step_times
from .tuning import Prediction, candidates, choose, measure_all, predict_all

logger = logging.getLogger(__name__)

TUNING_FILE = "tuning.json"
NODE_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All that was found out."""

    choices: dict[int, Choice]
    predictions: list[Prediction]
    measured: list[Prediction]
    """The same, for real; empty unless it was asked for."""
    regrets: dict[int, float]
    """By batch size: the share of speed that the choice lacks of the best setting's, by what was measured."""
    step_times: StepTimes


def tune(
    config: EvalConfig,
    target: HFTarget,
    drafter_dir: Path,
    output_dir: Path,
    *,
    settings: Sequence[dict[str, Any]] | None = None,
    batch_sizes: Sequence[int] = (1,),
    check: bool = False,
    write: bool = True,
) -> Tuning:
    """Choose the drafter's setting for each batch size, among `settings` or its kind's grid, for the first temperature of
    `config`. Everything found goes to `output_dir`, the choice beside the drafter's weights.

    Raises ValueError where no prompt fits, and for a drafter that draws its drafts at random, whose steps can't be replayed.
    """
    read_tuned(drafter_dir)  # what it can't be written into shows now
    temperature = config.temperatures[0]
    rule = acceptance_rule("exact", temperature)
    settings = candidates(drafter_dir) if settings is None else list(settings)
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(config.num_threads))
        first = load_drafter(drafter_dir, target, **settings[0])
        if getattr(first.config, "temperature", 0.0):
            raise ValueError(
                f"{drafter_dir} draws its drafts at random, so its steps can't be replayed; set its temperature to 0"
            )
        if config.pack_weights:
            stack.enter_context(packed_linears(target.model))
        longest = min(target.context_length, first.context_length or target.context_length)
        prompts = _prompts(config, target, longest)
        answered = answer_prompts(
            target, prompts, rule, max_new_tokens=config.max_new_tokens, feature_layers=first.feature_layers
        )
        answered = [each for each in answered if len(each.answer) > 1]  # others end with their prefill
        if not answered:
            raise ValueError("the target's answers to these prompts end with their first token; choose other prompts")
        if len(answered) < max(batch_sizes):
            raise ValueError(
                f"a batch size is {max(batch_sizes)}, and {len(answered)} prompts can be replayed, which fill no such batch; "
                "raise the suite's limit, or lower the batch size"
            )
        # Where answers are half written: what a step reads grows with the text.
        texts = [each.text[: len(each.prompt) + len(each.answer) // 2] for each in answered]
        times = measure_step_times(target, texts, _row_counts(batch_sizes), NODE_COUNTS)
        options: dict[str, Any] = {"settings": settings, "batch_sizes": batch_sizes, "pack": config.pack_weights}
        predictions = predict_all(drafter_dir, target, rule, answered, times, **options)
        measured = measure_all(drafter_dir, target, rule, answered, **options) if check else []
        choices = {size: choose(predictions, size) for size in batch_sizes}
        regrets = {size: regret(choices[size], measured, size) for size in batch_sizes} if measured else {}
        tuning = Tuning(choices=choices, predictions=predictions, measured=measured, regrets=regrets, step_times=times)
        place, environment = describe_place(target, drafter_dir, temperature), describe_environment(target.device)
    found = asdict(tuning) | {"place": asdict(place), "environment": asdict(environment), "num_prompts": len(answered)}
    write_json(output_dir / TUNING_FILE, found)
    if write:
        save_tuned(drafter_dir, place, choices)
    return tuning


def tuned_settings(config: EvalConfig, target: HFTarget, drafter_dirs: Sequence[Path]) -> Settings:
    """Of each drafter, the settings that were chosen here for the batch sizes and temperatures of an evaluation.

    Each of them is evaluated at all of these. Raises ValueError where nothing was tuned here, and where all choices are to
    draft nothing.
    """
    settings: dict[Path, Sequence[dict[str, Any]]] = {}
    with cpu_threads(config.num_threads):
        for directory in drafter_dirs:
            chosen = [
                tuned_choice(directory, target, batch_size=size, temperature=temperature).setting
                for size in config.batch_sizes
                for temperature in config.temperatures
            ]
            settings[directory] = [each for index, each in enumerate(chosen) if each is not None and each not in chosen[:index]]
            if None in chosen:
                logger.warning(
                    "`outrider tune` has turned %s off for some of these batch sizes and temperatures: there plain decoding "
                    "was faster than all settings",
                    directory,
                )
    if not any(settings.values()):
        raise ValueError(f"`outrider tune` has turned {', '.join(map(str, drafter_dirs))} off here: plain decoding is faster")
    return settings


def regret(choice: Choice, measured: Sequence[Prediction], batch_size: int) -> float:
    """What the choice lacks of the best measured speed for batches of this size, as a share of that."""
    speeds = [(each.setting, each.tokens_per_second) for each in measured if each.batch_size == batch_size]
    chosen = next(speed for setting, speed in speeds if setting == choice.setting)
    return 1 - chosen / max(speed for _, speed in speeds)


def _row_counts(batch_sizes: Sequence[int]) -> list[int]:
    """What is measured: the batch sizes, and powers of two below the largest, since rows leave a batch one by one."""
    powers = [1]
    while powers[-1] * 2 < max(batch_sizes):
        powers.append(powers[-1] * 2)
    return sorted({*powers, *batch_sizes})


def _prompts(config: EvalConfig, target: HFTarget, longest: int) -> list[Int[torch.Tensor, " _"]]:
    """The first turns of the suite's prompts that leave room for an answer."""
    prompts = []
    for suite in load_suites(config):
        for prompt in suite.prompts:
            ids = encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0].to(target.device)
            if len(ids) + config.max_new_tokens <= longest:
                prompts.append(ids)
    if not prompts:
        raise ValueError(
            f"no prompt leaves room for {config.max_new_tokens} new tokens in a context of {longest}; lower --max-new-tokens"
        )
    return prompts
