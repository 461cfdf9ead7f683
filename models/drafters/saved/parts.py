"""Drafters by name: folders of trained drafters, training-free drafters, models, and merges of these.

A model of transformers drafts as it is: `draft_model:DIR`. The parts of a merge are joined by `+`,
as in `outputs/demo/drafter+suffix+recycling`. The drafters' modules are imported where options are
checked: finding the parts of a name needs no transformers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....data.files import read_dataclass, sha256_file
from ....data.paths import (
    MODEL_PREFIX,
    SEPARATOR,
    TRAINING_FREE_NAMES,
    model_of,
    nearest_name,
    repeated_names,
    split_name,
)
from .download import resolve_drafter, resolve_model
from .folder import CONFIG_FILE, MERGE_FILE, WEIGHTS_FILE, MergeFile, read_drafter_config

if TYPE_CHECKING:
    from ..registry import DrafterSpec

MERGE = ""
"""Key of the merged tree's options, beside those of the parts."""


@dataclass(frozen=True, kw_only=True)
class DrafterPart:
    """A drafter of a merge, or one that drafts alone."""

    name: str
    """The drafter's kind: `redrafter`, or `suffix`. A second one of a kind is `redrafter_2`."""
    folder: Path | None = None
    """The folder of its weights; None for a training-free one."""
    is_model: bool = False
    """Whether the folder holds a model of transformers, which drafts as it is."""

    def config(self, options: Mapping[str, Any]) -> Any:
        """Return the configuration with these options. Raises ValueError for wrong ones."""
        from ..registry import TRAINING_FREE, checked_options

        if self.folder is None:
            return checked_options(self.name, TRAINING_FREE[self.name].Config, options, section=self.name)
        return self.spec(options).config

    def spec(self, options: Mapping[str, Any] | None = None) -> "DrafterSpec":
        """Return the specification of a part with weights. Raises ValueError for wrong options."""
        from .build import saved_spec
        from .model_folder import model_spec

        assert self.folder is not None
        if self.is_model:
            return model_spec(self.folder).with_options(options or {})
        return saved_spec(read_drafter_config(self.folder), options)

    @cached_property
    def weights(self) -> str:
        """Digest of the weights; empty for a training-free drafter."""
        if self.folder is None:
            return ""
        if not self.is_model:
            return sha256_file(self.folder / WEIGHTS_FILE)
        from ...llm.identity import weights_digest

        return weights_digest(str(self.folder), None)


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """All parts of a drafter, in the order of its name."""

    name: str
    """The whole name, as the user wrote it."""
    parts: tuple[DrafterPart, ...]

    @property
    def kind(self) -> str:
        """The kinds of all parts: `redrafter+suffix+recycling`."""
        return SEPARATOR.join(part.name for part in self.parts)

    @property
    def folders(self) -> list[Path]:
        """The folders of the trained parts."""
        return [part.folder for part in self.parts if part.folder is not None and not part.is_model]

    @property
    def with_weights(self) -> list[DrafterPart]:
        """The parts that have weights: trained drafters, and models."""
        return [part for part in self.parts if part.folder is not None]

    @property
    def weights(self) -> str:
        """Digests of the parts' weights, joined by `+`; empty if all parts are training-free."""
        return SEPARATOR.join(part.weights for part in self.with_weights)

    def merged_with(self, names: Iterable[str]) -> "DrafterParts":
        """Return this drafter merged with training-free ones, except those that it has already."""
        present = {part.name for part in self.parts}
        added = [DrafterPart(name=name) for name in names if name not in present]
        return DrafterParts(name=SEPARATOR.join([self.name, *(part.name for part in added)]), parts=(*self.parts, *added))

    def is_merged(self, options: Mapping[str, Any]) -> bool:
        """Return whether it drafts merged trees.

        It does if it has several parts, or if `options` has a pace: then it is a merge of one.
        """
        return len(self.parts) > 1 or "pace" in options

    def split_options(self, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Split run-time options by the part that has them; those of the merged tree are at MERGE.

        An option named after a part contains options of that part: `{suffix: {depth: 8}}`. All
        others belong to the merged tree, or else to the trained part if there is one. Raises
        ValueError for an option that no part has.
        """
        from ..merged import MergedConfig

        names = [part.name for part in self.parts]
        if not self.is_merged(options):
            return {names[0]: {**options}}
        # 1. The options of the merged tree, and those under a part's name.
        of_merge = {field.name for field in fields(MergedConfig)}
        split = {name: options.get(name, {}) for name in names}
        split[MERGE] = {name: value for name, value in options.items() if name in of_merge}
        for name in names:
            if not isinstance(split[name], Mapping):
                raise ValueError(f"the option {name} of {self.name} is {split[name]!r}; give {name}: {{OPTION: VALUE}}")
        # 2. The others belong to the trained part, if there is one.
        others = {name: value for name, value in options.items() if name not in of_merge and name not in names}
        trained = self.with_weights
        known = {field.name for field in fields(trained[0].config({}))} if len(trained) == 1 else set()
        if unknown := sorted(others.keys() - known):
            of_trained = f"; and those of {trained[0].name}: {', '.join(sorted(known))}" if known else ""
            raise ValueError(
                f"the drafter {self.name} has no option {', '.join(unknown)}; it has {', '.join(sorted(of_merge))}; for "
                f"one part {' or '.join(names)}, as {names[-1]}: {{OPTION: VALUE}}{of_trained}"
            )
        if others:
            split[trained[0].name] = {**others, **split[trained[0].name]}
        return split

    def configs(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configurations of the parts, and of the merged tree, with these options.

        Reads no weights. Raises ValueError for options that no part has, for wrong values, and for
        parts that can't be merged.
        """
        from ..merge_sources import require_mergeable
        from ..merged import MergedConfig
        from ..registry import checked_options

        split = self.split_options(options)
        configs = {part.name: part.config(split[part.name]) for part in self.parts}
        if MERGE in split:
            configs[MERGE] = checked_options(self.kind, MergedConfig, split[MERGE], section="drafter")
            # A model's vocabulary is fitted to the target's.
            vocab_sizes = {str(folder): read_drafter_config(folder).target.vocab_size for folder in self.folders}
            require_mergeable(len(self.parts), vocab_sizes)
        return configs

    def described(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the options that hold where `options` sets no others, for records.

        Of `options` only the pace counts, which decides whether the drafter's trees are merged.
        """
        configs = self.configs({name: value for name, value in options.items() if name == "pace"})
        saved = {name: asdict(config) for name, config in configs.items()}
        if MERGE not in saved:
            return saved[self.parts[0].name]
        return {**saved.pop(MERGE), **saved}


def packaged_parts(folder: Path) -> DrafterParts:
    """Return the parts that a package drafts with: its trained drafter, and those of `merge.json`.

    Raises ValueError for a folder without either, and for a name that isn't known.
    """
    names = read_dataclass(MergeFile, folder / MERGE_FILE).training_free if (folder / MERGE_FILE).is_file() else []
    if unknown := [name for name in names if name not in TRAINING_FREE_NAMES]:
        known = ", ".join(TRAINING_FREE_NAMES)
        raise ValueError(f"{folder / MERGE_FILE} names {', '.join(unknown)}, and there are {known}; package it again")
    if names and not (folder / CONFIG_FILE).is_file():
        return DrafterParts(name=SEPARATOR.join(names), parts=tuple(DrafterPart(name=name) for name in names))
    return parse_drafter_name(folder).merged_with(names)


def parse_drafter_name(name: str | Path | DrafterParts, revision: str | None = None, **hub_options: Any) -> DrafterParts:
    """Find the parts of a drafter; download those on the Hub.

    A `Path` is a folder. `hub_options` are those of `resolve_drafter`. Raises ValueError for a part
    that is neither a folder nor a known name, for a part twice, and for a folder that holds no
    whole drafter.
    """
    if isinstance(name, DrafterParts):
        return name
    # 1. The kind and the folder of each part.
    options = {"revision": revision, **hub_options}
    found_parts = [_find_part(text, options, is_folder=isinstance(name, Path)) for text in split_name(name)]
    if twice := repeated_names(str(part.folder or part.name) for part in found_parts):
        raise ValueError(f"the drafter {name} has {', '.join(twice)} twice; give each part once")
    # 2. Another name for a second drafter of a kind.
    parts, counts = [], Counter[str]()
    for part in found_parts:
        counts[part.name] += 1
        parts.append(part if counts[part.name] == 1 else replace(part, name=f"{part.name}_{counts[part.name]}"))
    return DrafterParts(name=str(name), parts=tuple(parts))


def _find_part(text: str, hub_options: Mapping[str, Any], *, is_folder: bool) -> DrafterPart:
    """Return the part that a text names, by its kind. Downloads it if it is on the Hub."""
    if not is_folder:
        if text in TRAINING_FREE_NAMES:
            return DrafterPart(name=text)
        if (model := model_of(text)) is not None:
            return DrafterPart(name="draft_model", folder=resolve_model(model, **hub_options).resolve(), is_model=True)
        if "/" not in text and not Path(text).is_dir():
            raise ValueError(
                f"the drafter {text!r} is neither a folder, nor a name on the Hub (user/name), nor one of "
                f"{', '.join(TRAINING_FREE_NAMES)}, nor a model ({MODEL_PREFIX}DIR){nearest_name(text)}"
            )
    folder = resolve_drafter(text, **hub_options).resolve()
    kind = read_drafter_config(folder).kind
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder / WEIGHTS_FILE} is missing; its export is incomplete: copy or export it again")
    return DrafterPart(name=kind, folder=folder)
