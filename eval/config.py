"""Configuration of the evaluation stage, and of model cards."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from ..data.fields import (
    OPTIONS,
    Distinct,
    NonNegativeInt,
    PositiveInt,
    Seed,
    SmallCount,
    different,
    one_of,
    raise_problems,
)
from ..data.paths import MODEL_PREFIX, SEPARATOR, TRAINING_FREE_NAMES, nearest_name
from ..data.raw_records import SUFFIXES as FILE_SUFFIXES
from ..models.llm.config import check_method
from .records.names import PIPELINED

ACCEPTANCES = ("exact", "typical")
SYNCHRONOUS, BOTH = "synchronous", "both"
DECODINGS = (SYNCHRONOUS, PIPELINED, BOTH)
INNER_STATES = ("block", "eagle3")
"""The kind of drafters that read what enters inner layers of the target."""
TrainingFree = Annotated[list[Annotated[str, one_of(*TRAINING_FREE_NAMES)]], AfterValidator(different)]


def _untrained(name: str) -> str:
    """Return the name of drafters that need no training, several joined by +; ValueError for other names."""
    if set(name.split(SEPARATOR)) <= set(TRAINING_FREE_NAMES) or name.startswith(MODEL_PREFIX):
        return name
    names = ", ".join(TRAINING_FREE_NAMES)
    raise ValueError(f"must be one of {names}, several joined by {SEPARATOR}, or {MODEL_PREFIX}MODEL{nearest_name(name)}")


Untrained = Annotated[list[Annotated[str, AfterValidator(_untrained)]], AfterValidator(different)]


@dataclass(kw_only=True, config=OPTIONS)
class SuiteConfig:
    """A set of prompts."""

    name: str
    """mt_bench, alpaca_eval, spec_bench, human_eval, gsm8k, languages, manual or stdlib; any other
    name stands for a file of your own prompts."""
    path: str | None = None
    """A local file of the suite. None reads it from the Hub, at the commit that the suite is pinned to;
    stdlib and manual come from the running Python, and languages ships with outrider. spec_bench needs it."""
    limit: PositiveInt | None = None
    """At most this many prompts, sampled with the seed; None takes all."""


def suite_of(text: str) -> SuiteConfig:
    """Build the suite that a text names: a published suite, or a file of prompts.

    A suite from a file is named after the file. The file of a published suite, such as
    `mt_bench.jsonl`, thus has the suite's name. Raises ValueError for a file named after `stdlib`, which has no file.
    """
    if not text.endswith(FILE_SUFFIXES):
        return SuiteConfig(name=text)
    name = re.sub(r"(\.(json|jsonl|ndjson|parquet))?(\.gz)?$", "", Path(text).name)
    if name == "stdlib":
        raise ValueError(f"the suite {text!r} would be named stdlib, which is a suite without a file; rename the file")
    return SuiteConfig(name=name, path=text)


def _suite_of_text(value: Any) -> Any:
    return suite_of(value) if isinstance(value, str) else value


Suites = Annotated[list[Annotated[SuiteConfig, BeforeValidator(_suite_of_text)]], Field(min_length=1)]


@dataclass(kw_only=True, config=OPTIONS)
class EvalConfig:
    """One evaluation: every suite, with plain decoding and with every drafter in every setting."""

    suites: Suites
    """The prompt sets, in the order of the table. Each is a mapping, or the path of a file of your
    own prompts."""
    settings: Annotated[list[dict[str, Any]], Field(min_length=1)] = field(default_factory=lambda: [{}])
    """Run-time options of the drafter, such as {beam_width: 4, beam_length: 5}. Each entry is a
    method of the table."""
    baselines: Untrained = field(default_factory=list)
    """Drafters without training that are compared too: prompt_lookup, suffix, recycling, several of
    these joined by +, or a small causal LM as it is (`draft_model:DIR` or `draft_model:user/name`)."""
    merge: TrainingFree = field(default_factory=list)
    """Training-free drafters that each trained drafter is merged with, as a further method: [suffix,
    recycling]. It drafts by expected gain, with the first of the drafter's settings, except
    tree_nodes (after tuning, with the options as saved)."""
    max_new_tokens: PositiveInt = 128
    """Tokens per answer, at most; a stop token ends it earlier."""
    temperatures: Distinct[NonNegativeFloat] = field(default_factory=lambda: [0.0])
    """All methods decode at each temperature: 0 is greedy decoding, above 0 tokens are sampled from
    the target's distribution."""
    decode: Annotated[str, one_of(*DECODINGS)] = SYNCHRONOUS
    """How drafters decode. `synchronous`: draft a tree, then wait for the target. `pipelined`: keep
    drafting while the stages of the target read earlier drafts; this needs `target.stage_layers`.
    `both`: all methods as `synchronous` measures them, then each drafter once more, pipelined. Plain
    decoding is the baseline of all."""
    acceptance: Annotated[str, one_of(*ACCEPTANCES)] = "exact"
    """`exact`: greedy acceptance or speculative sampling, which are lossless. `typical`: above
    temperature 0, accept tokens that are typical for the target (arXiv 2401.10774, section 2.3.1),
    which is faster and NOT lossless."""
    batch_sizes: Distinct[SmallCount] = field(default_factory=lambda: [1])
    """Prompts decoded together. All methods decode at each batch size, and are compared with plain
    decoding at the same batch size."""
    repeats: SmallCount = 3
    """Number of times that every prompt is measured with every method; the median time counts."""
    profile_prompts: NonNegativeInt = 3
    """Prompts per suite that are decoded twice more: with phase timers on, for the time split and the
    ceiling, and with a record of every draft, for `outrider explain`; rounded up to whole batches; 0
    is off."""
    seed: Seed = 0
    """Seed of the prompts that a limit samples, of sampled answers, and of the bootstrap."""

    def __post_init__(self) -> None:
        problems = []
        problems += _repeated_suites(self.suites)
        if self.acceptance == "typical" and not any(self.temperatures):
            problems.append("acceptance is typical, which needs a temperature above 0; add one, or set acceptance to exact")
        if self.decode != SYNCHRONOUS and self.acceptance == "typical":
            problems.append(
                f"decode is {self.decode}, where drafts depend on the clock, and acceptance is typical, where answers depend "
                f"on drafts; set acceptance=exact, or decode={SYNCHRONOUS}"
            )
        raise_problems(problems)


@dataclass(kw_only=True, config=OPTIONS)
class CardOptions:
    """What a model card is written from, beside the drafter's own files."""

    records: list[Path] = field(default_factory=list)
    """Folders of evaluations; their figures go into the model card."""
    run: Path | None = None
    """Folder of the training run; its data and cost go into the card."""
    certificate: Path | None = None
    """Certificate that `outrider certify` wrote."""
    licence: str | None = None
    """The drafter's licence, by the Hub's name: apache-2.0."""
    base_model: str | None = None
    """Hub id of the target, if training read it from a directory."""
    quantization: Annotated[Any, AfterValidator(check_method)] = None
    """Quantisation of the target in the card's code, as target.quantization. null: as in training."""
    repo: str | None = None
    """Hub id of the drafter, for the card's commands."""


def stage_problems(config: EvalConfig, stage_layers: Sequence[int] | None, kinds: Collection[str] = ()) -> list[str]:
    """List what an evaluation can't measure with a target in these stages, or without stages.

    `kinds` are those of the drafters.
    """
    if stage_layers is None:
        if config.decode == SYNCHRONOUS:
            return []
        problem = (
            f"decode is {config.decode}, which needs a target in stages, and stage_layers is not set; give the layers of each "
            f"stage (target.stage_layers=[4,4]), or decode={SYNCHRONOUS}"
        )
        return [problem]
    problems, stages = [], f"stage_layers is {list(stage_layers)}"
    problems += [
        f"{stages}, and a drafter is {kind}, which reads the inputs of the target's inner layers: they are in other "
        "processes; choose another drafter, or leave the stages out"
        for kind in sorted(set(INNER_STATES) & set(kinds))
    ]
    if config.batch_sizes != [1]:
        problems.append(
            f"{stages}, and batch_sizes is {config.batch_sizes}: stages decode one prompt at a time; set batch_sizes=[1]"
        )
    return problems


def _repeated_suites(suites: list[SuiteConfig]) -> list[str]:
    """List a problem for each name that several suites share, with the suites' files."""
    problems = []
    for name, count in Counter(suite.name for suite in suites).items():
        files = [suite.path for suite in suites if suite.name == name and suite.path is not None]
        if count > 1:
            paths = f" ({', '.join(files)})" if files else ""
            problems.append(f"{count} suites have the name {name!r}{paths}; rename a file, or give each suite once")
    return problems
