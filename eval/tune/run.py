"""Tuning of a drafter to a machine: its fastest setting for each batch size."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int

from ...data.chat import encode_prompt
from ...data.files import write_json
from ...data.types import Turn
from ...models.drafters import load_drafter
from ...models.drafters.saved.parts import DrafterParts, parse_drafter_name
from ...models.drafters.saved.tuned import Choice, describe_setup, read_tuned, save_tuned, tuned_choice, tuned_folder
from ...models.llm.hf_target import HFTarget
from ..config import EvalConfig
from ..measure.environment import describe_environment
from ..measure.memory import within_memory
from ..measure.methods import Drafters, TunedSettings, acceptance_rule
from ..run import cpu_threads, load_suites
from .halving import LeftOut, Prompts, Speed, Trial, halve
from .settings import settings_to_try

TUNING_FILE = "tuning.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Result of tuning."""

    choices: dict[int, Choice]
    """The fastest way to decode, by batch size. A batch size has no choice if plain decoding ran out
    of memory."""
    finals: list[Speed]
    """Speeds of the last round of each batch size: plain decoding first, then the finalists."""
    num_settings: int
    """Number of settings tried."""
    left_out: list[LeftOut]
    """Settings that ran out of memory."""


def tune(
    config: EvalConfig,
    target: HFTarget,
    name: Path | DrafterParts,
    output_dir: Path,
    *,
    settings: Sequence[dict[str, Any]] | None = None,
    batch_sizes: Sequence[int] = (1,),
    write: bool = True,
) -> Tuning:
    """Choose the drafter's fastest setting for each batch size, at the first temperature of `config`.

    It is one of `settings`, or of those that its kind's drafters are tried in. `halving` describes
    the search. All results go to `output_dir`. The choice is also written beside the drafter's
    weights. Raises ValueError if no prompt fits, if nothing fits into memory, and for a choice that
    has no folder to be written to.
    """
    # 1. Read the inputs: an unreadable file of earlier choices raises here, before any long work.
    parts = parse_drafter_name(name)
    if write:
        read_tuned(tuned_folder(parts))
    tried = settings_to_try(parts) if settings is None else list(settings)
    temperature = config.temperatures[0]

    # 2. Find the fastest settings for each batch size.
    choices: dict[int, Choice] = {}
    finals: list[Speed] = []
    left_out: list[LeftOut] = []
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(config.num_threads))
        target.choose_linears()
        prompts = _prompts(config, target, _context_length(parts, target, tried), max(batch_sizes))
        for size in batch_sizes:
            trial = Trial(
                parts=parts,
                target=target,
                rule=acceptance_rule("exact", temperature, target),
                batches=[prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)],
                max_new_tokens=config.max_new_tokens,
            )
            if speeds := halve(trial, tried):
                choices[size] = choose(speeds)
            finals += speeds
            left_out += trial.left_out
        setup, environment = describe_setup(target, parts, temperature), describe_environment(target.device, target.linears)
    if not choices:
        raise ValueError(
            f"plain decoding ran out of memory in batches of {', '.join(map(str, batch_sizes))}, so there is no baseline to "
            "compare settings with; lower --batch-size or --max-new-tokens"
        )

    # 3. Write the results.
    tuning = Tuning(choices=choices, finals=finals, num_settings=len(tried), left_out=left_out)
    results = asdict(tuning) | {
        "place": asdict(setup),
        "environment": asdict(environment),
        "num_prompts": len(prompts),
        "max_new_tokens": config.max_new_tokens,
    }
    write_json(output_dir / TUNING_FILE, results)
    if write:
        save_tuned(tuned_folder(parts), setup, choices)
    return tuning


def choose(speeds: Sequence[Speed]) -> Choice:
    """Choose the fastest of these speeds; plain decoding is the first of them."""
    plain, best = speeds[0], max(speeds, key=lambda speed: speed.tokens_per_second)
    return Choice(
        setting=best.setting,
        tokens_per_step=best.tokens_per_step,
        tokens_per_second=best.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
    )


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


def _context_length(parts: DrafterParts, target: HFTarget, settings: Sequence[dict[str, Any]]) -> int:
    """Compute how many tokens of prompt and answer the target and the drafter can read.

    Raises ValueError if the drafter doesn't fit into memory in any setting.
    """
    for setting in settings:
        if (drafter := within_memory(partial(load_drafter, parts, target, **setting), target)) is not None:
            return min(target.context_length, drafter.context_length or target.context_length)
    raise ValueError(
        f"{parts.name} ran out of memory while it was loaded, in every setting; load the target in a narrower type "
        "(--dtype) or on a larger device"
    )


def _prompts(config: EvalConfig, target: HFTarget, longest: int, batch_size: int) -> Prompts:
    """Encode the first turns of the suites' prompts that leave room for an answer.

    Prompt and answer have at most `longest` tokens. Raises ValueError if no prompt fits, and if
    they don't fill a batch of this size.
    """
    prompts: list[Int[torch.Tensor, " _"]] = []
    for suite in load_suites(config):
        for prompt in suite.prompts:
            ids = encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer)[0].to(target.device)
            if len(ids) + config.max_new_tokens <= longest:
                prompts.append(ids)
    if not prompts:
        raise ValueError(
            f"no prompt leaves room for {config.max_new_tokens} new tokens in a context of {longest}; lower eval.max_new_tokens"
        )
    if len(prompts) < batch_size:
        raise ValueError(
            f"the batch size {batch_size} exceeds the {len(prompts)} prompts that fit the context, so no batch would be full; "
            "raise the suite's limit, or lower the batch size"
        )
    return prompts
