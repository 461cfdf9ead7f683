"""The configuration of a run: the schema that Hydra composes a recipe into."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ..data.choices import TEACHER_TEMPERATURE
from ..data.config import DataConfig
from ..data.fields import OPTIONS, Distinct, NumThreads, Seed, one_of, problems_of, raise_problems, under
from ..data.paths import expand_home, require_paths
from ..distill.config import DistillConfig
from ..eval.config import EvalConfig, stage_problems
from ..models.export.config import ExportConfig
from ..models.llm.config import TargetConfig
from ..train.config import TrainConfig
from .inputs import named_paths

if TYPE_CHECKING:
    from ..models.drafters.saved.build import DrafterSpec

Parsed = TypeVar("Parsed")
STAGES = ("distill", "train", "eval", "export")
DEMO_TARGET = Path(__file__).parents[1] / "models" / "demo_target"


def _plain_word(name: str) -> str:
    if name in ("", "..") or Path(name).name != name:
        raise PydanticCustomError("plain_word", "names a folder, so it must be one plain word")
    return name


@dataclass(kw_only=True, config=OPTIONS)
class Variant:
    """Changes that a variant makes to the run's options."""

    train: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    settings: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None


VARIANT_OPTIONS = tuple(Variant.__dataclass_fields__)


@dataclass(kw_only=True, config=OPTIONS)
class RunConfig:
    """One run: distil a target's answers, train drafters on them, evaluate and export them."""

    name: Annotated[str, AfterValidator(_plain_word)]
    """The recipe's name, which names the run's folder."""
    output_dir: Annotated[str, Field(min_length=1)]
    """The run's folder. A stage that is finished there is skipped; an interrupted one is resumed."""
    stages: Distinct[Annotated[str, one_of(*STAGES)]] = field(default_factory=lambda: list(STAGES))
    """Stages to run: distill, train, eval, export. They always run in this order."""
    plan: bool = False
    """Only print the time, memory and disk that the unfinished stages need, as `--plan` does.
    Speeds are measured for some seconds, the other figures are computed. Nothing is written."""
    seed: Seed = 0
    """Seed of all random numbers. A section's own seed replaces it for that section."""
    num_threads: NumThreads | None = None
    """CPU threads per process, unless a section sets its own number. null: the launcher's choice
    under `accelerate launch`, torch's default otherwise."""
    mixed_precision: Annotated[str, one_of("bf16", "no")] | None = None
    """Mixed precision of the training: bf16 or no. None keeps the launcher's setting."""
    target: TargetConfig
    """The target: the large model whose decoding gets faster. It isn't trained."""
    data: DataConfig
    """The conversations to train on."""
    drafter: dict[str, Any]
    """The drafter to train: `kind` selects it, the other keys are options of that kind."""
    distill: DistillConfig
    train: TrainConfig
    eval: EvalConfig
    export: ExportConfig = field(default_factory=ExportConfig)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several drafters from one distillation, compared in one table. Each has a name, and its changes
    to `train` or `drafter`.

    A `drafter` of another kind inherits no options of `drafter`. Its `settings` replace `eval.settings`."""

    def __post_init__(self) -> None:
        problems = []
        if self.target.tensor_parallel and "eval" in self.stages:
            problems.append(
                f"target.tensor_parallel is on, and stages is {self.stages}: evaluation runs in one process, which must hold "
                "the whole target. Set stages=[distill,train], and evaluate with target.device_map=auto or a quantised target"
            )
        if self.target.stage_layers is not None and (whole := [name for name in self.stages if name != "eval"]):
            problems.append(
                f"target.stage_layers is {self.target.stage_layers}, and {' and '.join(whole)} need the whole target in one "
                "process: set stages=[eval], and leave target.stage_layers out of the run of the other stages"
            )
        if self.target.device_map is not None and (others := [name for name in self.stages if name != "eval"]):
            problems.append(
                f"target.device_map is {self.target.device_map}, for evaluation only, and stages has {' and '.join(others)}: "
                "set stages=[eval], and target.tensor_parallel=true in the run of the other stages"
            )
        parsed, parsing_problems = parse_variants(
            self.variants, lambda changes: _parse_variant(changes, self.train, self.drafter)
        )
        problems += parsing_problems
        self._drafter_runs = [self._make_drafter_run(variant, train, spec) for variant, (train, spec) in parsed.items()]
        if "eval" in self.stages:
            kinds = {run.drafter.kind for run in self._drafter_runs}
            problems += stage_problems(self.eval, self.target.stage_layers, kinds)
        for variant, drafter_run in zip(parsed, self._drafter_runs, strict=True):
            problems += self._drafter_problems(variant, drafter_run)
        raise_problems(list(dict.fromkeys(problems)))
        raise_problems(self._export_problems() if "export" in self.stages else [])

    def drafter_runs(self) -> "list[DrafterRun]":
        """Return the drafters to train: one, or one per variant."""
        return self._drafter_runs

    def _make_drafter_run(self, variant: str, train: TrainConfig, spec: "DrafterSpec") -> "DrafterRun":
        changes = self.variants.get(variant, {})
        settings = changes.get("settings", [{}] if _is_other_kind(changes, self.drafter) else self.eval.settings)
        folder = Path(self.output_dir) / "variants" / variant if variant else Path(self.output_dir)
        return DrafterRun(
            train=train, drafter=spec, settings=settings, train_dir=folder / "train", drafter_dir=folder / "drafter"
        )

    def _drafter_problems(self, variant: str, run: "DrafterRun") -> list[str]:
        """Check options that depend on each other: the labels' horizon and the drafter's settings."""
        from ..models.drafters.saved.build import require_horizon  # imports torch and transformers

        section, problems = f"variants.{variant}" if variant else "", []
        if "distill" in self.stages:
            try:
                require_horizon(run.drafter, self.distill.horizon)
            except ValueError as error:
                problems += [under(section, line, VARIANT_OPTIONS) for line in str(error).splitlines()]
            if run.train.teacher == "top_k" and self.distill.top_logprobs is None:
                line = "train.teacher is top_k, and distill.top_logprobs is null; set a number of tokens, or train.teacher=full"
                problems.append(under(section, line, VARIANT_OPTIONS))
            if run.train.mixes_teacher_and_labels and self.distill.label_temperature not in (0, 1):
                line = TEACHER_TEMPERATURE.format(self.distill.label_temperature)
                problems.append(under(section, line, VARIANT_OPTIONS))
        temperature: float = getattr(run.drafter.config, "temperature", 0.0)
        if self.eval.merge and temperature:
            problems.append(
                f"eval.merge is {self.eval.merge}, and the drafter's temperature is {temperature:g}: drafts "
                "that are drawn at random can't be merged; set eval.merge=[], or the drafter's temperature to 0"
            )
        name = f"{section}.settings" if "settings" in self.variants.get(variant, {}) else "eval.settings"
        for index, setting in enumerate(run.settings):
            try:
                run.drafter.with_options(setting)
            except ValueError as error:
                lines = [re.sub(r"^drafter(\.|: )", "", line) for line in str(error).splitlines()]
                problems += [under(f"{name}[{index}]", line, setting) for line in lines]
            if setting in run.settings[:index]:
                problems.append(f"{name} has the setting {setting} twice; remove one")
        return problems

    def _export_problems(self) -> list[str]:
        from ..models.export.registry import ENGINES, FORMATS, holds_kind  # imports torch and transformers

        problems = []
        if self.target.tensor_parallel and self.export.formats:
            problems.append("target.tensor_parallel is on, and export.formats needs the whole target; run `outrider export`")
        if self.variants and self.export.repo is not None:
            problems.append(
                f"export.repo is {self.export.repo}, and there are {len(self.variants)} variants; leave export.repo out, and "
                "run `outrider push` for the variant that you choose"
            )
        kinds = sorted({run.drafter.kind for run in self.drafter_runs()})
        return problems + [
            f"export.formats has {name}, which is for the kind "
            f"{' or '.join(ENGINES[name]) if name in ENGINES else FORMATS[name].kind}, and the drafter is {', '.join(kinds)}; "
            f"remove {name}"
            for name in self.export.formats
            if not any(holds_kind(name, kind) for kind in kinds)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """One drafter of a run: its training options, settings and folders."""

    train: TrainConfig
    drafter: "DrafterSpec"
    settings: list[dict[str, Any]]
    """Run-time options of the drafter; each setting is evaluated."""
    train_dir: Path
    drafter_dir: Path


def parse_variants(variants: dict[str, Any], parse: Callable[[dict[str, Any]], Parsed]) -> tuple[dict[str, Parsed], list[str]]:
    """Parse the changes of each variant, and collect the problems of the wrong ones.

    Without variants there is one drafter, named "".
    """
    # 1. Parse each variant.
    parsed: dict[str, Parsed] = {}
    problems = []
    for variant, changes in (variants or {"": {}}).items():
        try:
            parsed[variant] = parse(changes)
        except ValueError as error:
            problems += [(variant, line) for line in str(error).splitlines()]
    if not problems:
        return parsed, []

    # 2. A problem of the run's own options is in every variant: report it once, under the run's name.
    try:
        parse({})
        shared = set()
    except ValueError as error:
        shared = set(str(error).splitlines())
    lines = [
        line if not variant or line in shared else under(f"variants.{variant}", line, (*VARIANT_OPTIONS, *variants[variant]))
        for variant, line in problems
    ]
    return parsed, list(dict.fromkeys(lines))


def _parse_variant(changes: dict[str, Any], train: Any, drafter: dict[str, Any]) -> tuple[TrainConfig, "DrafterSpec"]:
    """Apply a variant's changes to the run's options.

    Raises one ValueError with a line for each problem.
    """
    from ..models.drafters.saved.build import parse_drafter  # imports torch and transformers

    variant, problems = _variant(changes), []
    try:
        merged = _parse_train(changes, train)
    except ValueError as error:
        problems += str(error).splitlines()
    try:
        spec = parse_drafter(variant.drafter if _is_other_kind(changes, drafter) else {**drafter, **variant.drafter})
    except ValueError as error:
        problems += str(error).splitlines()
    raise_problems(problems)
    return merged, spec


def _parse_train(changes: dict[str, Any], train: Any) -> TrainConfig:
    """Apply a variant's changes to the run's training options. Imports no torch."""
    variant = _variant(changes)
    replaced = {name: None for name, value in variant.train.items() if isinstance(value, dict)}  # whole, not merged
    try:
        merged: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), train, replaced, variant.train))
    except (ValidationError, OmegaConfBaseException) as error:
        raise ValueError("\n".join(_lines(error, "train"))) from None
    return cast(TrainConfig, merged)


def _variant(changes: dict[str, Any]) -> Variant:
    try:
        return Variant(**changes)
    except ValidationError as error:
        raise ValueError("\n".join(problems_of(error))) from None


def _is_other_kind(changes: dict[str, Any], drafter: dict[str, Any]) -> bool:
    return bool(changes.get("drafter", {}).get("kind", drafter.get("kind")) != drafter.get("kind"))


def to_run_config(composed: DictConfig) -> RunConfig:
    """Convert a composed configuration to a RunConfig.

    Raises one ValueError with all problems, each under its option's full name.
    """
    try:
        problems = list(missing_values(composed).values())
        if not problems:
            # The sections are checked before the drafters, whose checks import torch.
            values = checked_values(composed)
            if problems := field_problems(values):
                problems += parse_variants(values["variants"], lambda changes: _parse_train(changes, values["train"]))[1]
            else:
                return TypeAdapter(RunConfig).validate_json(json.dumps(values))
    except ValidationError as error:
        problems = problems_of(error)
    except OmegaConfBaseException as error:
        problems = _lines(error)
    raise ValueError(problem_report(problems))


def field_problems(values: dict[str, Any]) -> list[str]:
    """Return a line for each wrong value of a composed configuration's fields.

    Imports no torch, and so leaves out the section `export`, whose checks do.
    """
    problems = []
    for name, hint in get_type_hints(RunConfig, include_extras=True).items():
        if name not in values or name == "export":
            continue
        try:
            TypeAdapter(hint).validate_json(json.dumps(values[name]))
        except ValidationError as error:
            problems += problems_of(error, name)
    return problems


def checked_values(composed: DictConfig) -> dict[str, Any]:
    """Return the values of a composed config, with `~` expanded. Imports no torch.

    Raises ValueError with all local paths that don't exist, and OmegaConfBaseException for an
    interpolation without a value.
    """
    values: Any = expand_home(OmegaConf.to_container(composed, resolve=True, enum_to_str=True))
    require_paths(named_paths(values))
    return dict(values)


def missing_values(composed: DictConfig) -> dict[str, str]:
    """Return a message for each option without its required value, by the option's name."""
    return {key: f"{key}: Missing mandatory value; give {key}=VALUE" for key in sorted(OmegaConf.missing_keys(composed))}


def problem_report(problems: list[str]) -> str:
    """Return one message with all problems of a configuration."""
    # Sections interpolate the run's seed: report a wrong seed once.
    problems = [line for line in dict.fromkeys(problems) if line.partition(".")[2] not in problems]
    layout = TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    lines = "\n".join(map(layout.fill, problems))
    return f"{len(problems)} problem(s) in the configuration:\n{lines}"


def _lines(error: ValidationError | OmegaConfBaseException, section: str = "") -> list[str]:
    """Return a line for each problem, with the option's full name."""
    if isinstance(error, ValidationError):
        return problems_of(error, section)
    name = f"{section}.{error.full_key}" if section else error.full_key
    return [f"{name}: {str(error.msg or error).splitlines()[0]}"]


def register() -> None:
    """Make the schema and the `${demo_target:}` resolver known to Hydra."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("demo_target", lambda: str(DEMO_TARGET), replace=True)
