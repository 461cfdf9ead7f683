"""What to evaluate, and how."""

from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS, Distinct, NonNegativeInt, PositiveInt, Seed, one_of, raise_problems

ACCEPTANCES = ("exact", "typical")
TOO_LONG_POLICIES = ("skip", "error")


@dataclass(kw_only=True, config=OPTIONS)
class SuiteConfig:
    """One set of prompts."""

    name: str
    """mt_bench, alpaca_eval, spec_bench, human_eval, gsm8k or stdlib; any other name for a file of your own prompts."""
    path: str | None = None
    """A local file of the suite; None reads it from the Hub (or, for stdlib, from the running Python)."""
    revision: str | None = None
    """Commit of the data set on the Hub; None is the one that the suite is pinned to."""
    limit: PositiveInt | None = None
    """At most this many prompts, drawn by the seed; None takes all."""


@dataclass(kw_only=True, config=OPTIONS)
class EvalConfig:
    """One evaluation: every suite with plain decoding and with every drafter in every setting."""

    suites: Annotated[list[SuiteConfig], Field(min_length=1)]
    """The prompt sets, in the order of the table."""
    settings: Annotated[list[dict[str, Any]], Field(min_length=1)] = field(default_factory=lambda: [{}])
    """Run-time options of the drafter, such as {beam_width: 4, beam_length: 5}; each one is a method of the table."""
    max_new_tokens: PositiveInt = 128
    """Tokens per answer, at most; a stop token ends it earlier."""
    temperatures: Distinct[NonNegativeFloat] = field(default_factory=lambda: [0.0])
    """All methods decode at each of them: 0 is greedy decoding, above it the target's distribution is sampled."""
    acceptance: Annotated[str, one_of(*ACCEPTANCES)] = "exact"
    """`exact`: greedy acceptance, or speculative sampling, which change nothing. `typical`: above temperature 0 keep what the
    target finds typical (arXiv 2401.10774, section 2.3.1), which is faster and NOT lossless."""
    batch_sizes: Distinct[PositiveInt] = field(default_factory=lambda: [1])
    """Prompts decoded together. All methods decode at each of these sizes, and are held against plain decoding at the same."""
    warmup_prompts: NonNegativeInt = 1
    """Prompts that every method answers, briefly and untimed, before the first measurement; in batches, rounded up to whole
    ones."""
    repeats: PositiveInt = 1
    """Times that every prompt is measured with every method."""
    profile_prompts: NonNegativeInt = 3
    """Prompts per suite decoded once more with phase timers on, for the time split and the ceiling; in batches, rounded up to
    whole ones; 0 is off."""
    too_long: Annotated[str, one_of(*TOO_LONG_POLICIES)] = "skip"
    """What to do with a prompt that leaves no room for the answer in the target's context window: skip (counted) or error."""
    memory_bandwidth_gbs: PositiveFloat | None = None
    """Gigabytes per second that the roofline assumes; None measures it."""
    seed: Seed = 0
    """Of the prompts that a limit draws, of what is sampled, and of the bootstrap."""
    num_threads: PositiveInt | None = None
    """CPU threads while measuring; None leaves torch's choice."""
    pack_weights: bool = True
    """On a CPU in float32: measure baseline and drafters with linear layers packed for few rows, as a good CPU engine has them.
    Takes the weights' memory once more."""

    def __post_init__(self) -> None:
        problems = []
        if len({suite.name for suite in self.suites}) < len(self.suites):
            problems.append("a suite is named twice; name each once")
        if self.acceptance == "typical" and not any(self.temperatures):
            problems.append("acceptance is typical, which needs a temperature above 0; raise temperatures, or set exact")
        raise_problems(problems)
