"""Drafters by their specification: fresh, or with the weights of a trained one (see `START_FROM`)."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ....data.fields import problems_of
from ....data.files import sha256_file
from ....data.manifest import TargetIdentity
from ...target.hf_target import HFTarget
from ..base import TrainableDrafter
from ..registry import DRAFTERS
from .download import resolve_drafter
from .folder import CONFIG_FILE, WEIGHTS_FILE, DrafterFile, count_tensors, read_drafter_config, read_weights, require_counts

logger = logging.getLogger(__name__)

COUNTS = ("num_blocks", "num_heads", "num_hidden_layers", "num_layers")
"""Options of which each counts layers or heads with a tensor each at least."""
START_FROM = "start_from"
"""An option of every drafter: the folder of a trained one, or its name on the Hub. Its kind, form and weights are what training
starts from; of the other options only those of drafting may differ. Its target may have been another one of the same shape: the
same model before it was fine-tuned or quantised, say."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A drafter's kind and typed configuration, and the folder of the trained drafter whose weights it starts from."""

    kind: str
    config: Any
    start_from: Path | None = None

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any], start_from: Path | None = None) -> "DrafterSpec":
        """Check a kind and its options. Raises ValueError for an unknown kind or option, and for every wrong value."""
        if kind not in DRAFTERS:
            raise ValueError(f"drafter.kind is {kind!r}; there are: {', '.join(sorted(DRAFTERS))}")
        config_class = DRAFTERS[kind].Config
        known = {field.name for field in fields(config_class)}
        if unknown := sorted(set(options) - known):
            raise ValueError(f"the drafter {kind} has no option {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
        try:
            return cls(kind=kind, config=config_class(**options), start_from=start_from)
        except ValidationError as error:
            raise ValueError("\n".join(problems_of(error, "drafter"))) from None

    def with_options(self, options: Mapping[str, Any]) -> "DrafterSpec":
        """The same drafter that drafts with other `options`. Raises ValueError for options that would change the weights."""
        runtime, current = self.config.RUNTIME_FIELDS, asdict(self.config)
        if forbidden := sorted(options.keys() & current.keys() - runtime):
            raise ValueError(
                f"{', '.join(forbidden)} can't be changed when a {self.kind} is loaded; {', '.join(sorted(runtime))} can"
            )
        return self.of(self.kind, {**current, **options}, self.start_from)


def parse_drafter(options: Mapping[str, Any]) -> DrafterSpec:
    """The drafter that these options describe: its `kind`, maybe `start_from`, and the kind's own.

    Downloads the drafter to start from where that is one of the Hub's. Raises ValueError for an unknown kind, option or value,
    and where there is no drafter to start from.
    """
    folder = _start_folder(options)
    form = {name: value for name, value in options.items() if name != START_FROM}
    if folder is not None:
        form = _options_of(folder, read_drafter_config(folder), form)
    return DrafterSpec.of(form.pop("kind", None), form, folder)


def saved_spec(saved: DrafterFile, options: Mapping[str, Any] | None = None) -> DrafterSpec:
    """The drafter that a folder holds, with `options` that change how it drafts. Raises ValueError as `with_options` does."""
    return DrafterSpec.of(saved.kind, saved.drafter).with_options(options or {})


def build_drafter(spec: DrafterSpec, target: HFTarget) -> TrainableDrafter:
    """A drafter for `target` to be trained, in float32 on the target's device: fresh, or with the weights that it starts from.

    Raises ValueError where the drafter to start from doesn't fit the target.
    """
    if spec.start_from is None:
        return DRAFTERS[spec.kind].for_target(spec.config, target).to(target.device)
    _require_same_shape(spec.start_from, read_drafter_config(spec.start_from).target, target.identity)
    return drafter_of_weights(spec, spec.start_from, target).to(target.device)


def drafter_of_weights(spec: DrafterSpec, folder: Path, target: HFTarget) -> TrainableDrafter:
    """The drafter of this configuration, in float32 on the CPU, with the weights in `folder`.

    Raises ValueError where they are damaged, or of other names or shapes.
    """
    kind, config = spec.kind, spec.config
    counts = {**asdict(config), **(getattr(config, "architecture", None) or {})}
    require_counts(counts, COUNTS, count_tensors(folder / WEIGHTS_FILE), folder / CONFIG_FILE)
    # Trained weights need no beginning with the target's, which a quantised one couldn't give.
    unbegun = replace(config, init="random") if getattr(config, "init", None) == "target" else config
    tensors = read_weights(folder / WEIGHTS_FILE, shapes_of(kind, unbegun, target, folder / CONFIG_FILE))
    drafter = DRAFTERS[kind].for_target(unbegun, target)
    if unbegun is not config:
        drafter.config = config
    drafter.load_state_dict(tensors)
    drafter.check_weights()
    return drafter


def shapes_of(kind: str, config: Any, target: HFTarget, path: Path) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors on the meta device: a config of absurd sizes, read from `path`, must not take memory."""
    try:
        with torch.device("meta"):
            return DRAFTERS[kind].for_target(config, target).state_dict()
    except RuntimeError as error:
        raise ValueError(f"a drafter of the sizes in {path} can't be made ({error})") from error


def require_horizon(spec: DrafterSpec, horizon: int) -> None:
    """Raise ValueError where labels of `horizon` tokens are too short to train this drafter."""
    DRAFTERS[spec.kind].require_horizon(spec.config, horizon)


def describe_untrained_depths(spec: DrafterSpec, horizon: int) -> str | None:
    """Describe a search that goes deeper than labels of `horizon` tokens train; None if it doesn't."""
    option = DRAFTERS[spec.kind].DEPTH_OPTION
    if option is None or getattr(spec.config, option) < horizon:
        return None
    depth, trained = getattr(spec.config, option), horizon - 1
    return (
        f"drafter.{option} is {depth}, and labels of distill.horizon {horizon} tokens train {trained} depths of the "
        f"{spec.kind}, since the first token is the target's own choice: set drafter.{option}={trained}, or "
        f"distill.horizon={depth + 1}"
    )


def starting_weights(spec: DrafterSpec) -> str | None:
    """Digest of the weights that training starts from, where those are neither fresh nor the target's."""
    if spec.start_from is not None:
        return sha256_file(spec.start_from / WEIGHTS_FILE)
    return DRAFTERS[spec.kind].starting_weights(spec.config)


def _start_folder(config: Mapping[str, Any]) -> Path | None:
    """The folder of the drafter to start from, if there is to be one; a download where it is one of the Hub's."""
    folder = config.get(START_FROM)
    if folder is not None and not isinstance(folder, str | Path):
        raise ValueError(
            f"drafter.{START_FROM} is {folder!r}; give the `drafter/` folder of a finished training, "
            "its name on the Hub, or null"
        )
    return None if folder is None else resolve_drafter(folder)


def _options_of(folder: Path, saved: DrafterFile, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a trained drafter is, with `options` that change how it drafts. Raises ValueError for those that change its form."""
    form: dict[str, Any] = {"kind": saved.kind, **saved.drafter}
    may_change = DRAFTERS[saved.kind].Config.RUNTIME_FIELDS if saved.kind in DRAFTERS else frozenset()
    changed = [
        f"{name} is {value!r} and there {form[name]!r}"
        for name, value in options.items()
        if name in form and name not in may_change and value != form[name]
    ]
    if changed:
        raise ValueError(
            f"drafter.{START_FROM} is {folder}, and the options describe another drafter: {'; '.join(changed)}. Leave those "
            f"options out (drafter=trained has none), or drop drafter.{START_FROM} to train from fresh weights"
        )
    return {**form, **options}


def _require_same_shape(folder: Path, trained_for: TargetIdentity, target: TargetIdentity) -> None:
    """Raise ValueError where a drafter's weights can't serve this target; warn where its tokens may mean something else."""
    problems = [
        f"{name} {getattr(trained_for, name)} there, {getattr(target, name)} here"
        for name in ("hidden_size", "vocab_size")
        if getattr(trained_for, name) != getattr(target, name)
    ]
    if problems:
        raise ValueError(
            f"the drafter in {folder} was trained for {trained_for.name}, and {target.name} is of another shape: "
            f"{'; '.join(problems)}. Its weights can't be adapted to that; drop drafter.{START_FROM} to train from fresh ones, "
            "or start from a drafter of a target of this width and vocabulary"
        )
    if trained_for.tokenizer_sha256 != target.tokenizer_sha256:
        logger.warning(
            "the drafter in %s was trained with another tokenizer (that of %s): unless only a few special tokens differ, the "
            "same ids mean other texts, and fresh weights are the better start",
            folder,
            trained_for.name,
        )
