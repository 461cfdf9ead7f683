"""What to evaluate, and how."""

import math
from dataclasses import dataclass, field
from typing import Any

ACCEPTANCES = ("exact", "typical")
TOO_LONG_POLICIES = ("skip", "error")


@dataclass(kw_only=True)
class SuiteConfig:
    """One set of prompts."""

    name: str
    """mt_bench, alpaca_eval, spec_bench, human_eval, gsm8k or stdlib; any other name for a file of your own prompts."""
    path: str | None = None
    """A local file of the suite; None reads it from the Hub (or, for stdlib, from the running Python)."""
    revision: str | None = None
    """Commit of the data set on the Hub; None is the one that the suite is pinned to."""
    limit: int | None = None
    """At most this many prompts, drawn by the seed; None takes all."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit of suite {self.name!r} is {self.limit}; it must be at least 1, or null for all prompts")


@dataclass(kw_only=True)
class EvalConfig:
    """One evaluation: every suite with plain decoding and with every drafter in every setting."""

    suites: list[SuiteConfig]
    """The prompt sets, in the order of the table."""
    settings: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """Run-time options of the drafter, such as {beam_width: 4, beam_length: 5}; each one is a method of the table."""
    max_new_tokens: int = 128
    """Tokens per answer, at most; a stop token ends it earlier."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """All methods decode at each of them: 0 is greedy decoding, above it the target's distribution is sampled."""
    acceptance: str = "exact"
    """`exact`: greedy acceptance, or speculative sampling, which change nothing. `typical`: above temperature 0 keep what the
    target finds typical (arXiv 2401.10774, section 2.3.1), which is faster and NOT lossless."""
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    """Prompts decoded together. All methods decode at each of these sizes, and are held against plain decoding at the same."""
    warmup_prompts: int = 1
    """Prompts that every method answers, briefly and untimed, before the first measurement; in batches, rounded up to whole
    ones."""
    repeats: int = 1
    """Times that every prompt is measured with every method."""
    profile_prompts: int = 3
    """Prompts per suite decoded once more with phase timers on, for the time split and the ceiling; in batches, rounded up to
    whole ones; 0 is off."""
    too_long: str = "skip"
    """What to do with a prompt that leaves no room for the answer in the target's context window: skip (counted) or error."""
    memory_bandwidth_gbs: float | None = None
    """Gigabytes per second that the roofline assumes; None measures it."""
    seed: int = 0
    """Of the prompts that a limit draws, of what is sampled, and of the bootstrap."""
    num_threads: int | None = None
    """CPU threads while measuring; None leaves torch's choice."""
    pack_weights: bool = True
    """On a CPU in float32: measure baseline and drafters with linear layers packed for few rows, as a good CPU engine has them.
    Takes the weights' memory once more."""

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 1, "repeats": 1, "warmup_prompts": 0, "profile_prompts": 0, "seed": 0}
        wrong = {
            "suites is empty; name at least one, such as mt_bench": not self.suites,
            "a suite is named twice; name each once": len({suite.name for suite in self.suites}) < len(self.suites),
            "settings is empty; use [{}] for the drafter's own options": not self.settings,
            **{
                f"{name} is {getattr(self, name)}; it must be at least {low}": getattr(self, name) < low
                for name, low in least.items()
            },
            "temperatures is empty; use [0.0] for greedy decoding": not self.temperatures,
            f"temperatures is {self.temperatures}; each must be 0 (greedy) or a positive number": not all(
                0 <= temperature < math.inf for temperature in self.temperatures
            ),
            f"temperatures is {self.temperatures}; give each once": len(set(self.temperatures)) < len(self.temperatures),
            f"acceptance is {self.acceptance!r}; it must be one of {', '.join(ACCEPTANCES)}": self.acceptance
            not in ACCEPTANCES,
            "acceptance is typical, which needs a temperature above 0; raise temperatures, or set exact": (
                self.acceptance == "typical" and not any(temperature > 0 for temperature in self.temperatures)
            ),
            "batch_sizes is empty; use [1] for one prompt at a time": not self.batch_sizes,
            f"batch_sizes is {self.batch_sizes}; each must be at least 1": min(self.batch_sizes, default=1) < 1,
            f"batch_sizes is {self.batch_sizes}; give each once": len(set(self.batch_sizes)) < len(self.batch_sizes),
            f"too_long is {self.too_long!r}; it must be one of {', '.join(TOO_LONG_POLICIES)}": self.too_long
            not in TOO_LONG_POLICIES,
            f"memory_bandwidth_gbs is {self.memory_bandwidth_gbs}; it must be positive, or null to measure it": (
                self.memory_bandwidth_gbs is not None and not 0 < self.memory_bandwidth_gbs < math.inf
            ),
            f"num_threads is {self.num_threads}; it must be at least 1, or null for torch's choice": (
                self.num_threads is not None and self.num_threads < 1
            ),
        }
        if problems := [text for text, is_wrong in wrong.items() if is_wrong]:
            raise ValueError("evaluation: " + "; ".join(problems))
