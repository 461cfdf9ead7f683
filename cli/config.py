"""What a run is made of: the schema that Hydra composes a recipe into."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..data.config import DataConfig
from ..distill.config import DistillConfig
from ..eval.config import EvalConfig
from ..models.drafters.saved.build import parse_drafter_config, require_horizon
from ..models.export.config import ExportConfig
from ..models.export.registry import find_format
from ..models.target.config import TargetConfig
from ..train.config import TrainConfig

STAGES = ("distill", "train", "eval", "export")
DEMO_TARGET = Path(__file__).parents[1] / "models" / "demo_target"


@dataclass(kw_only=True)
class RunConfig:
    """One run: distil a target's answers, train drafters on them, evaluate those, make of them what others read."""

    name: str
    """The recipe's name, which names the run's folder."""
    output_dir: str
    """The run's folder; a finished stage in it is skipped, an interrupted one goes on."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Which of distill, train, eval, export to run, in this order."""
    plan: bool = False
    """Only tell what the stage distill would take (`--plan` says the same): tokens, forwards, time and bytes on disk."""
    seed: int = 0
    """Of everything that draws at random, where a section doesn't say otherwise."""
    num_threads: int | None = None
    """CPU threads per process, where a section doesn't say otherwise; None leaves the launcher's choice, which is mostly 1."""
    mixed_precision: str | None = None
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
        problems = [f"stages has {stage!r}; there are: {', '.join(STAGES)}" for stage in self.stages if stage not in STAGES]
        if self.plan and "distill" not in self.stages:
            problems.append(
                f"plan tells what the stage distill would take, and stages is {self.stages}; add it, or leave plan out"
            )
        if not self.stages or len(set(self.stages)) < len(self.stages):
            problems.append(f"stages is {self.stages}; name at least one of {', '.join(STAGES)}, and each once")
        if self.name in ("", "..") or Path(self.name).name != self.name:
            problems.append(f"name is {self.name!r}; it names a folder, so it must be one plain word")
        if self.target.tensor_parallel and "eval" in self.stages:
            problems.append(
                f"target.tensor_parallel is on, and stages is {self.stages}: evaluation runs in one process, which must hold "
                "the whole target. Set stages=[distill,train], and evaluate with a quantised target or in a serving engine"
            )
        if not 0 <= self.seed < 2**32:
            problems.append(f"seed is {self.seed}; it must be between 0 and {2**32 - 1}")
        if self.num_threads is not None and self.num_threads < 1:
            problems.append(f"num_threads is {self.num_threads}; it must be at least 1, or null for the launcher's choice")
        if self.mixed_precision not in (None, "bf16", "no"):
            problems.append(
                f"mixed_precision is {self.mixed_precision!r}; it must be bf16 or no, or null for the launcher's choice"
            )
        for name in self.variants or [""]:
            problems += self._drafter_problems(name)
        _raise(problems)
        _raise(self._export_problems() if "export" in self.stages else [])

    def _export_problems(self) -> list[str]:
        problems = []
        if self.target.tensor_parallel and self.export.formats:
            problems.append("target.tensor_parallel is on, and export.formats needs the whole target; run `outrider export`")
        if self.variants and self.export.repo is not None:
            problems.append(
                f"export.repo is {self.export.repo}, and there are {len(self.variants)} variants: `outrider push` the one that "
                "you choose"
            )
        kinds = sorted({parse_drafter_config(drafter.drafter)[0] for drafter in self.drafter_runs()})
        return problems + [
            f"export.formats has {name}, which is for the kind {find_format(name).kind}, and the drafter is {', '.join(kinds)}"
            for name in self.export.formats
            if find_format(name).kind not in kinds
        ]

    def _drafter_problems(self, variant: str) -> list[str]:
        try:
            drafter = self.drafter_run(variant)
            _, config = parse_drafter_config(drafter.drafter)
            if "distill" in self.stages:
                require_horizon(drafter.drafter, self.distill.horizon)
                if drafter.train.teacher == "top_k" and self.distill.top_logprobs is None:
                    raise ValueError(
                        "train.teacher is top_k, and distill.top_logprobs is null; say how many tokens to store, or set full"
                    )
            for index, setting in enumerate(drafter.settings):
                parse_drafter_config({**drafter.drafter, **setting})
                if fixed := sorted(set(setting) - config.RUNTIME_FIELDS):
                    raise ValueError(f"eval.settings can't change {', '.join(fixed)}, which the weights depend on")
                if setting in drafter.settings[:index]:
                    raise ValueError("eval.settings has the same setting twice; give each once")
        except (ValueError, OmegaConfBaseException) as error:
            return [f"variants.{variant}: {error}" if variant else f"drafter: {error}"]
        return []

    def drafter_runs(self) -> "list[DrafterRun]":
        """The drafters to train: one, or one per variant."""
        return [self.drafter_run(name) for name in self.variants or [""]]

    def drafter_run(self, variant: str) -> "DrafterRun":
        """One drafter's training; the variant "" is the run's own."""
        changes = self.variants.get(variant, {})
        if unknown := sorted(changes.keys() - {"train", "drafter", "settings"}):
            raise ValueError(f"a variant can't change {', '.join(unknown)}, only train, drafter and settings")
        train = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(self.train), changes.get("train", {})))
        assert isinstance(train, TrainConfig)
        drafter = changes.get("drafter", {})
        is_other_kind = drafter.get("kind", self.drafter.get("kind")) != self.drafter.get("kind")
        folder = Path(self.output_dir) / "variants" / variant if variant else Path(self.output_dir)
        return DrafterRun(
            train=train,
            drafter=drafter if is_other_kind else {**self.drafter, **drafter},
            settings=changes.get("settings", [{}] if is_other_kind else self.eval.settings),
            train_dir=folder / "train",
            drafter_dir=folder / "drafter",
        )


@dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """How one drafter of a run is trained, and where it lies."""

    train: TrainConfig
    drafter: Mapping[str, Any]
    settings: list[dict[str, Any]]
    """Run-time options to evaluate it with."""
    train_dir: Path
    drafter_dir: Path


def to_run_config(composed: DictConfig) -> RunConfig:
    """The typed config of a composed one. Raises one ValueError with the problems of all sections together."""
    values: dict[str, Any] = {}
    problems = []
    for name in (section.name for section in fields(RunConfig)):
        try:
            value = composed[name]
            values[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key or name}: {str(error.msg or error).splitlines()[0]}")
        except ValueError as error:
            problems.append(str(error))
    _raise(problems)
    return RunConfig(**values)


def register() -> None:
    """Make the schema and the `${demo_target:}` resolver known to Hydra."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("demo_target", lambda: str(DEMO_TARGET), replace=True)


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{len(problems)} problem(s) in the configuration:" + "".join(f"\n  - {problem}" for problem in problems)
        )
