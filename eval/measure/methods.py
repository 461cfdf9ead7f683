"""What an evaluation compares.

Drafters, each in its settings, under the names that the tables show.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...data.files import sha256_file
from ...models.decoding.protocols import Drafter
from ...models.drafters import NullDrafter, load_drafter
from ...models.drafters.base import TrainableDrafter
from ...models.drafters.graphed import GraphedDrafter, RecordableDrafter
from ...models.drafters.saved.build import saved_spec
from ...models.drafters.saved.loading import WEIGHTS_FILE, read_drafter_config
from ...models.target.hf_target import HFTarget
from ..config import EvalConfig
from ..records.names import BASELINE
from ..records.run_files import Place
from .turns import Method

Settings = Mapping[Path, Sequence[dict[str, Any]]]
"""Run-time options by drafter's directory, each one a method of the table: in place of the
configuration's."""
TunedSettings = Mapping[Path, Mapping[Place, dict[str, Any] | None]]
"""By drafter's directory the options for each temperature and batch size; None where it is to draft
nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """A drafter in a setting."""

    path: Path
    setting: dict[str, Any] | None
    """None where tuning has turned the drafter off: plain decoding in its place."""
    places: tuple[Place, ...] | None = None
    """Where it decodes; None is everywhere."""


def method_specs(
    config: EvalConfig, drafter_dirs: Sequence[Path], settings: Settings | None = None, tuned: TunedSettings | None = None
) -> dict[str, MethodSpec]:
    """Return what is measured besides plain decoding, by the name that the table shows.

    The name is the drafter's kind and the setting, and between them what tells its directory from
    the others', unless that is its kind; and that the setting was tuned. Raises ValueError for a
    directory without a drafter, an option that it doesn't have, and for a drafter named twice.
    """
    specs: dict[str, MethodSpec] = {}
    paths = [directory.resolve() for directory in drafter_dirs]
    for path, directory, place in zip(paths, drafter_dirs, _distinct_parts(paths), strict=True):
        saved = read_drafter_config(path)
        if not (path / WEIGHTS_FILE).is_file():
            raise ValueError(f"{path / WEIGHTS_FILE} is missing; its export is incomplete: copy or export it again")
        name = [saved.kind, *([place] if place not in ("", saved.kind) else [])]
        if tuned is None:
            chosen = [MethodSpec(path=path, setting=setting) for setting in (settings or {}).get(directory, config.settings)]
        else:
            name.append("tuned")
            chosen = _by_setting(path, tuned[directory])
        for spec in chosen:
            saved_spec(saved, spec.setting)
            label = " ".join([*name, *_words(spec.setting)])
            if label in specs:
                raise ValueError(f"{label} is to be evaluated twice; give each drafter and each setting once")
            specs[label] = spec
    return specs


def _by_setting(path: Path, tuned: Mapping[Place, dict[str, Any] | None]) -> list[MethodSpec]:
    """Return a method for each setting, for all places that it was chosen for."""
    settings = [setting for index, setting in enumerate(tuned.values()) if setting not in list(tuned.values())[:index]]
    return [
        MethodSpec(path=path, setting=setting, places=tuple(place for place, own in tuned.items() if own == setting))
        for setting in settings
    ]


def _words(setting: dict[str, Any] | None) -> list[str]:
    return ["off"] if setting is None else [f"{key}={value}" for key, value in setting.items()]


def _distinct_parts(paths: Sequence[Path]) -> list[str]:
    """Return what tells each path from the others.

    Without the folders above all of them, and without a last one that they share.
    """
    if len(paths) == 1:
        return [""]
    parts = [path.relative_to(os.path.commonpath(paths)).parts for path in paths]
    if all(len(each) > 1 and each[-1] == parts[0][-1] for each in parts):
        parts = [each[:-1] for each in parts]
    return ["/".join(each) for each in parts]


def recorded_methods(specs: Mapping[str, MethodSpec]) -> dict[str, dict[str, Any]]:
    """Return what a record depends on of its method; no paths, so that a folder may be moved."""
    return {
        name: {
            "config": read_drafter_config(spec.path).drafter,
            "setting": spec.setting,
            "weights": sha256_file(spec.path / WEIGHTS_FILE),
            **({} if spec.places is None else {"places": [list(place) for place in spec.places]}),
        }
        for name, spec in specs.items()
    }


def load_drafters(specs: Mapping[str, MethodSpec], target: HFTarget) -> dict[str, TrainableDrafter]:
    """Return the drafters, by method; those that were turned off aren't among them."""
    return {name: load_drafter(spec.path, target, **spec.setting) for name, spec in specs.items() if spec.setting is not None}


def proposer(drafter: TrainableDrafter, target: HFTarget) -> Drafter[Any, Any]:
    """Return the drafter as it decodes beside this target.

    Replayed as a CUDA graph where the target is, if it can be recorded.
    """
    if target.cuda_graphs and isinstance(drafter, RecordableDrafter):
        return GraphedDrafter(drafter)
    return drafter


def methods_by_place(
    config: EvalConfig, specs: Mapping[str, MethodSpec], drafters: Mapping[str, TrainableDrafter], target: HFTarget
) -> dict[Place, list[Method]]:
    """Return the methods by temperature and batch size, plain decoding first."""
    proposers = {name: proposer(drafter, target) for name, drafter in drafters.items()}
    methods = {name: Method(name=name, drafter=proposers.get(name) or NullDrafter()) for name in specs}
    baseline = Method(name=BASELINE, drafter=NullDrafter())
    return {
        place: [baseline, *(methods[name] for name, spec in specs.items() if spec.places is None or place in spec.places)]
        for place in product(config.temperatures, config.batch_sizes)
    }
