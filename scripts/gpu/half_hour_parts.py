"""The parts that `half_hour.py` runs, with their time limits and expected results.

This module imports only Python's standard library: a machine that lacks packages still gets its
report.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts" / "gpu"

LIMITS = {
    "facts": 30,
    "tests": 240,
    "recipe": 200,
    "certificate_float32": 70,
    "certificate_bfloat16": 70,
    "certificate_graphs": 70,
    "decode_tiny": 80,
    "decode_graphs": 100,
    "decode_forms": 225,
    "decode_cudnn": 60,
    "attention": 40,
    "distill": 90,
    "train": 155,
    "profile": 70,
}
"""Seconds after which a part is killed; files written until then are kept. Together at most 25
minutes."""

DETAIL_LINES, DETAIL_CHARACTERS = 60, 1000
"""Most lines of a report on the page, and characters of a line, if the part's verdict is `look`."""

Report = Any
"""Output of a part: a JSON value, or the end of its text output if it writes none."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One expectation of a part's report: a value between `least` and `most`."""

    says: str
    value: Callable[[Report], Any]
    """Raises LookupError, TypeError or ValueError if the report lacks the value."""
    least: float | None = None
    most: float | None = None
    only_on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, its JSON file, and the expectations of that file."""

    name: str
    command: Sequence[str]
    tiny: Sequence[str] | None
    """The command on a CPU; None if the part needs a GPU."""
    checks: Sequence[Check] = ()
    writes_report: bool = True
    tiny_environment: dict[str, str] = field(default_factory=dict)

    @property
    def limit_seconds(self) -> int:
        return LIMITS[self.name]


def parts(scratch: Path) -> list[Part]:
    """Return all parts in order. Reports and large files go to `scratch`."""
    return [
        Part(
            name="facts",
            command=script("facts.py", scratch, "facts"),
            tiny=script("facts.py", scratch, "facts"),
            checks=FACTS,
        ),
        Part(
            name="tests",
            command=(sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--maxfail=20", "-p", "no:cacheprovider", "tests/gpu"),
            tiny=(sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *QUICK_TESTS),
            tiny_environment={"OUTRIDER_TEST_DEVICE": "cpu"},
            checks=TESTS,
            writes_report=False,
        ),
        *recipe_parts(scratch),
        *decode_parts(scratch),
        *train_parts(scratch),
        Part(
            name="profile",
            command=script("profile_steps.py", scratch, "profile"),
            tiny=script("profile_steps.py", scratch, "profile", "--shape", "tiny", "--device", "cpu", "--prompt-tokens", "16"),
            checks=PROFILE,
        ),
    ]


QUICK_TESTS = ("tests/gpu/test_attention_on_gpu.py",)
"""Tests for a CPU: enough to check that the tests are found and the device is chosen correctly."""


def script(name: str, scratch: Path, part: str, *options: str) -> tuple[str, ...]:
    """Return the command of a script in this folder, which writes the report of a part."""
    return (sys.executable, str(SCRIPTS / name), "--output", str(report_path(scratch, part)), *options)


def report_path(scratch: Path, part: str) -> Path:
    return scratch / f"{part}.json"


# --- the recipe, and certificates of its drafter


def recipe_parts(scratch: Path) -> Iterator[Part]:
    # 1. The demo's recipe, killed once during training.
    folder = scratch / "demo"
    recipe = (sys.executable, "train.py", "conf=demo")
    yield Part(
        name="recipe",
        command=(
            *script("killed_recipe.py", scratch, "recipe", "--folder", str(folder), "--kill-at", "50", "--", *recipe),
            *("mixed_precision=bf16", "num_threads=null", "data.limit=200", "train.steps=200", "train.checkpoint_every=20"),
            *("stages=[distill,train,eval]", "eval.suites=[{name:stdlib,limit:8}]", "eval.max_new_tokens=64"),
            "eval.settings=[{beam_width:4,beam_length:3,tree_nodes:5}]",
        ),
        tiny=(
            *script("killed_recipe.py", scratch, "recipe", "--folder", str(folder), "--kill-at", "11", "--", *recipe),
            *("target.device=cpu", "data.limit=12", "data.max_length=256", "stages=[distill,train]"),
            *("train.steps=24", "train.checkpoint_every=8", "train.max_positions=256", "train.batch_size=4"),
        ),
        tiny_environment={"ACCELERATE_USE_CPU": "true"},
        checks=RECIPE,
    )
    # 2. Certificates of its drafter, in two types and with CUDA graphs.
    drafter = ("--drafter", str(folder / "drafter"))
    for dtype in ("float32", "bfloat16"):
        name = f"certificate_{dtype}"
        small = ("--device", "cpu", "--prompts", "1", "--max-new-tokens", "8", "--small")
        yield Part(
            name=name,
            command=script("certificate.py", scratch, name, *drafter, "--dtype", dtype, "--device", "cuda"),
            tiny=script("certificate.py", scratch, name, *drafter, "--dtype", dtype, *small),
            checks=CERTIFICATE,
        )
    graphs = ("--cuda-graphs", "--device", "cuda", "--prompts", "4", "--small")
    yield Part(
        name="certificate_graphs",
        command=script("certificate.py", scratch, "certificate_graphs", *drafter, *graphs),
        tiny=None,
        checks=CERTIFICATE,
    )


# --- speed


def decode_parts(scratch: Path) -> Iterator[Part]:
    tiny = ("--shape", "tiny", "--batches", "1", "3")

    def bench(name: str, *options: str) -> tuple[str, ...]:
        return script("decode_bench.py", scratch, name, *options)

    # One part per form of decoding; only the first has a tiny form for a CPU.
    on_cpu = ("--device", "cpu", "--forms", "eager", "--trees", "8", "--prompt-tokens", "16", "--steps", "6", "--warm-up", "1")
    yield Part(
        name="decode_tiny",
        command=bench("decode_tiny", *tiny, "--trees", "8", "--steps", "10", "--budget-seconds", "55"),
        tiny=bench("decode_tiny", *tiny, *on_cpu),
        checks=DECODE,
    )
    yield Part(
        name="decode_graphs",
        command=bench(
            *("decode_graphs", "--forms", "cuda_graph", "--trees", "8", "16", "32"),
            *("--batches", "1", "--budget-seconds", "60"),
        ),
        tiny=None,
        checks=(*DECODE, *GRAPHS),
    )
    yield Part(
        name="decode_forms",
        command=bench(
            *("decode_forms", "--forms", "eager", "cuda_graph", "compiled_cuda_graph", "--trees", "16", "32"),
            *("--batches", "1", "8", "--budget-seconds", "150"),
        ),
        tiny=None,
        checks=(*DECODE, *FORMS),
    )
    yield Part(
        name="decode_cudnn",
        command=bench(
            *("decode_cudnn", "--forms", "eager", "--trees", "16", "--batches", "1"),
            *("--cudnn-attention", "--budget-seconds", "35"),
        ),
        tiny=None,
        checks=CUDNN,
    )
    yield Part(
        name="attention",
        command=script("attention_bench.py", scratch, "attention", "--budget-seconds", "25"),
        tiny=script(
            *("attention_bench.py", scratch, "attention", "--shape", "tiny", "--device", "cpu"),
            *("--keys", "512", "--queries", "16", "--batches", "1"),
        ),
        checks=ATTENTION,
    )


def train_parts(scratch: Path) -> Iterator[Part]:
    sizes = ("--lengths", "2048", "--batches")
    tiny = ("--shape", "tiny", "--device", "cpu", "--lengths", "24", "--batches", "2", "--steps", "2", "--warm-up", "1")
    yield Part(
        name="distill",
        command=script("train_bench.py", scratch, "distill", "--kinds", "distill", *sizes, "4", "--minutes", "1"),
        tiny=script("train_bench.py", scratch, "distill", "--kinds", "distill", *tiny),
        checks=LABELLING,
    )
    kinds = ("--kinds", "eagle3", "redrafter")
    yield Part(
        name="train",
        command=script("train_bench.py", scratch, "train", *kinds, *sizes, "1", "4", "--minutes", "2"),
        tiny=script("train_bench.py", scratch, "train", *kinds, *tiny),
        checks=TRAINING,
    )


# --- expectations. Milliseconds are estimates for an 8B target on an H100: see docs/how-to/gpu.md.


def rows(report: Report, **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values. Raises LookupError if there are none."""
    matching = [row for row in report["rows"] if all(row[name] == value for name, value in wanted.items())]
    if not matching:
        raise LookupError(f"no row with {wanted}")
    return matching


def most_of(name: str, **wanted: Any) -> Callable[[Report], Any]:
    return lambda report: max(row[name] for row in rows(report, **wanted))


def least_of(name: str, **wanted: Any) -> Callable[[Report], Any]:
    return lambda report: min(row[name] for row in rows(report, **wanted))


def failures(report: Report) -> int:
    """Count the failed cases, except those that ran out of memory."""
    return sum("out of memory" not in case["error"].lower() for case in report["failed"])


FACTS = (
    Check(says="missing packages", value=lambda facts: len(facts["missing"]), most=0),
    Check(says="packages older than outrider needs", value=lambda facts: len(facts["older"]), most=0),
    Check(says="torch sees the GPU (1: yes)", value=lambda facts: int(facts["cuda"]), least=1, only_on_gpu=True),
)
TESTS = (
    Check(says="tests that passed", value=lambda output: int(re.findall(r"(\d+) passed", output)[-1]), least=30),
    Check(
        says="tests that passed on a GPU",
        value=lambda output: int(re.findall(r"(\d+) passed", output)[-1]),
        least=80,
        only_on_gpu=True,
    ),
)
RECIPE = (
    Check(says="the run was killed during training (1: yes)", value=lambda report: int(report["was_killed"]), least=1),
    Check(says="steps computed before and after the kill", value=lambda report: report["steps_computed_twice"], least=1),
    Check(
        says="largest relative difference of their losses",
        value=lambda report: report["largest_difference"],
        most=2e-3,
    ),
    Check(says="last loss over the first one", value=lambda report: report["last_loss"] / report["first_loss"], most=0.8),
)
CERTIFICATE = (
    Check(says="the certificate's verdict (1: lossless)", value=lambda report: int(report["passed"]), least=1),
    Check(says="its lines", value=lambda report: len(report["lines"]), least=4),
)
DECODE = (
    Check(says="cases that failed", value=failures, most=0),
    Check(says="cases measured", value=lambda report: len(report["rows"]), least=4),
    Check(says="most host reads in a step", value=most_of("host_reads"), most=1),
    Check(says="most synchronisations in a step", value=most_of("synchronisations"), most=1, only_on_gpu=True),
)
PLAIN, TREE = {"nodes": 0, "batch": 1}, {"drafter": "redrafter", "nodes": 16, "batch": 1}
STEP = "milliseconds_per_step"
GRAPHS = (
    Check(says="plain step in a graph, ms", value=most_of(STEP, form="cuda_graph", **PLAIN), most=8),
    Check(says="break-even tokens of 16 nodes", value=most_of("break_even", form="cuda_graph", **TREE), most=1.3),
    Check(says="a draft model runs in graphs (ms)", value=most_of(STEP, drafter="draft_model"), most=60),
)
FORMS = (
    Check(says="plain step, eager, ms", value=most_of(STEP, form="eager", **PLAIN), most=9),
    Check(says="plain step, compiled, in a graph, ms", value=most_of(STEP, form="compiled_cuda_graph", **PLAIN), most=6),
    Check(
        says="its share of the memory bandwidth",
        value=least_of("bandwidth_share", form="compiled_cuda_graph", **PLAIN),
        least=0.75,
    ),
)
CUDNN = (
    Check(says="cases that failed", value=failures, most=0),
    Check(says="plain step with cuDNN's attention, eager, ms (more: it makes new plans)", value=most_of(STEP, **PLAIN), most=9),
    Check(says="step over 16 nodes with it, ms", value=most_of(STEP, **TREE), most=12),
)
LONG = {"keys": 8192, "queries": 16, "batch": 1}
ATTENTION = (
    Check(says="cases that failed", value=failures, most=0),
    Check(says="cases measured", value=lambda report: len(report["rows"]), least=1),
    Check(says="gain of parts, 16 queries, 8,192 keys", value=most_of("gain", **LONG), least=1.5, only_on_gpu=True),
    Check(says="their share of the memory bandwidth", value=most_of("bandwidth_share", **LONG), least=0.3, only_on_gpu=True),
)
LABELLING = (
    Check(says="cases that failed", value=failures, most=0),
    Check(says="tokens labelled per second", value=least_of("tokens_per_second"), least=5_000, only_on_gpu=True),
    Check(says="agreement with the text, as configured", value=least_of("agreement"), least=0.3, most=0.7),
)
TRAINING = (
    Check(says="cases that failed", value=failures, most=0),
    Check(
        says="EAGLE-3's share of the GPU's matrix rate",
        value=most_of("matrix_share", kind="eagle3"),
        least=0.35,
        only_on_gpu=True,
    ),
    Check(says="ReDrafter's share", value=most_of("matrix_share", kind="redrafter"), least=0.35, only_on_gpu=True),
)
PROFILE = (
    Check(
        says="share of matrix products in the GPU's work",
        value=lambda report: report["shares"]["matrix"],
        least=0.65,
        only_on_gpu=True,
    ),
    Check(
        says="attention in a step, ms (more: split the keys)",
        value=lambda report: report["group_microseconds"]["attention"] / 1e3 / report["steps"],
        most=0.5,
        only_on_gpu=True,
    ),
    Check(
        says="longest wait of the GPU between two kernels, ms",
        value=lambda report: max(report["longest_gaps_microseconds"]) / 1e3,
        most=0.3,
        only_on_gpu=True,
    ),
    Check(says="kernels in the trace", value=lambda report: report["num_kernels"], least=100),
)


# --- what the page shows of a report that is not as expected


def details(report: Report) -> list[str]:
    """List a report's values in lines, with failures and missing packages first.

    Empty for a report that is no JSON object.
    """
    if not isinstance(report, dict):
        return []
    lines = []
    # all other keys keep their order
    for name in sorted(report, key=lambda name: name not in ("failed", "missing", "older")):
        value = report[name]
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            lines += [f"{name}: {in_one_line(item)}" for item in value]
        elif value not in ([], {}, None):
            lines.append(f"{name}: {in_one_line(value)}")
    return [" ".join(line.split())[:DETAIL_CHARACTERS] for line in lines[:DETAIL_LINES]]


def in_one_line(value: Any) -> str:
    """Write a value of a report without brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_one_line(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(in_one_line(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
