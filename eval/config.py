"""What to evaluate, and how."""

import re
from collections import Counter
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, GetPydanticSchema, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, Distinct, NonNegativeInt, PositiveInt, Seed, one_of, raise_problems
from ..data.raw_records import SUFFIXES as FILE_SUFFIXES

ACCEPTANCES = ("exact", "typical")
TOO_LONG_POLICIES = ("skip", "error")


@dataclass(kw_only=True, config=OPTIONS)
class SuiteConfig:
    """One set of prompts."""

    name: str
    """mt_bench, alpaca_eval, spec_bench, human_eval, gsm8k or stdlib; any other name for a file of
    your own prompts."""
    path: str | None = None
    """A local file of the suite; None reads it from the Hub (or, for stdlib, from the running
    Python)."""
    revision: str | None = None
    """Commit of the data set on the Hub; None is the one that the suite is pinned to."""
    limit: PositiveInt | None = None
    """At most this many prompts, drawn by the seed; None takes all."""


def suite_of(text: str, **options: Any) -> SuiteConfig:
    """Return the suite that a text names.

    A published one, or a file of prompts, which is named after the file. `options` are the suite's
    others. A file of a published suite has that suite's name, such as `mt_bench.jsonl`. Raises
    ValueError for a file named after `stdlib`, which is no file.
    """
    if not text.endswith(FILE_SUFFIXES):
        return SuiteConfig(name=text, **options)
    name = re.sub(r"(\.jsonl?|\.parquet)?(\.gz)?$", "", Path(text).name)
    if name == "stdlib":
        raise ValueError(f"the suite {text!r} would be named stdlib, which is no file of prompts; give the file another name")
    return SuiteConfig(name=name, path=text, **options)


def _suite_of_text(value: Any) -> Any:
    return suite_of(value) if isinstance(value, str) else value


_Suite = Annotated[SuiteConfig, BeforeValidator(_suite_of_text)]
if TYPE_CHECKING:
    Suites = list[SuiteConfig]
else:  # Hydra, which reads the first type, would take no text for a SuiteConfig; pydantic reads the second.
    _pydantics = GetPydanticSchema(lambda _, handler: handler(list[_Suite]))
    Suites = Annotated[list[Any], list[_Suite], _pydantics, Field(min_length=1)]  # `outrider options` describes the second


@dataclass(kw_only=True, config=OPTIONS)
class EvalConfig:
    """One evaluation: every suite with plain decoding and with every drafter in every setting."""

    suites: Suites
    """The prompt sets, in the order of the table: mappings, or for a file of your own prompts its
    path alone."""
    settings: Annotated[list[dict[str, Any]], Field(min_length=1)] = field(default_factory=lambda: [{}])
    """Run-time options of the drafter, such as {beam_width: 4, beam_length: 5}; each one is a
    method of the table."""
    max_new_tokens: PositiveInt = 128
    """Tokens per answer, at most; a stop token ends it earlier."""
    temperatures: Distinct[NonNegativeFloat] = field(default_factory=lambda: [0.0])
    """All methods decode at each of them: 0 is greedy decoding, above it the target's distribution
    is sampled."""
    acceptance: Annotated[str, one_of(*ACCEPTANCES)] = "exact"
    """`exact`: greedy acceptance, or speculative sampling, which change nothing. `typical`: above
    temperature 0 keep what the target finds typical (arXiv 2401.10774, section 2.3.1), which is
    faster and NOT lossless."""
    batch_sizes: Distinct[PositiveInt] = field(default_factory=lambda: [1])
    """Prompts decoded together. All methods decode at each of these sizes, and are held against
    plain decoding at the same."""
    warmup_prompts: NonNegativeInt = 1
    """Prompts that every method answers, briefly and untimed, before the first measurement; in
    batches, rounded up to whole ones."""
    repeats: PositiveInt = 1
    """Times that every prompt is measured with every method."""
    profile_prompts: NonNegativeInt = 3
    """Prompts per suite decoded once more with phase timers on, for the time split and the ceiling;
    in batches, rounded up to whole ones; 0 is off."""
    too_long: Annotated[str, one_of(*TOO_LONG_POLICIES)] = "skip"
    """What to do with a prompt that leaves no room for the answer in the target's context window:
    skip (counted) or error."""
    memory_bandwidth_gbs: PositiveFloat | None = None
    """Gigabytes per second that the roofline assumes; None measures it."""
    seed: Seed = 0
    """Of the prompts that a limit draws, of what is sampled, and of the bootstrap."""
    num_threads: PositiveInt | None = None
    """CPU threads while measuring; None leaves torch's choice."""
    pack_weights: bool = True
    """On a CPU in float32: measure baseline and drafters with linear layers packed for few rows, as
    a good CPU engine has them. Takes the weights' memory once more."""

    def __post_init__(self) -> None:
        problems = []
        problems += _repeated_suites(self.suites)
        if self.acceptance == "typical" and not any(self.temperatures):
            problems.append("acceptance is typical, which needs a temperature above 0; raise temperatures, or set exact")
        raise_problems(problems)


def _repeated_suites(suites: list[SuiteConfig]) -> list[str]:
    """Return a problem for each name that several suites have, with their files."""
    problems = []
    for name, count in Counter(suite.name for suite in suites).items():
        files = [suite.path for suite in suites if suite.name == name and suite.path is not None]
        if count > 1:
            which = f" ({', '.join(files)})" if files else ""
            problems.append(f"{count} suites have the name {name!r}{which}; rename a file, or name each suite once")
    return problems
