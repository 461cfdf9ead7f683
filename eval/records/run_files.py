"""Files of a run beside its records: how the records were measured, and facts about them."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.files import parse_json, read_json, sha256_json, write_json
from .names import PIPELINED
from .records import MeasuredCell, digest_of

Place = tuple[float, int]
"""Temperature and batch size."""
RECORDED_OPTIONS = (
    "max_new_tokens",
    "temperatures",
    "acceptance",
    "batch_sizes",
    "repeats",
    "profile_prompts",
    "seed",
)
"""Options of EvalConfig that a record depends on, besides suites and settings. The number of
threads is part of the environment."""
GROWING = ("suites", "temperatures", "batch_sizes", "methods")
"""Parts of the configuration that a finished run may extend. (Among its methods, only those tuned
to a temperature and a batch size.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Deviation of an answer from plain decoding, in scores.

    Plain decoding emits the token with the best score. For greedy decoding a score is a logit. For
    sampling with a seed it is logit / temperature - log(clock), with the clocks that the seed gives
    to this token of the answer (see `RowSeeds`).

    `deficit` is the largest distance between the plain model's best score and the score of the
    emitted token, over all tokens. `noise` is the largest difference between scores computed in two
    ways: token by token, and by the bare model over the whole text at once. (The clocks are equal,
    so this is the difference of logits / temperature.) `noise` also includes the sampler's own
    `ROUNDING`.

    Two scores that are each off by `noise` may change order if they are at most `2 * noise` apart:
    `within_noise`. Noise above a certain share of the logits' spread explains nothing, because then
    something is broken. The same holds for an answer that doesn't end as plain decoding ends: with
    its first stop token, or at the limit.
    """

    deficit: float
    position: int
    """Index of the token with the deficit, from 0."""
    noise: float
    ends_rightly: bool
    within_noise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Software and hardware that speed depends on."""

    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    num_cpus: int
    num_threads: int
    device: str
    git_hash: str | None
    """Commit of the library's clone, with `-dirty` if files differ from it; None outside a
    clone."""
    linears: dict[str, str]
    """How linear layers are computed, by shape (`choose_linears`). A resumed run computes them in the
    same way. Empty: as transformers computes them."""

    @property
    def digest(self) -> str:
        return digest_of(dataclasses.asdict(self))

    @property
    def processor(self) -> str:
        """What computed: an accelerator, or threads of a CPU."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{threads} of {self.cpu}" if self.device == "cpu" else self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Upper bound on plain decoding's speed, set by reading the weights from memory or from files.

    The bound ignores the bytes of the KV cache, so it is a little high. The bandwidth is measured
    with a buffer as large as the weights. For weights that fit into the cache this is the cache's
    bandwidth, and the bound still holds.
    """

    weight_bytes: int
    bandwidth_gbs: float
    cache_bytes: int | None
    """Size of the processor's last-level cache; None if it is unknown."""
    streamed: bool
    """Whether each pass reads these bytes from files, at this measured rate."""

    @property
    def tokens_per_second(self) -> float:
        return self.bandwidth_gbs * 1e9 / self.weight_bytes

    @property
    def fits_in_cache(self) -> bool:
        return self.cache_bytes is not None and self.weight_bytes <= self.cache_bytes and not self.streamed

    def to_json(self) -> dict[str, Any]:
        derived = {"tokens_per_second": self.tokens_per_second, "fits_in_cache": self.fits_in_cache}
        return {**dataclasses.asdict(self), **derived}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """`run.json`: the configuration and environment that all records of a folder share.

    Records of different runs are never mixed.
    """

    config: dict[str, Any]
    """Suites (revision by name), target, chat template, methods and RECORDED_OPTIONS."""
    environment: Environment
    roofline: Roofline | None
    """None for a target in stages: each machine has its own bandwidth."""

    def __post_init__(self) -> None:
        if missing := sorted({"suites", "target", "methods", *RECORDED_OPTIONS} - self.config.keys()):
            raise ValueError(f"config lacks {', '.join(missing)}; restore the file, or give another output directory")

    @property
    def stage_layers(self) -> list[int] | None:
        """Number of layers of each of the target's stages; None for a target in one process."""
        layers: list[int] | None = self.config["target"].get("stage_layers")
        return layers

    def is_pipelined(self, method: str) -> bool:
        """Check whether a method drafts while the stages of the target read."""
        return self.config["methods"].get(method, {}).get("decode") == PIPELINED

    @property
    def dtype(self) -> str:
        return str(self.config["target"]["dtype"]).removeprefix("torch.")

    @property
    def config_digest(self) -> str:
        """Digest of everything that each record depends on; it stays the same when the run is
        extended."""
        methods = self.config["methods"]
        fixed: dict[str, Any] = {name: value for name, value in self.config.items() if name not in GROWING}
        fixed["methods"] = {name: method for name, method in methods.items() if "places" not in method}
        fixed["weights"] = sorted({method["weights"] for method in methods.values()})
        return digest_of(fixed)

    def within(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Restrict another run's config to this run's suites, temperatures and batch sizes.

        If the result equals `self.config`, the other run requests the same, or only extends this
        one.
        """
        temperatures, sizes = (
            [value for value in self.config[name] if value in requested[name]] for name in ("temperatures", "batch_sizes")
        )
        methods = {}
        for name, method in requested["methods"].items():
            if "places" in method:
                places = [[t, size] for t in temperatures for size in sizes if [t, size] in method["places"]]
                method = {**method, "places": places}
            if method.get("places") != []:
                methods[name] = method
        suites = {name: revision for name, revision in requested["suites"].items() if name in self.config["suites"]}
        return {**requested, "suites": suites, "temperatures": temperatures, "batch_sizes": sizes, "methods": methods}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """Size and training of a method's drafter.

    `training` is None if the folder has no record of it.
    """

    parameters: int
    """Parameters of the drafter, without those of the target."""
    training: dict[str, Any] | None
    """TrainingFacts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(MeasuredCell):
    """A method that ran out of memory on a suite, at a temperature and a batch size.

    It has no figures there. Its answers up to that point stay in the records, and a resumed run
    continues from them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFacts:
    """How a target with a memory budget was placed, and what was measured."""

    plan: str
    """What stays in memory and what is read in each pass, as the log says when the target loads."""
    read_gbs: float
    """Gigabytes per second at which weights were read from files."""
    peak_bytes: int | None
    """Largest memory of the process so far, with Python, torch and the drafters (on CUDA: of the
    device); None if the system doesn't count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`facts.json`: facts that only the run can compute.

    They need the target, the drafters or the prompts.
    """

    drafters: dict[str, DrafterFacts]
    """Facts about each method's drafter, by method."""
    num_turns: dict[str, int]
    """Turns of each suite, including those that were skipped as too long."""
    audits: dict[str, Audit]
    """Audits of the answers that noise may explain, by `EvalRecord.answer_digest`."""
    out_of_memory: list[OutOfMemory]
    """Methods that ran out of memory, in the order in which it happened."""
    unaudited: list[str]
    """Answers whose audit ran out of memory, by `EvalRecord.answer_digest`; they are not proven."""
    budget: BudgetFacts | None
    """None for a target without a memory budget."""


def read_info(path: Path) -> RunInfo:
    """Read a run's `run.json`.

    Raises ValueError if it is malformed, or if it isn't the file that `write_info` wrote.
    """
    content = read_json(path)
    digest = content.pop("sha256", None) if isinstance(content, dict) else None
    info = parse_json(RunInfo, json.dumps(content), path)
    if digest != sha256_json(content):
        raise ValueError(
            f"{path} was altered or damaged: it hasn't the sha256 that it records, so it may not describe how its answers were "
            "measured; restore it, or evaluate into another output directory"
        )
    return info


def write_info(path: Path, info: RunInfo) -> None:
    """Write a run's `run.json`, with a digest of its content."""
    content = json.loads(json.dumps(dataclasses.asdict(info)))  # keys as texts, as in the file
    write_json(path, {**content, "sha256": sha256_json(content)})
