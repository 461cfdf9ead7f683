"""Tuning of a drafter to a machine: its fastest setting for each batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int

from ...data.files import write_json
from ...models.drafters import load_drafter
from ...models.drafters.registry import DrafterSpec
from ...models.drafters.saved.loading import TunedChoice, describe_setup, read_tuned, save_tuned, tuned_choice, tuned_folder
from ...models.drafters.saved.parts import DrafterParts, parse_drafter_name
from ...models.llm.hf_target import HFTarget
from ..config import EvalConfig
from ..measure.environment import describe_environment, within_memory
from ..measure.methods import Drafters, TunedSettings, acceptance_rule
from ..measure.plan import first_turn_ids
from ..run import load_suites
from .halving import LeftOut, Speed, Trial, TuningPrompts, halve

TUNING_FILE = "tuning.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Result of tuning."""

    choices: dict[int, TunedChoice]
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
    write: bool = True,
) -> Tuning:
    """Choose the drafter's fastest setting for each batch size, at the first temperature of `config`.

    It is one of the settings of `config`, or, without any, of those that its kind's drafters are tried in.
    `halving` describes the search. All results go to `output_dir`. The choice is also written beside the drafter's
    weights. Raises ValueError if no prompt fits, if nothing fits into memory, and for a choice that
    has no folder to be written to.
    """
    # 1. Read the inputs: an unreadable file of earlier choices raises here, before any long work.
    parts = parse_drafter_name(name)
    if write:
        read_tuned(tuned_folder(parts))
    tried = settings_to_try(parts) if config.settings == [{}] else config.settings
    temperature, batch_sizes = config.temperatures[0], sorted(config.batch_sizes)

    # 2. Find the fastest settings for each batch size.
    choices: dict[int, TunedChoice] = {}
    finals: list[Speed] = []
    left_out: list[LeftOut] = []
    target.choose_linears()
    prompts = _prompts(config, target, _context_length(parts, target, tried), batch_sizes[-1])
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


def choose(speeds: Sequence[Speed]) -> TunedChoice:
    """Choose the fastest of these speeds; plain decoding is the first of them."""
    plain, best = speeds[0], max(speeds, key=lambda speed: speed.tokens_per_second)
    return TunedChoice(
        setting=best.setting,
        tokens_per_step=best.tokens_per_step,
        tokens_per_second=best.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
    )


def tuned_settings(config: EvalConfig, target: HFTarget, drafters: Drafters) -> TunedSettings:
    """Look up each drafter's tuned settings by temperature and batch size.

    Raises ValueError if nothing was tuned on this machine.
    """
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


def _prompts(config: EvalConfig, target: HFTarget, longest: int, batch_size: int) -> TuningPrompts:
    """Encode the first turns of the suites' prompts that leave room for an answer.

    Prompt and answer have at most `longest` tokens. Raises ValueError if no prompt fits, and if
    they don't fill a batch of this size.
    """
    prompts: list[Int[torch.Tensor, " _"]] = []
    for suite in load_suites(config):
        for prompt in suite.prompts:
            ids = first_turn_ids(prompt, target.tokenizer)[0].to(target.device)
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


# --- the settings that tuning tries


Grid = Mapping[str, tuple[Any, ...]]
"""Values by option; tuning tries every useful combination of them."""

GRIDS: Mapping[str, Grid] = {
    "block": {"width": (1, 2, 4, 8, 16), "tree_nodes": (2, 4, 8, 16, 32, 60)},
    "draft_model": {"length": (2, 3, 4, 6), "top_k": (1, 2, 4), "tree_nodes": (4, 8, 16, 32)},
    "eagle": {"depth": (2, 3, 5, 7), "top_k": (1, 2, 8), "tree_nodes": (4, 8, 16, 32, 60)},
    "eagle3": {"depth": (2, 3, 5, 7), "top_k": (1, 2, 8), "tree_nodes": (4, 8, 16, 32, 60)},
    "medusa": {"tree_nodes": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)},
    "mtp": {"depth": (1, 2, 3, 5), "top_k": (1, 2, 8), "tree_nodes": (2, 4, 8, 16, 32)},
    "redrafter": {"beam_width": (1, 2, 4, 8), "beam_length": (2, 3, 5), "tree_nodes": (None, 4, 8, 16, 32)},
}
"""Grid of each trained kind. Small trees are for a CPU; on an accelerator larger ones may cost no
more."""
TRAINING_FREE_NODES: Mapping[str, tuple[int, ...]] = {
    "prompt_lookup": (3, 5, 8, 16),
    "recycling": (4, 8, 16, 40),
    "suffix": (4, 8, 16, 32),
}
"""Numbers of nodes of each training-free drafter."""
MERGED_NODES = (5, 10, 20, 40)
"""Numbers of nodes of a merged drafter."""


def settings_to_try(parts: DrafterParts) -> list[dict[str, Any]]:
    """List the settings of a drafter that are worth a trial, each once."""
    if parts.is_merged({}):
        return [{"pace": "expected"}, *({"tree_nodes": size, "pace": "fixed"} for size in MERGED_NODES)]
    if not parts.with_weights:
        return [{"pace": "expected"}, *({"tree_nodes": size} for size in TRAINING_FREE_NODES[parts.kind])]
    return _grid_settings(parts.parts[0].spec())


def _grid_settings(spec: DrafterSpec) -> list[dict[str, Any]]:
    """List a trained drafter's settings: the saved one first, then those of its kind's grid."""
    default, grid = spec.config, GRIDS[spec.kind]
    # A tree given as paths would override the number of its nodes.
    fixed: dict[str, Any] = {} if getattr(default, "tree_paths", None) is None else {"tree_paths": None}
    settings = [{name: getattr(default, name) for name in grid}]
    for values in product(*grid.values()):
        setting = {**dict(zip(grid, values, strict=True)), **fixed}
        if setting not in settings and _makes_sense(setting, grid) and _is_possible(spec, setting):
            settings.append(setting)
    return settings


def _is_possible(spec: DrafterSpec, setting: Mapping[str, Any]) -> bool:
    """Check whether the drafter allows a setting beside its other options.

    For example, the search has bounds, and selected nodes need shared prefixes.
    """
    try:
        spec.with_options(setting)
    except ValueError:
        return False
    return True


def _makes_sense(setting: Mapping[str, Any], grid: Grid) -> bool:
    """Check that no smaller setting drafts the same tree.

    A chain has no more nodes than tokens. A tree has at least the nodes of a chain.
    """
    length = next((setting[name] for name in ("beam_length", "depth", "length") if name in setting), None)
    width = next((setting[name] for name in ("beam_width", "top_k", "width") if name in setting), None)
    nodes = setting.get("tree_nodes")
    if length is None or width is None:
        return True
    if width == 1:  # a chain: use the smallest tree size that holds it
        sizes = grid["tree_nodes"]
        return nodes == (None if None in sizes else min((size for size in sizes if size >= length), default=length))
    return nodes is None or length <= nodes <= length * width * (width if "top_k" in setting else 1)
