"""The registry of drafters, and the specification of one.

A new kind is a module and a row here. If it is trained, it has a file in conf/drafter/, too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...data.fields import problems_of
from .base import TrainableDrafter
from .block import Block
from .draft_model import DraftModel
from .eagle import Eagle
from .eagle3 import Eagle3
from .medusa import Medusa
from .merged import MergedConfig
from .mtp import Mtp
from .prompt_lookup import PromptLookup
from .recycling import Recycling
from .redrafter import Redrafter
from .suffix import Suffix
from .training_free import TrainingFreeDrafter

DRAFTERS: dict[str, type[TrainableDrafter]] = {
    "block": Block,
    "draft_model": DraftModel,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "mtp": Mtp,
    "redrafter": Redrafter,
}
TRAINING_FREE: dict[str, type[TrainingFreeDrafter]] = {
    "prompt_lookup": PromptLookup,
    "recycling": Recycling,
    "suffix": Suffix,
}


def kind_of(drafter: TrainableDrafter) -> str:
    """Return the registry's name of a drafter."""
    return next(kind for kind, drafter_class in DRAFTERS.items() if type(drafter) is drafter_class)


def checked_options(kind: str, config_class: type[Any], options: Mapping[str, Any], *, section: str) -> Any:
    """Return the options of a drafter as its dataclass.

    Raises ValueError that lists unknown options and wrong values. Messages name values by their
    `section`.
    """
    known = {field.name for field in fields(config_class)}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"the drafter {kind} has no option {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    try:
        return config_class(**options)
    except ValidationError as error:
        raise ValueError("\n".join(problems_of(error, section))) from None


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A drafter's kind and configuration, and the folder of its initial weights."""

    kind: str
    config: Any
    start_from: Path | None = None

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any], start_from: Path | None = None) -> "DrafterSpec":
        """Check a kind and its options.

        Raises ValueError that lists unknown options and wrong values.
        """
        if not isinstance(kind, str) or kind not in DRAFTERS:
            raise ValueError(f"drafter.kind is {kind!r}; there are: {', '.join(sorted(DRAFTERS))}")
        config = checked_options(kind, DRAFTERS[kind].Config, options, section="drafter")
        return cls(kind=kind, config=config, start_from=start_from)

    def with_options(self, options: Mapping[str, Any]) -> "DrafterSpec":
        """Return the same drafter with other drafting options.

        Raises ValueError for options that would change the weights.
        """
        runtime, current = self.config.RUNTIME_FIELDS, asdict(self.config)
        if forbidden := sorted(options.keys() & current.keys() - runtime):
            raise ValueError(
                f"{', '.join(forbidden)} can't be changed when a {self.kind} is loaded; {', '.join(sorted(runtime))} can"
            )
        return self.of(self.kind, {**current, **options}, self.start_from)

    def in_setting(self, setting: Mapping[str, Any]) -> "DrafterSpec":
        """Return the drafter in a setting of an evaluation: with a `pace` it drafts as a merge of one.

        Raises ValueError as `with_options` does, and for wrong options of the merge.
        """
        if "pace" not in setting:
            return self.with_options(setting)
        names = {field.name for field in fields(MergedConfig)}
        of_merge = {name: value for name, value in setting.items() if name in names}
        checked_options("merge", MergedConfig, of_merge, section="drafter")
        return self.with_options({name: value for name, value in setting.items() if name not in names})
