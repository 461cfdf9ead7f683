"""Which drafters there are. A new one is a module, a row here, and a YAML in `conf/drafter/`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...data.files import parse_dataclass
from ..hf_target import HFTarget
from ..interfaces import TrainableDrafter
from .draft_model import DraftModel
from .eagle import Eagle
from .eagle3 import Eagle3
from .medusa import Medusa
from .redrafter import Redrafter

DRAFTERS: dict[str, type[TrainableDrafter]] = {
    "draft_model": DraftModel,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "redrafter": Redrafter,
}


def build_drafter(config: Mapping[str, Any], target: HFTarget) -> TrainableDrafter:
    """A fresh drafter for `target`, in float32 on the target's device. `config["kind"]` picks it, the rest is its own config.

    Raises ValueError for an unknown kind or key.
    """
    kind, drafter_config = parse_drafter_config(config)
    return DRAFTERS[kind].for_target(drafter_config, target).to(target.device)


def parse_drafter_config(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The kind and its typed config. Raises ValueError for an unknown kind or key, before anything is loaded."""
    options = dict(config)
    kind = options.pop("kind", None)
    if kind not in DRAFTERS:
        raise ValueError(f"drafter.kind is {kind!r}; there are: {', '.join(sorted(DRAFTERS))}")
    config_class = DRAFTERS[kind].Config
    known = {field.name for field in fields(config_class)}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"the drafter {kind} has no option {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    # Types are checked as in a file: `drafter.rnn=off` would arrive as a text, and a text is true.
    return kind, parse_dataclass(config_class, options, Path(f"drafter {kind}"))


def parse_runtime_config(config: Mapping[str, Any], runtime_options: Mapping[str, Any]) -> tuple[str, Any]:
    """The kind and typed config of a drafter whose weights are there, with options that change how it drafts.

    Raises ValueError as `parse_drafter_config` does, and for options that would change the weights.
    """
    kind, parsed = parse_drafter_config(config)
    if forbidden := sorted(set(runtime_options) - set(parsed.RUNTIME_FIELDS)):
        raise ValueError(
            f"{', '.join(forbidden)} can't be changed when a {kind} is loaded; {', '.join(sorted(parsed.RUNTIME_FIELDS))} can"
        )
    return parse_drafter_config({**config, **runtime_options})  # their types, too


def require_horizon(config: Mapping[str, Any], horizon: int) -> None:
    """Raise ValueError where labels of `horizon` tokens are too short to train this drafter."""
    kind, drafter_config = parse_drafter_config(config)
    DRAFTERS[kind].require_horizon(drafter_config, horizon)


def starting_weights(config: Mapping[str, Any]) -> str | None:
    """Digest of the weights that training starts from, where those are a model's other than the target."""
    kind, drafter_config = parse_drafter_config(config)
    return DRAFTERS[kind].starting_weights(drafter_config)


def kind_of(drafter: TrainableDrafter) -> str:
    """The registry's name of a drafter."""
    return next(kind for kind, drafter_class in DRAFTERS.items() if type(drafter) is drafter_class)
