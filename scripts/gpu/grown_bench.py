"""Part of the decode benchmark: a grown target, with the acceptance of real drafters.

The target is built on the device, with the bytes of a large model and the text of a small one (see
`scripts/grow_target.py`). So tokens per second are real for a target of this size, and tokens per
step are the drafter's. Hidden size and vocabulary are the small model's: a drafter of a real large
model costs more, and a head of its vocabulary too.

Each form (eager, compiled, CUDA graphs) is an evaluation of all methods, in turns. Its warm-up
compiles and records. Seconds are those of decoding, without the prefill.

- `ceiling` is tau / (1 + rho): the speedup if verifying a tree took the time of a plain step. rho is
  the drafter's time per step over a plain step.
- `bandwidth_share` is the time that reading the target's weights once takes at the measured
  bandwidth, divided by the time of a step.

All ratios are over the fastest plain decoding of all forms.
"""

import argparse
import dataclasses
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from random_target import memory_bandwidth, open_device, target_of
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.data.files import write_json
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.environment import describe_environment
from outrider.eval.measure.methods import Settings
from outrider.eval.measure.roofline import weight_bytes
from outrider.eval.records.names import BASELINE, RUN_FILE
from outrider.eval.records.run_files import read_info
from outrider.eval.results.marks import marks
from outrider.eval.results.rows import fault, is_broken
from outrider.eval.run import check_inputs, evaluate
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the scripts that are for every machine

from drafter_settings import parse_drafters
from grow_target import Size, Source, copy_drafter, grown_config, grown_tensor, parse_parameters
from script_errors import script_errors

PLAIN = "plain"
GOAL = 0.75
"""Least share of the ceiling, and of the bandwidth."""
Row = dict[str, Any]


FAILURES = (
    torch.OutOfMemoryError,
    torch.AcceleratorError,  # an operation that a CUDA graph can't record
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)
"""Errors of a form. The other forms are still measured."""


def run(args: argparse.Namespace, forms: Mapping[str, Mapping[str, bool]]) -> None:
    """Measure every form, and write and print the report. Raises SystemExit for wrong options."""
    with script_errors(), tempfile.TemporaryDirectory() as folder:
        measure_forms(args, forms, Path(folder))


def measure_forms(args: argparse.Namespace, forms: Mapping[str, Mapping[str, bool]], folder: Path) -> None:
    """Measure every form, with copies of the drafters in `folder`."""
    # 1. Check the input. EAGLE's layer has the original's sizes, so its configuration must name them.
    started = time.perf_counter()
    source, drafters = Source.of(args.target), parse_drafters(args.grown)
    size = source.choose_size(parse_parameters(args.parameters))
    copies = [folder / str(number) for number in range(len(drafters))]
    for drafter, copy in zip(drafters, copies, strict=True):
        copy_drafter(drafter.folder, copy, source.config)
    settings = {copy: [drafter.setting] for drafter, copy in zip(drafters, copies, strict=True)}
    suites = [SuiteConfig(name="stdlib", limit=args.prompts)]
    device = open_device(args.device, cudnn_attention=args.cudnn_attention)
    bandwidth = memory_bandwidth(device)
    config = EvalConfig(suites=suites, max_new_tokens=args.new_tokens, memory_bandwidth_gbs=bandwidth / 1e9)
    check_inputs(config, copies, settings)
    # 2. Build the target on the device.
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    model = grown_model(source, size, dtype, device)
    tokenizer = load_tokenizer(TargetConfig(name_or_path=str(source.folder)))
    report: dict[str, Any] = {
        "target": {"source": source.folder.resolve().name, **dataclasses.asdict(size)},
        "dtype": str(dtype).removeprefix("torch."),
        "drafters": [drafter.described for drafter in drafters],
        "new_tokens": args.new_tokens,
        "prompts": args.prompts,
        "target_bytes": weight_bytes(model),
        "memory_bytes_per_second": bandwidth,
        "rows": [],
        "skipped": [],
        "failed": [],
        "environment": dataclasses.asdict(describe_environment(device)),
    }
    # 3. Form after form, the compiled ones last. The report is written after each.
    names = [name for name in args.forms if device.type == "cuda" or not forms[name].get("cuda_graphs")]
    for name in sorted(names, key=lambda name: "compiled" in name):
        if time.perf_counter() - started > args.budget_seconds:
            report["skipped"].append(name)
            continue
        try:
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # a form called compiled must be
                target = target_of(model, tokenizer, **forms[name])
                measure(report, target, config, settings, [drafter.name for drafter in drafters], name)
        except FAILURES as error:
            report["failed"].append({"form": name, "error": str(error)[:500]})
        # One form's graphs and compiled code at a time: a target and its recordings refer to each other.
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        add_shares(report["rows"])
        report["seconds"] = time.perf_counter() - started
        write_json(args.output, report)
    write_json(args.output, report)
    print_report(report)
    print(f"Written to {args.output}")


@torch.no_grad()
def grown_model(source: Source, size: Size, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a grown target on the device, without any file."""
    # 1. The modules, without weights.
    config = AutoConfig.for_model(**grown_config(source.config, size, str(dtype).removeprefix("torch.")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.tie_weights()
    # 2. The weights. The rotary embeddings have buffers only, which to_empty leaves uninitialised.
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in tqdm(list(model.named_parameters()), desc="grow", unit="tensor"):
        parameter.copy_(grown_tensor(name, source.read, source.size, size, dtype, generator))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def measure(
    report: dict[str, Any], target: HFTarget, config: EvalConfig, settings: Settings, names: Sequence[str], form: str
) -> None:
    """Evaluate all methods in one form, and add rows and failures to the report."""
    # 1. The evaluation, and the names of its methods.
    with tempfile.TemporaryDirectory() as output:
        rows = evaluate(config, target, target.tokenizer, list(settings), Path(output), settings)
        methods = read_info(Path(output) / RUN_FILE).config["methods"]
    shown = {BASELINE: PLAIN, **dict(zip(methods, names, strict=True))}
    # 2. A row for each method with a speed.
    for row in rows:
        method, speed, tau = shown[row["method"]], row["decode_tokens_per_second"], row["tokens_per_step"]
        if speed is None or tau is None:
            report["failed"].append({"form": form, "error": f"{method} ran out of memory, or took no step"})
            continue
        report["rows"].append(
            {
                "form": form,
                "method": method,
                "tokens_per_step": tau,
                "tokens_per_second": speed,
                "milliseconds_per_step": 1e3 * tau / speed,
                "draft_milliseconds": 1e3 * (row["draft_seconds_per_step"] or 0.0),
                "bandwidth_share": (row["roofline_fraction"] or 0.0) / tau,
                "marks": [*marks(row), *([fault(row)] if is_broken(row) else [])],
                "num_identical": row["num_prompts"] - row["num_mismatched_prompts"],
                "num_prompts": row["num_prompts"],
            }
        )


def add_shares(rows: Sequence[Row]) -> None:
    """Add to all rows what depends on the fastest plain decoding."""
    step = min((row["milliseconds_per_step"] for row in rows if row["method"] == PLAIN), default=None)
    if step is None:
        return
    for row in rows:
        row["speedup"] = row["tokens_per_second"] * step / 1e3
        row["ceiling"] = row["tokens_per_step"] / (1 + row["draft_milliseconds"] / step)
        row["ceiling_share"] = row["speedup"] / row["ceiling"]


def print_report(report: Mapping[str, Any]) -> None:
    """Print the table, and whether the best rows reach the goals."""
    target = report["target"]
    print(
        f"{target['parameters']:,} parameters in {report['dtype']}, {report['target_bytes'] / 1e9:.2f} GB to read for a step, "
        f"at {report['memory_bytes_per_second'] / 1e9:.0f} GB/s. It costs as much as a large model, "
        f"and generates the same text as {target['source']}."
    )
    print("| form | method | tokens/step | tokens/s | ms/step | speedup | ceiling | of ceiling | of bandwidth | identical |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in report["rows"]:
        ceilings = f"{row['ceiling']:.2f}x | {row['ceiling_share']:.0%}"
        print(
            f"| {row['form']} | {row['method']} | {row['tokens_per_step']:.2f} | {row['tokens_per_second']:.1f} "
            f"| {row['milliseconds_per_step']:.2f} | {row['speedup']:.2f}x | {ceilings} "
            f"| {row['bandwidth_share']:.0%} | {row['num_identical']} of {row['num_prompts']} |"
        )
        if row["marks"]:
            print(f"  {', '.join(row['marks'])}: these times are uncertain")
    for goal in goals(report["rows"]):
        print(goal)
    for failure in itertools.chain(report["failed"], report["skipped"]):
        print(f"failed or skipped: {failure}")


def goals(rows: Sequence[Row]) -> list[str]:
    """State whether the fastest drafter and the fastest plain decoding reach the goals."""
    lines = []
    for key, is_plain in (("ceiling_share", False), ("bandwidth_share", True)):
        candidates = [row for row in rows if (row["method"] == PLAIN) == is_plain]
        if candidates:
            best = max(candidates, key=lambda row: row["tokens_per_second"])
            verdict = "reached" if best[key] >= GOAL else "NOT reached"
            name = key.replace("_", " ").replace("share", "share of the fastest")
            lines.append(f"Goal, {name} row at least {GOAL}: {verdict}, {best[key]:.2f} by {best['method']}, {best['form']}")
    return lines
