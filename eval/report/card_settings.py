"""Settings of a drafter's measurements, as its model card describes them."""

from collections.abc import Mapping
from typing import Any

from ...models.drafters.saved.folder import DrafterFile
from ..records.labels import setting_words, title_of
from ..records.names import PIPELINED
from ..results.rows import Row
from .runs import Run


def describe_setting(row: Row, run: Run, saved: DrafterFile) -> str:
    """Describe the setting of a measurement, and options that changed after it."""
    method = run.info.config["methods"][row["method"]]
    if run.info.is_pipelined(row["method"]):
        return PIPELINED
    if method["setting"] is None:
        return setting_words(saved.kind, {}, None)
    config, setting = method["config"], method["setting"]
    if isinstance(config.get(saved.kind), dict):
        return _describe_merge(method["kind"].split("+"), config, setting, saved)
    used = {**config, **setting}
    changed = {name: value for name, value in used.items() if name in setting or saved.drafter.get(name) != value}
    return setting_words(saved.kind, used, changed) or "as saved"


def _describe_merge(parts: list[str], config: Mapping[str, Any], setting: Mapping[str, Any], saved: DrafterFile) -> str:
    """Describe the setting of a merged tree: the other sources, its options, and the drafter's.

    `config` has the options of the tree, and those of each of the `parts` under its name.
    """
    # 1. The options of the tree and of this drafter. The setting may have the drafter's options under
    # its name, or beside those of the tree.
    of_tree = {name: value for name, value in config.items() if name not in parts}
    of_drafter = {**config[saved.kind], **setting.get(saved.kind, {})}
    requested = {name: value for name, value in setting.items() if name != saved.kind}
    used = {**of_drafter, **of_tree, **requested}
    # 2. Options worth a word: those of the tree, the requested ones, and the drafter's that changed.
    changed = {
        name: value
        for name, value in used.items()
        if name in of_tree or name in setting or name in setting.get(saved.kind, {}) or saved.drafter.get(name) != value
    }
    words = setting_words(saved.kind, used, changed)
    partners = " + ".join(title_of(part) for part in parts if part != saved.kind)
    return ", ".join(filter(None, (f"merged with {partners}" if partners else "", words)))
