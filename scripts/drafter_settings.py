"""Drafters that a script measures: the option --drafters, and a setting for each drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.models.drafters.saved.build import saved_spec
from outrider.models.drafters.saved.folder import WEIGHTS_FILE, read_drafter_config

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "redrafter": [
        {"beam_width": 4, "beam_length": 3, "tree_nodes": 5},
        {"beam_width": 16, "beam_length": 5, "tree_nodes": 40},
    ],
    "medusa": [{"tree_nodes": 5}, {"tree_nodes": 40}],
    "eagle": [{"depth": 3, "top_k": 2, "tree_nodes": 5}, {"depth": 5, "top_k": 8, "tree_nodes": 40}],
    "eagle3": [{"depth": 3, "top_k": 2, "tree_nodes": 5}, {"depth": 5, "top_k": 8, "tree_nodes": 40}],
    "block": [{"width": 4, "tree_nodes": 5}, {"width": 16, "tree_nodes": 40}],
    "draft_model": [{"length": 3, "top_k": 2, "tree_nodes": 5}, {"length": 5, "top_k": 8, "tree_nodes": 40}],
}
"""A small and a large tree for each kind of drafter."""


@dataclass(frozen=True, kw_only=True)
class DrafterSetting:
    """A drafter's folder in one setting, under the name that the table shows."""

    name: str
    kind: str
    folder: Path
    setting: dict[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "setting": self.setting}


def parse_drafters(items: Sequence[str]) -> list[DrafterSetting]:
    """Parse NAME=FOLDER[:SETTING]. Raises ValueError for what isn't a drafter or its option."""
    drafters = []
    for item in items:
        name, separator, rest = item.partition("=")
        folder, _, text = rest.partition(":")
        if not (separator and name and folder):
            raise ValueError(f"--drafters has {item!r}; give NAME=FOLDER or NAME=FOLDER:'{{tree_nodes: 5}}'")
        setting = parse_setting(text, f"--drafters {item!r}") if text else None
        drafters += settings_of(name, Path(folder), setting)
    return unique(drafters)


def parse_setting(text: str, option: str) -> dict[str, Any]:
    """Parse a setting as a mapping in YAML. Raises ValueError that names the option."""
    try:
        setting = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the setting in {option} is no YAML ({error}); give one like '{{tree_nodes: 5}}'") from error
    if not isinstance(setting, Mapping):
        raise ValueError(f"the setting in {option} is no mapping; give one like '{{tree_nodes: 5}}'")
    return dict(setting)


def settings_of(name: str, folder: Path, setting: dict[str, Any] | None) -> list[DrafterSetting]:
    """Describe a drafter in a setting, or with a small and a large tree. Raises ValueError."""
    saved = read_drafter_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder / WEIGHTS_FILE} is missing; give the `drafter/` folder of a finished training")
    drafters = []
    for options in SETTINGS.get(saved.kind, [{}]) if setting is None else [setting]:
        saved_spec(saved, options)
        words = (
            f"{options['tree_nodes']} nodes"
            if options.get("tree_nodes")
            else yaml.safe_dump(options, default_flow_style=True).strip()
        )
        drafters.append(DrafterSetting(name=f"{name}, {words}", kind=saved.kind, folder=folder, setting=options))
    return drafters


def unique(drafters: list[DrafterSetting]) -> list[DrafterSetting]:
    """Raise ValueError if two drafters have one name."""
    names = [drafter.name for drafter in drafters]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two --drafters are called {repeated[0]!r}; give them different names")
    return drafters
