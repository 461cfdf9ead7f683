"""What a run leaves beside its records.

How they were made, and what only the run could find out.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.files import read_dataclass
from .digests import digest_of
from .records import Cell, GroupKey

Place = tuple[float, int]
"""Temperature and batch size."""
RECORDED_OPTIONS = (
    "max_new_tokens",
    "temperatures",
    "acceptance",
    "batch_sizes",
    "warmup_prompts",
    "repeats",
    "profile_prompts",
    "too_long",
    "seed",
    "pack_weights",
)
"""Options of EvalConfig that a record depends on, besides suites and settings; threads are part of
the environment."""
GROWING = ("suites", "temperatures", "batch_sizes", "methods")
"""What a finished run may get more of. (Of its methods only those that are tuned to a temperature
and a batch size.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Deviation of an answer from plain decoding, in scores.

    Plain decoding emits the token with the best score. Greedy, a score is a logit; sampling with a
    seed, it is logit / temperature - log(clock), with the clocks that the seed gives to this token
    of the answer (see `RowSeeds`). `deficit`: over all tokens, the largest distance between the
    plain model's best score and that of the token emitted. `noise`: the largest difference between
    a score computed token by token and the same one computed by the bare model over the whole text
    at once (the clocks are the same, so it is that of logits / temperature), and the sampler's own
    `ROUNDING`. Two scores that are each off by `noise` may change order while they are `2 * noise`
    apart: `within_noise`. Noise of more than a share of the logits' spread explains nothing: then
    something is broken. And so it is where an answer doesn't end as plain decoding ends: with its
    first stop token, or at the limit.
    """

    deficit: float
    position: int
    """Of the token that has it, from 0."""
    noise: float
    ends_rightly: bool
    within_noise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Software and hardware that a speed depends on."""

    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    num_cpus: int
    num_threads: int
    device: str
    git_hash: str | None
    """Commit of the library's own clone, with `-dirty` where files differ from it; None outside a
    clone."""

    @property
    def digest(self) -> str:
        return digest_of(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Upper bound on plain decoding's speed, set by reading the weights.

    The KV cache's bytes are left out, so the bound is a little high. The bandwidth is that of
    reading a buffer as large as the weights, unless it was `given`: so for weights that fit into
    the cache it is the cache's bandwidth, and the bound holds nevertheless.
    """

    weight_bytes: int
    bandwidth_gbs: float
    given: bool
    cache_bytes: int | None
    """The processor's last-level cache; None where it is not known."""

    @property
    def tokens_per_second(self) -> float:
        return self.bandwidth_gbs * 1e9 / self.weight_bytes

    @property
    def fits_in_cache(self) -> bool:
        return self.cache_bytes is not None and self.weight_bytes <= self.cache_bytes

    def to_json(self) -> dict[str, Any]:
        derived = {"tokens_per_second": self.tokens_per_second, "fits_in_cache": self.fits_in_cache}
        return {**dataclasses.asdict(self), **derived}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """`run.json`: what all records of a folder have in common.

    They are never mixed with others.
    """

    config: dict[str, Any]
    """Suites (revision by name), target, chat template, methods and RECORDED_OPTIONS."""
    environment: Environment
    roofline: Roofline

    def __post_init__(self) -> None:
        if missing := sorted({"suites", "target", "methods", *RECORDED_OPTIONS} - self.config.keys()):
            raise ValueError(f"config lacks {', '.join(missing)}; restore the file, or measure anew elsewhere")

    @property
    def dtype(self) -> str:
        return str(self.config["target"]["dtype"]).removeprefix("torch.")

    @property
    def config_digest(self) -> str:
        """Of what each record depends on, whatever else the run is asked for later."""
        methods = self.config["methods"]
        fixed: dict[str, Any] = {name: value for name, value in self.config.items() if name not in GROWING}
        fixed["methods"] = {name: method for name, method in methods.items() if "places" not in method}
        fixed["weights"] = sorted({method["weights"] for method in methods.values()})
        return digest_of(fixed)

    def within(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Cut another run's config to the suites, temperatures and batch sizes of this one.

        Where it then is this one's config, it asks for the same, or for more of it.
        """
        mine = self.config
        temperatures, sizes = (
            [value for value in mine[name] if value in asked[name]] for name in ("temperatures", "batch_sizes")
        )
        methods = {}
        for name, method in asked["methods"].items():
            if "places" in method:
                method = {
                    **method,
                    "places": [[t, size] for t in temperatures for size in sizes if [t, size] in method["places"]],
                }
            if method.get("places") != []:
                methods[name] = method
        suites = {name: revision for name, revision in asked["suites"].items() if name in mine["suites"]}
        return {**asked, "suites": suites, "temperatures": temperatures, "batch_sizes": sizes, "methods": methods}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What a method's drafter took to make; `training` is None where nobody wrote it down."""

    parameters: int
    """Its own; those of the target are not counted."""
    training: dict[str, Any] | None
    """TrainingFacts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A method that ran out of memory on a suite, at a temperature and a batch size.

    It has no figures there. What it had answered until then stays among the records, where a run
    that is taken up again goes on.
    """

    suite: str
    prompt_set_revision: str
    prompt_set_source: str | None
    temperature: float
    batch_size: int
    method: str

    @property
    def group_key(self) -> GroupKey:
        return self.suite, self.temperature, self.batch_size

    @property
    def cell(self) -> Cell:
        return (*self.group_key, self.method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`facts.json`.

    What only the run could find out, since it takes the target, the drafters or the prompts.
    """

    drafters: dict[str, DrafterFacts]
    """By method."""
    num_turns: dict[str, int]
    """Of each suite, those included that were left out as too long."""
    audits: dict[str, Audit]
    """Of the answers that noise may explain, by `EvalRecord.answer_digest`."""
    out_of_memory: list[OutOfMemory]
    """In the order in which it happened."""
    without_profile: list[OutOfMemory]
    """What ran out of memory with the phase timers on, after all its figures had been measured."""
    unaudited: list[str]
    """The answers in whose audit memory ran out, by `EvalRecord.answer_digest`: nothing proves
    them."""


def read_info(path: Path) -> RunInfo:
    """Return a run's `run.json`.

    Raises ValueError for a malformed one.
    """
    return read_dataclass(RunInfo, path)
