"""What a run is made of: the schema that Hydra composes a recipe into."""

import dataclasses
import json
from dataclasses import field
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..data.config import DataConfig
from ..data.fields import OPTIONS, Distinct, Seed, one_of, problems_of, raise_problems
from ..distill.config import DistillConfig
from ..eval.config import EvalConfig
from ..models.export.config import ExportConfig
from ..models.target.config import TargetConfig
from ..train.config import TrainConfig

if TYPE_CHECKING:
    from ..models.drafters.saved.build import DrafterSpec

STAGES = ("distill", "train", "eval", "export")
DEMO_TARGET = Path(__file__).parents[1] / "models" / "demo_target"


@dataclass(kw_only=True, config=OPTIONS)
class RunConfig:
    """One run: distil a target's answers, train drafters on them, evaluate those, make of them what others read."""

    name: str
    """The recipe's name, which names the run's folder."""
    output_dir: str
    """The run's folder; a finished stage in it is skipped, an interrupted one goes on."""
    stages: Distinct[Annotated[str, one_of(*STAGES)]] = field(default_factory=lambda: list(STAGES))
    """Which of distill, train, eval, export to run, in this order."""
    plan: bool = False
    """Only tell what the stage distill would take (`--plan` says the same): tokens, forwards, time and bytes on disk."""
    seed: Seed = 0
    """Of everything that draws at random, where a section doesn't say otherwise."""
    num_threads: PositiveInt | None = None
    """CPU threads per process, where a section doesn't say otherwise; None leaves the launcher's choice, which is mostly 1."""
    mixed_precision: Annotated[str, one_of("bf16", "no")] | None = None
    """Type that drafters are trained in: bf16 or no; None leaves the launcher's choice."""
    target: TargetConfig
    """The frozen model."""
    data: DataConfig
    """The conversations."""
    drafter: dict[str, Any]
    """`kind` picks the drafter; the rest is that drafter's own configuration."""
    distill: DistillConfig
    train: TrainConfig
    eval: EvalConfig
    export: ExportConfig = field(default_factory=ExportConfig)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several drafters from one distillation, compared in one table: a name, and what it changes in `train` or `drafter`.

    A `drafter` of another kind stands for itself, and has `settings` of its own in place of `eval.settings`."""

    def __post_init__(self) -> None:
        problems = []
        if self.plan and "distill" not in self.stages:
            problems.append(
                f"plan tells what the stage distill would take, and stages is {self.stages}; add it, or leave plan out"
            )
        if self.name in ("", "..") or Path(self.name).name != self.name:
            problems.append(f"name is {self.name!r}; it names a folder, so it must be one plain word")
        if self.target.tensor_parallel and "eval" in self.stages:
            problems.append(
                f"target.tensor_parallel is on, and stages is {self.stages}: evaluation runs in one process, which must hold "
                "the whole target. Set stages=[distill,train], and evaluate with a quantised target or in a serving engine"
            )
        self._drafter_runs: list[DrafterRun] = []
        for variant in self.variants or [""]:
            try:
                self._drafter_runs.append(self._make_drafter_run(variant))
            except (ValueError, OmegaConfBaseException) as error:
                problems += [f"variants.{variant}: {line}" if variant else line for line in _lines(error, "train.")]
        raise_problems(problems)
        raise_problems(self._export_problems() if "export" in self.stages else [])

    def drafter_runs(self) -> "list[DrafterRun]":
        """The drafters to train: one, or one per variant."""
        return self._drafter_runs

    def _make_drafter_run(self, variant: str) -> "DrafterRun":
        # Imports torch and transformers, which composing a recipe needs not.
        from ..models.drafters.saved.build import parse_drafter, require_horizon

        changes = self.variants.get(variant, {})
        if unknown := sorted(changes.keys() - {"train", "drafter", "settings"}):
            raise ValueError(f"a variant can't change {', '.join(unknown)}, only train, drafter and settings")
        # 1. The options: the run's with the variant's changes.
        train = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(self.train), changes.get("train", {})))
        assert isinstance(train, TrainConfig)
        options = changes.get("drafter", {})
        is_other_kind = options.get("kind", self.drafter.get("kind")) != self.drafter.get("kind")
        settings = changes.get("settings", [{}] if is_other_kind else self.eval.settings)
        spec = parse_drafter(options if is_other_kind else {**self.drafter, **options})
        # 2. What only shows together: the labels' length, and run-time options of the drafter.
        if "distill" in self.stages:
            require_horizon(spec, self.distill.horizon)
            if train.teacher == "top_k" and self.distill.top_logprobs is None:
                raise ValueError(
                    "train.teacher is top_k, and distill.top_logprobs is null; say how many tokens to store, or set full"
                )
        for index, setting in enumerate(settings):
            try:
                spec.with_options(setting)
            except ValueError as error:
                raise ValueError(f"eval.settings[{index}]: {error}") from error
            if setting in settings[:index]:
                raise ValueError("eval.settings has the same setting twice; give each once")
        # 3. The folders.
        folder = Path(self.output_dir) / "variants" / variant if variant else Path(self.output_dir)
        return DrafterRun(
            train=train, drafter=spec, settings=settings, train_dir=folder / "train", drafter_dir=folder / "drafter"
        )

    def _export_problems(self) -> list[str]:
        from ..models.export.registry import FORMATS  # imports torch and transformers

        problems = []
        if self.target.tensor_parallel and self.export.formats:
            problems.append("target.tensor_parallel is on, and export.formats needs the whole target; run `outrider export`")
        if self.variants and self.export.repo is not None:
            problems.append(
                f"export.repo is {self.export.repo}, and there are {len(self.variants)} variants: `outrider push` the one that "
                "you choose"
            )
        kinds = sorted({run.drafter.kind for run in self.drafter_runs()})
        return problems + [
            f"export.formats has {name}, which is for the kind {FORMATS[name].kind}, and the drafter is {', '.join(kinds)}"
            for name in self.export.formats
            if FORMATS[name].kind not in kinds
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """How one drafter of a run is trained, and where it lies."""

    train: TrainConfig
    drafter: "DrafterSpec"
    settings: list[dict[str, Any]]
    """Run-time options to evaluate it with."""
    train_dir: Path
    drafter_dir: Path


def to_run_config(composed: DictConfig) -> RunConfig:
    """The typed config of a composed one. Raises one ValueError with all problems, each under its option's full name."""
    problems = [f"{key}: Missing mandatory value" for key in sorted(OmegaConf.missing_keys(composed))]
    try:
        if not problems:
            values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
            return TypeAdapter(RunConfig).validate_json(json.dumps(values))
    except (ValidationError, OmegaConfBaseException) as error:
        problems += _lines(error)
    layout = TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    lines = "\n".join(map(layout.fill, problems))
    raise ValueError(f"{len(problems)} problem(s) in the configuration:\n{lines}")


def _lines(error: Exception, section: str = "") -> list[str]:
    """A line for each problem; of pydantic's and OmegaConf's errors, under the option's name in this section."""
    if isinstance(error, ValidationError):
        return [section + line for line in problems_of(error)]
    if isinstance(error, OmegaConfBaseException):
        return [f"{section}{error.full_key}: {str(error.msg or error).splitlines()[0]}"]
    return str(error).splitlines()


def register() -> None:
    """Make the schema and the `${demo_target:}` resolver known to Hydra."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("demo_target", lambda: str(DEMO_TARGET), replace=True)
