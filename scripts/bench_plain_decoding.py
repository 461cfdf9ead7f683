"""Benchmark of the baseline: plain decoding against the other ways to decode plainly.

    python scripts/bench_plain_decoding.py --target models/demo_target

`ours` is plain decoding as every evaluation runs it, with linear layers in the layouts that this
machine multiplies fastest. The others are `rows first` (our loop, layers as transformers computes
them), `packed` (our loop, every layer packed) and transformers' `generate`. Each number type and
number of threads is an evaluation of all four, without stop tokens. The script ends with an error
if tokens differ and rounding can't explain it. It writes the ratios of wall and processor seconds
as JSON.
"""

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
from torch import nn
from transformers_methods import transformers_method

from outrider.data.files import write_json
from outrider.eval.config import EvalConfig, SuiteConfig
from outrider.eval.measure.environment import describe_environment
from outrider.eval.measure.timing import Generation, time_generation
from outrider.eval.measure.turns import Method
from outrider.eval.records.names import BASELINE
from outrider.eval.results.marks import is_disturbed
from outrider.eval.results.rows import Row
from outrider.eval.run import cpu_threads, evaluate
from outrider.models.drafters import NullDrafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.linears import PackedForSomeRows
from outrider.models.llm.loading import load_target

MARK = 1.02
"""Most that plain decoding may take, relative to any other method."""
OURS = "ours"


def main() -> None:
    args = parse_args()
    cells = []
    for dtype, threads in itertools.product(args.dtypes, args.threads):
        with cpu_threads(threads):
            cells.append(measure(args, dtype, threads))
        print_cell(cells[-1])
    report = {
        "target": Path(args.target).name,
        "suite": args.suite,
        "num_prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "cells": cells,
        "environment": dataclasses.asdict(describe_environment(torch.device("cpu"))),
    }
    write_json(args.output, report)
    print(f"Written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--suite", default="stdlib")
    parser.add_argument("--suite-path", default=None, help="local file of the suite")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each prompt with each method")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/plain_decoding.json"))
    return parser.parse_args()


def measure(args: argparse.Namespace, dtype: str, threads: int) -> dict[str, Any]:
    """Measure all methods with one number type and number of threads."""
    # 1. The targets, whose answers have no end.
    chosen, rows_first, packed = (
        load_target(TargetConfig(name_or_path=args.target, dtype=dtype, fast_linears=fast, device="cpu"))
        for fast in (True, False, False)
    )
    for target in (chosen, rows_first, packed):
        # min_new_tokens would have the same effect, but adds a logits processor to transformers only.
        target.model.generation_config.eos_token_id = None
    pack_all(packed.model)
    others = [
        method_of("rows first", rows_first),
        method_of("packed", packed),
        transformers_method("transformers", rows_first.model),
    ]
    # 2. The evaluation.
    config = EvalConfig(
        suites=[SuiteConfig(name=args.suite, path=args.suite_path, limit=args.prompts)],
        max_new_tokens=args.new_tokens,
        repeats=args.repeats,
        profile_prompts=0,
        num_threads=threads,
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = evaluate(config, chosen, chosen.tokenizer, [], Path(folder), others=others)
    if wrong := [row["method"] for row in rows if row["speedup"] is None]:
        raise SystemExit(f"{', '.join(wrong)} in {dtype}: the tokens differ from ours, or no time is positive; measure again")
    return {"dtype": dtype, "threads": threads, "linears": chosen.linears, **compare(rows)}


def method_of(name: str, target: HFTarget) -> Method:
    """Build plain decoding with our loop and another target."""

    def decode(_: Any, *arguments: Any, **options: Any) -> Generation:
        return time_generation(target, *arguments, **options)

    return Method(name=name, drafter=NullDrafter(), decode=decode)


def pack_all(model: nn.Module) -> None:
    """Let every linear layer use packed weights, for any number of rows."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            vars(module)["forward"] = PackedForSomeRows(module, 1, 2**31)


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """Compare the seconds of each method with ours, by wall time and by processor time.

    A ratio above 1 means that ours is faster. The interval and the median are over prompts.
    """
    methods = {OURS if row["method"] == BASELINE else row["method"]: row for row in rows}
    wall, processor = {}, {}
    for name, row in methods.items():
        speedup, interval = row["speedup"], row["speedup_ci95"]
        assert speedup  # `measure` raises for a method without a speed
        wall[name] = {
            "over_ours": 1 / speedup,
            "over_ours_ci95": interval and (1 / interval[1], 1 / interval[0]),
            "median_over_ours": 1 / (row.get("median_speedup") or speedup),
        }
        processor[name] = {"over_ours": 1 / (row.get("processor_speedup") or 1.0)}
    return {
        "tokens_per_second": {name: row["tokens_per_second"] for name, row in methods.items()},
        "wall": wall,
        "processor": processor,
        "disturbed": [name for name, row in methods.items() if is_disturbed(row)],
    }


def print_cell(cell: dict[str, Any]) -> None:
    """Print a line for each method, with a note where ours misses the mark."""
    linears = cell["linears"] or "layers as transformers computes them"
    print(f"\n{cell['dtype']}, threads: {cell['threads']} ({linears})")
    for name, values in cell["wall"].items():
        low, high = values["over_ours_ci95"] or (values["over_ours"],) * 2
        missed = "  <- ours is slower than the mark" if values["median_over_ours"] < 1 / MARK else ""
        disturbed = ", disturbed" if name in cell["disturbed"] else ""
        print(
            f"  {name:<13}{cell['tokens_per_second'][name]:7.1f} tokens/s  {values['over_ours']:.3f} of our seconds "
            f"[{low:.3f}, {high:.3f}], median {values['median_over_ours']:.3f}, "
            f"processor {cell['processor'][name]['over_ours']:.3f}{disturbed}{missed}"
        )


if __name__ == "__main__":
    main()
