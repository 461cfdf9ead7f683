"""The methods that an evaluation compares.

A method is a drafter in one setting, under the name that the tables show.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from ...models.decoding.acceptance import GreedyAcceptance, SpeculativeSampling, TypicalAcceptance
from ...models.decoding.pipelined import generate_pipelined
from ...models.decoding.protocols import AcceptanceRule, Drafter
from ...models.decoding.sampling import Sampling
from ...models.decoding.speculation import ExpectedSpeculation
from ...models.decoding.types import Step
from ...models.drafters import NullDrafter, load_drafter
from ...models.drafters.graphed import graphed
from ...models.drafters.merged import MergedConfig
from ...models.drafters.saved.loading import LoadedDrafter
from ...models.drafters.saved.low_rank import is_merged
from ...models.drafters.saved.parts import DrafterParts, parse_drafter_name
from ...models.drafters.streaming_merge import streaming_drafter
from ...models.llm.graphed_rule import rule_beside
from ...models.llm.hf_target import HFTarget
from ..config import SYNCHRONOUS, EvalConfig
from ..records.names import BASELINE, PIPELINED, PLAIN_DECODING, SHAPE_OPTIONS, setting_words, title_of
from ..records.run_files import Place
from .plan import Method
from .timing import Loop

Drafters = Sequence[Path | DrafterParts]
"""The drafters to evaluate; a path is the folder of a trained drafter."""
Settings = Mapping[Path | DrafterParts, Sequence[dict[str, Any]]]
"""Run-time options by drafter. Each one is a method of the table. They replace the configuration's
settings."""
TunedSettings = Mapping[Path | DrafterParts, Mapping[Place, dict[str, Any] | None]]
"""The options for each temperature and batch size, by drafter. None means that the drafter is
off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """A drafter in a setting."""

    parts: DrafterParts
    setting: dict[str, Any] | None
    """None where tuning has turned the drafter off: plain decoding replaces it."""
    places: tuple[Place, ...] | None = None
    """Temperatures and batch sizes at which it decodes; None means all."""
    pipelined: bool = False
    """Whether it drafts while the stages of the target read."""
    drafter: str = ""
    """The drafter in words: `ReDrafter`, or `ReDrafter (wide)` beside another ReDrafter."""
    detail: str = ""
    """The setting in words: `4 beams of 3, 5 nodes`."""

    @property
    def label(self) -> str:
        """The name for readers."""
        return ", ".join(filter(None, (self.drafter, self.detail)))


def method_specs(
    config: EvalConfig, drafters: Drafters, settings: Settings | None = None, tuned: TunedSettings | None = None
) -> dict[str, MethodSpec]:
    """Collect the methods besides plain decoding, by the name that the table shows.

    The training-free baselines come first, and the merges of trained drafters (`config.merge`)
    last. A merge has the first requested setting of its trained drafter; after tuning, the options
    as saved. A name has up to five parts: the drafter's kind; the part of its directory that differs
    from the others', unless it equals the kind; "tuned" for a tuned setting; "pipelined"; and the
    setting. The label says the same in words. Raises ValueError for a directory without a drafter, for
    an option that the drafter doesn't have, for a drafter that is named twice, and for merges without
    a trained drafter.
    """
    # 1. The drafters, with their settings: the requested ones, or those that tuning chose.
    chosen = [MethodSpec(parts=parse_drafter_name(name), setting={}) for name in config.baselines]
    all_parts = [parse_drafter_name(drafter) for drafter in drafters]
    merges = []
    for drafter, parts in zip(drafters, all_parts, strict=True):
        requested = [{}] if tuned is not None else (settings or {}).get(drafter, config.settings)
        chosen += (
            _by_setting(parts, tuned[drafter])
            if tuned is not None
            else [MethodSpec(parts=parts, setting=setting) for setting in requested]
        )
        if config.merge and parts.with_weights:
            merged = parts.merged_with(config.merge)
            merges.append(MethodSpec(parts=merged, setting=_as_part(parts, requested[0])))
    if config.merge and all_parts and not merges:  # before a training there are no drafters yet
        names = ", ".join(parts.name for parts in all_parts)
        raise ValueError(
            f"merge is {', '.join(config.merge)}, which drafters with weights are merged with, and {names} has no weights; "
            f"leave merge out, and write the parts of a merge as the drafter: {'+'.join([all_parts[0].name, *config.merge])}"
        )
    # 2. Check each setting, and name the method.
    specs: dict[str, MethodSpec] = {}
    distinct_parts = _distinct_parts(sorted({folder for parts in all_parts for folder in _folders(parts)}))
    num_of_kind = Counter(parts.kind for parts in {spec.parts for spec in (*chosen, *merges)})
    for spec in _in_loops([*chosen, *merges], config):
        _check_options(spec, several=len(all_parts) > 1)
        folders = "+".join(filter(None, (distinct_parts[folder] for folder in _folders(spec.parts))))
        name = [spec.parts.kind, *([folders] if folders not in ("", spec.parts.kind) else [])]
        marks = ["tuned"] * (spec.places is not None) + [PIPELINED] * spec.pipelined
        key = " ".join([*name, *marks, *_words(spec.setting)])
        if key in specs:
            raise ValueError(
                f"{key} would be evaluated twice; give each drafter and each setting once, and leave out of baselines "
                "(--baseline) and merge (--merge) what is a drafter already"
            )
        title, detail = title_of(spec.parts.kind), _detail(spec)
        words = f"{title} ({folders})" if folders and num_of_kind[spec.parts.kind] > 1 else title
        if any((words, detail) == (other.drafter, other.detail) for other in specs.values()):
            detail = f"{detail} ({' '.join(_words(spec.setting)) or 'as saved'})".strip()
        specs[key] = replace(spec, drafter=words, detail=detail)
    return specs


def _detail(spec: MethodSpec) -> str:
    """Describe the setting in words."""
    if spec.pipelined:  # how much it drafts doesn't follow from the options of a step's tree
        return PIPELINED
    if spec.setting is None:
        return setting_words(spec.parts.kind, {}, None)
    options = {**spec.parts.described(spec.setting), **spec.setting}
    words = setting_words(spec.parts.kind, options, spec.setting)
    return ", ".join(filter(None, (words, "tuned" if spec.places is not None else "")))


def _in_loops(specs: Sequence[MethodSpec], config: EvalConfig) -> list[MethodSpec]:
    """Return the methods in the loops of `EvalConfig.decode`.

    Raises ValueError for tuned settings in the pipelined loop.
    """
    if config.decode == SYNCHRONOUS:
        return list(specs)
    if any(spec.places is not None for spec in specs):
        raise ValueError(
            f"decode is {config.decode}, and tuned settings are those of the loop that waits for the target; leave --tuned "
            f"out, or set decode={SYNCHRONOUS}"
        )
    # Settings of a step's tree change nothing there.
    pipelined: list[MethodSpec] = []
    for spec in specs:
        setting = {name: value for name, value in (spec.setting or {}).items() if name not in (*SHAPE_OPTIONS, "pace")}
        changed = replace(spec, setting=setting, pipelined=True)
        if changed not in pipelined:
            pipelined.append(changed)
    return pipelined if config.decode == PIPELINED else [*specs, *pipelined]


def _folders(parts: DrafterParts) -> list[Path]:
    return [part.folder for part in parts.parts if part.folder is not None]


def _as_part(parts: DrafterParts, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a drafter as one of a merge that it is part of.

    Options that the merged tree has too, such as `tree_nodes`, stay those of the merge, which
    chooses among all nodes that the drafter has searched.
    """
    merged = {field.name for field in fields(MergedConfig)}
    return {name: value for name, value in setting.items() if parts.is_merged(setting) or name not in merged}


def _check_options(spec: MethodSpec, *, several: bool) -> None:
    """Raise ValueError for options that the drafter doesn't have, and that can't be measured."""
    try:
        spec.parts.configs(spec.setting or {})
    except ValueError as error:
        if not several or not spec.setting:
            raise
        raise ValueError(
            f"{error}. Settings hold for each drafter: evaluate {spec.parts.name} without them, in an evaluation without the "
            "others, or as a baseline"
        ) from None


def _by_setting(parts: DrafterParts, tuned: Mapping[Place, dict[str, Any] | None]) -> list[MethodSpec]:
    """Build a method for each setting, with all temperatures and batch sizes it was chosen for."""
    settings = [setting for index, setting in enumerate(tuned.values()) if setting not in list(tuned.values())[:index]]
    return [
        MethodSpec(parts=parts, setting=setting, places=tuple(place for place, chosen in tuned.items() if chosen == setting))
        for setting in settings
    ]


def _words(setting: dict[str, Any] | None) -> list[str]:
    return ["off"] if setting is None else [f"{key}={value}" for key, value in setting.items()]


def _distinct_parts(paths: Sequence[Path]) -> dict[Path, str]:
    """Reduce each path to the part that differs from the others.

    This drops the folders above all paths, and a last folder that all paths share. A low-rank change is merged in a cache,
    of which only the last folder has a name that somebody gave.
    """
    if changes := {path: path.name for path in paths if is_merged(path)}:
        return {**_distinct_parts([path for path in paths if path not in changes]), **changes}
    if len(paths) < 2:
        return dict.fromkeys(paths, "")
    parts = [path.relative_to(os.path.commonpath(paths)).parts for path in paths]
    if all(len(path_parts) > 1 and path_parts[-1] == parts[0][-1] for path_parts in parts):
        parts = [path_parts[:-1] for path_parts in parts]
    return {path: "/".join(path_parts) for path, path_parts in zip(paths, parts, strict=True)}


def recorded_methods(specs: Mapping[str, MethodSpec]) -> dict[str, dict[str, Any]]:
    """Describe the methods as far as records depend on them; no paths, so that a folder may
    move."""
    return {
        name: {
            "drafter": spec.drafter,
            "detail": spec.detail,
            "kind": spec.parts.kind,
            "config": spec.parts.described(spec.setting or {}),
            "setting": spec.setting,
            "weights": spec.parts.weights,
            **({} if spec.places is None else {"places": [list(place) for place in spec.places]}),
            **({"decode": PIPELINED} if spec.pipelined else {}),
        }
        for name, spec in specs.items()
    }


def load_drafters(specs: Mapping[str, MethodSpec], target: HFTarget) -> dict[str, LoadedDrafter]:
    """Load the drafters, by method, without those that tuning turned off."""
    return {name: load_drafter(spec.parts, target, **spec.setting) for name, spec in specs.items() if spec.setting is not None}


def proposer(drafter: LoadedDrafter, target: HFTarget) -> Drafter[Any, Any]:
    """Prepare a drafter for decoding beside this target.

    If the target replays CUDA graphs and the drafter can be recorded, the drafter is replayed as a
    CUDA graph too.
    """
    return graphed(drafter) if target.cuda_graphs else drafter


def acceptance_rule(acceptance: str, temperature: float, target: HFTarget) -> AcceptanceRule:
    """Choose the acceptance rule at a temperature (see `EvalConfig.acceptance`).

    If the target replays CUDA graphs, the rule is replayed as a CUDA graph too.
    """
    sampling = Sampling(temperature=temperature)
    rule: AcceptanceRule = SpeculativeSampling(sampling=sampling)
    if temperature == 0:
        rule = GreedyAcceptance()
    elif acceptance == "typical":
        rule = TypicalAcceptance(sampling=sampling)
    return rule_beside(target, rule)


def methods_by_place(
    config: EvalConfig, specs: Mapping[str, MethodSpec], drafters: Mapping[str, LoadedDrafter], target: HFTarget
) -> dict[Place, list[Method]]:
    """Collect the methods by temperature and batch size, plain decoding first."""
    proposers = {name: proposer(drafter, target) for name, drafter in drafters.items()}
    methods = {
        name: Method(name=name, label=spec.label, drafter=proposers.get(name) or NullDrafter()) for name, spec in specs.items()
    }
    for name, spec in specs.items():
        if spec.pipelined:
            methods[name] = replace(methods[name], loop=pipelined_loop(methods[name].drafter))
    baseline = Method(name=BASELINE, label=PLAIN_DECODING, drafter=NullDrafter())
    return {
        place: [baseline, *(methods[name] for name, spec in specs.items() if spec.places is None or place in spec.places)]
        for place in product(config.temperatures, config.batch_sizes)
    }


def pipelined_loop(drafter: Drafter[Any, Any]) -> Loop:
    """Build the loop in which a drafter drafts while the target's stages read.

    What it learns about the costs holds for all texts. Raises ValueError for a drafter that can't
    draft while the target reads.
    """
    streaming, speculation = streaming_drafter(drafter), ExpectedSpeculation()

    def decode(target: Any, _: Any, rule: Any, prompts: Any, **options: Any) -> Iterator[Step]:
        return generate_pipelined(target, streaming, rule, prompts, speculation=speculation, **options)

    return decode
