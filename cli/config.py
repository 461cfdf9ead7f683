"""The configuration of a run: a target, data, drafters, and what the stages do with them."""

import dataclasses
import json
import re
from dataclasses import asdict, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ..data.config import SELF, TEACHER_TEMPERATURE, DataConfig
from ..data.fields import MAX_COUNT, OPTIONS, Distinct, NumThreads, Seed, one_of, problems_of, raise_problems, under
from ..distill.config import DistillConfig
from ..eval.config import EvalConfig, stage_problems
from ..models.drafters.options import DRAFTER_OPTIONS
from ..models.drafters.shared_options import START_FROM
from ..models.export.config import ExportConfig
from ..models.llm.config import TargetConfig
from ..train.config import TrainConfig

if TYPE_CHECKING:
    from ..models.drafters.registry import DrafterSpec

STAGES = ("distill", "train", "eval", "export")


def _plain_word(name: str) -> str:
    if name in ("", "..") or Path(name).name != name:
        raise PydanticCustomError("plain_word", "names a folder, so it must be one plain word")
    return name


def checked_drafter(options: dict[str, Any]) -> dict[str, Any]:
    """Return a drafter's options. Raises ValueError for an unknown kind, unknown options and wrong values."""
    kind, own = options.get("kind"), {name: value for name, value in options.items() if name not in ("kind", START_FROM)}
    if kind is None and options.get(START_FROM) is not None:
        return options  # the kind is that of the trained drafter, which is read later
    if kind is None:
        raise ValueError(f"the kind is missing; give drafter.kind=KIND, one of {', '.join(DRAFTER_OPTIONS)}")
    if not isinstance(kind, str) or kind not in DRAFTER_OPTIONS:
        close = get_close_matches(str(kind), DRAFTER_OPTIONS, 1)
        meant = f"did you mean {close[0]}? T" if close else "t"
        raise ValueError(f"kind is {kind!r}; {meant}here are: {', '.join(DRAFTER_OPTIONS)}")
    try:
        TypeAdapter(DRAFTER_OPTIONS[kind]).validate_json(json.dumps(own))
    except ValidationError as error:
        lines = problems_of(error, known=[field.name for field in dataclasses.fields(DRAFTER_OPTIONS[kind])])
        text = "\n".join(lines).replace("no such option", f"no such option of the kind {kind}")
        raise ValueError(text) from None
    return options


@dataclass(kw_only=True, config=OPTIONS)
class Variant:
    """Changes that a variant makes to the run's options."""

    train: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    settings: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None

    def drafter_options(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Return the drafter's options. A drafter of another kind inherits none of the run's."""
        return self.drafter if self.is_other_kind(shared) else {**shared, **self.drafter}

    def is_other_kind(self, shared: dict[str, Any]) -> bool:
        """Whether the drafter is of another kind than the run's."""
        return bool(self.drafter.get("kind", shared.get("kind")) != shared.get("kind"))

    def train_config(self, shared: TrainConfig | None) -> TrainConfig:
        """Return the run's training options with the variant's changes.

        Without the run's options, which may be wrong, the changes are checked alone.
        """
        values = {**({"steps": MAX_COUNT - 1} if shared is None else asdict(shared)), **self.train}
        try:
            return TypeAdapter(TrainConfig).validate_json(json.dumps(values))
        except ValidationError as error:
            raise ValueError("\n".join(problems_of(error, "train", known=TRAIN_OPTIONS))) from None


TRAIN_OPTIONS = [f"train.{field.name}" for field in dataclasses.fields(TrainConfig)]
VARIANT_OPTIONS = tuple(field.name for field in dataclasses.fields(Variant))


def checked_variant(variant: Variant, info: Any) -> Variant:
    """Return a variant. Raises ValueError if it doesn't fit the run's drafter and training.

    `info` is pydantic's ValidationInfo, which beartype can't check. Its context has the run's drafter
    where that is wrong: then only the variant's own options are reported.
    """
    problems, drafter = [], info.data.get("drafter", info.context)
    try:
        variant.train_config(info.data.get("train"))
    except ValueError as error:
        problems += str(error).splitlines()
    try:
        if isinstance(drafter, dict) or variant.drafter.get("kind"):
            checked_drafter(variant.drafter_options(drafter if isinstance(drafter, dict) else {}))
    except ValueError as error:
        lines, has_drafter = str(error).splitlines(), "drafter" in info.data
        problems += [
            f"drafter.{line}" for line in lines if has_drafter or re.split(r"\W", line, maxsplit=1)[0] in variant.drafter
        ]
    raise_problems(problems)
    return variant


@dataclass(kw_only=True, config=OPTIONS)
class RunConfig:
    """One run: distil a target's answers, train drafters on them, evaluate and export them."""

    name: Annotated[str, AfterValidator(_plain_word)]
    """The recipe's name, which names the run's folder."""
    output_dir: Annotated[str, Field(min_length=1)]
    """The run's folder. A stage that is finished there is skipped; an interrupted one is resumed."""
    stages: Distinct[Annotated[str, one_of(*STAGES)]] = field(default_factory=lambda: list(STAGES))
    """Stages to run: distill, train, eval, export. They always run in this order."""
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
    drafter: Annotated[dict[str, Any], AfterValidator(checked_drafter)]
    """The drafter to train: `kind` selects it, the other keys are options of that kind."""
    distill: DistillConfig
    train: TrainConfig
    eval: EvalConfig
    export: ExportConfig = field(default_factory=ExportConfig)
    variants: dict[str, Annotated[Variant, AfterValidator(checked_variant)]] = field(default_factory=dict)
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
        if self.data.train_on != "all" and self.distill.engine is not None:
            problems.append(
                f"data.train_on is {self.data.train_on!r}, and distill.engine regenerates: all answers of the target are "
                "trained; leave data.train_on out"
            )
        writes = any(source.source == SELF for source in self.data.all_sources)
        if writes and self.distill.engine is None and "distill" in self.stages:
            problems.append(
                f"data.source is {SELF}, and distill.engine is null; set distill.engine=decoder, which the target writes with"
            )
        if writes and self.distill.engine == "vllm":
            problems.append(
                f"data.source is {SELF}, which samples questions, and distill.engine is vllm, which writes greedily only; set "
                "distill.engine=openai, or write the questions first and give them as data.source=messages"
            )
        self._drafter_runs: list[DrafterRun] = []
        for name, variant in (self.variants or {"": Variant()}).items():
            try:
                self._drafter_runs.append(run := self._make_drafter_run(name, variant))
                problems += self._drafter_problems(name, variant, run)
            except ValueError as error:
                section = f"variants.{name}" if name else ""
                problems += [under(section, line, VARIANT_OPTIONS) for line in str(error).splitlines()]
        if "eval" in self.stages:
            kinds = {run.drafter.kind for run in self._drafter_runs}
            problems += stage_problems(self.eval, self.target.stage_layers, kinds)
        raise_problems(list(dict.fromkeys(problems)))
        raise_problems(self._export_problems() if "export" in self.stages else [])

    def drafter_runs(self) -> "list[DrafterRun]":
        """Return the drafters to train: one, or one per variant."""
        return self._drafter_runs

    def _make_drafter_run(self, name: str, variant: Variant) -> "DrafterRun":
        from ..models.drafters.saved.build import parse_drafter  # imports torch and transformers

        settings = variant.settings or ([{}] if variant.is_other_kind(self.drafter) else self.eval.settings)
        folder = Path(self.output_dir) / "variants" / name if name else Path(self.output_dir)
        return DrafterRun(
            train=variant.train_config(self.train),
            drafter=parse_drafter(variant.drafter_options(self.drafter)),
            settings=settings,
            train_dir=folder / "train",
            drafter_dir=folder / "drafter",
        )

    def _drafter_problems(self, name: str, variant: Variant, run: "DrafterRun") -> list[str]:
        """Check options that depend on each other: the labels' horizon and the drafter's settings."""
        from ..models.drafters.saved.build import require_horizon
        from ..models.drafters.saved.low_rank import is_merged

        section, lines = f"variants.{name}" if name else "", list[str]()
        if "distill" in self.stages:
            try:
                require_horizon(run.drafter, self.distill.horizon)
            except ValueError as error:
                lines += str(error).splitlines()
            if run.train.teacher == "top_k" and self.distill.top_logprobs is None:
                lines.append(
                    "train.teacher is top_k, and distill.top_logprobs is null; set a number of tokens, or train.teacher=full"
                )
            if run.train.mixes_teacher_and_labels and self.distill.label_temperature not in (0, 1):
                lines.append(TEACHER_TEMPERATURE.format(self.distill.label_temperature))
        start = run.drafter.start_from
        for key, usual in (("lora_rank", None), ("change_share", 1.0)):
            if (value := getattr(run.train, key)) != usual and start is None:
                lines.append(
                    f"train.{key} is {value}, which changes a trained drafter; set drafter.start_from, or train.{key}="
                    f"{'null' if usual is None else usual}"
                )
        if run.train.lora_rank is not None and start is not None and is_merged(start):
            lines.append(
                "drafter.start_from is a low-rank change itself, and train.lora_rank changes a whole drafter; start from its "
                "base, or set train.lora_rank=null"
            )
        problems = [under(section, line, VARIANT_OPTIONS) for line in lines]
        option = f"{section}.settings" if variant.settings else "eval.settings"
        for index, setting in enumerate(run.settings):
            try:
                run.drafter.in_setting(setting)
            except ValueError as error:
                lines = [re.sub(r"^drafter(\.|: )", "", line) for line in str(error).splitlines()]
                problems += [under(f"{option}[{index}]", line, setting) for line in lines]
            if setting in run.settings[:index]:
                problems.append(f"{option} has the setting {setting} twice; remove one")
        return problems

    def _export_problems(self) -> list[str]:
        from ..models.export.registry import ENGINES, FORMATS, format_for  # imports torch and transformers

        problems = []
        if self.target.tensor_parallel and self.export.formats:
            problems.append("target.tensor_parallel is on, and export.formats needs the whole target; run `outrider export`")
        kinds = sorted({run.drafter.kind for run in self.drafter_runs()})
        return problems + [
            f"export.formats has {name}, which is for the kind "
            f"{' or '.join(ENGINES[name]) if name in ENGINES else FORMATS[name].kind}, and the drafter is {', '.join(kinds)}; "
            f"remove {name}"
            for name in self.export.formats
            if not any(format_for(name, kind) for kind in kinds)
        ]


@dataclass(kw_only=True, config=OPTIONS)
class RunOptions:
    """Run a recipe: distil a target's answers, train drafters, evaluate and export them.

    The recipe is one that ships with outrider (outrider recipes), your own YAML file, or several:
    outrider run redrafter_vicuna7b adapt puts the later on top of the earlier. target=NAME,
    data=NAME, drafter=NAME and eval=NAME choose packaged settings. `accelerate launch -m
    outrider.train conf=RECIPE` does the same in processes of your own launch.
    """

    conf: list[str] = field(default_factory=list)
    """The recipe, by name or file."""
    show: bool = False
    """Only print the composed configuration."""
    plan: bool = False
    """Only print the time, memory and disk that the unfinished stages need. Speeds are measured for
    some seconds, the other figures are computed. Nothing is written."""
    launch: str | None = None
    """Run in several processes: a launch file of accelerate by name or path. Options of `accelerate
    launch` may follow it: --launch one_node --num_processes 4"""

    POSITIONAL: ClassVar = ("conf",)


@dataclass(kw_only=True, config=OPTIONS)
class ForecastOptions:
    """Forecast what training a recipe's drafters is worth: tokens per step, speedup, hours.

    The target labels a small part of the data, each drafter learns from three sizes of it, and its curve is
    continued to the whole recipe. Steps are timed at several batch sizes. Nothing of the recipe's own folder
    changes but its subfolder forecast. An interrupted forecast starts again.
    """

    conf: list[str] = field(default_factory=list)
    """The recipe, by name or file, as for `outrider run`."""
    minutes: Annotated[float, Field(ge=1, lt=MAX_COUNT)] = 10.0
    """About how long to measure. More minutes make the intervals narrower."""

    POSITIONAL: ClassVar = ("conf",)


RECIPE_COMMANDS = {"run": RunOptions, "forecast": ForecastOptions}
"""The commands whose options are those of a recipe, and a few of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """One drafter of a run: its training options, settings and folders."""

    train: TrainConfig
    drafter: "DrafterSpec"
    settings: list[dict[str, Any]]
    """Run-time options of the drafter; each setting is evaluated."""
    train_dir: Path
    drafter_dir: Path
