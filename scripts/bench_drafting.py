"""Benchmark of the parts of a decode step, by kind of drafter, in seconds of the processor.

    python scripts/bench_drafting.py --threads 1
    python scripts/bench_drafting.py --threads 1 --against ../older   # another checkout, in turns

Fresh drafters decode random prompts greedily. A step is divided into the draft, the model's forward
pass, and the rest: masks, acceptance, caches and the loop. Of the draft, the matrix products are
measured alone, by repeating the calls of its linear layers; their weights then come from nearer
caches than in a step, so the products take longer there. Time is that of the processor, all
threads together, so other processes disturb it less than the time of a clock. The medians over
rounds are written as JSON. With `--against`, each round runs once with each checkout.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.data.files import write_json
from outrider.eval.measure.environment import describe_environment
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

REDRAFTER = {"kind": "redrafter", "exit_width": 256, "head_init": "target", "initial_state": "zero"}
EAGLE3 = {"kind": "eagle3", "layer": {"model_type": "llama", "hidden_act": "silu"}}
BLOCK = {"kind": "block", "feature_layers": [2, 4, 7], "rank": 64, "block": 4, "width": 16, "tree_nodes": 40}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "redrafter 4x3": {**REDRAFTER, "beam_width": 4, "beam_length": 3},
    "redrafter 4x3, 5 nodes": {**REDRAFTER, "beam_width": 4, "beam_length": 3, "tree_nodes": 5},
    "redrafter 16x5": {**REDRAFTER, "beam_width": 16, "beam_length": 5},
    "eagle3 5x8": {**EAGLE3, "depth": 5, "top_k": 8, "tree_nodes": 40},
    "redrafter2 16x4": {**BLOCK, "num_slots": 1, "train_head": True},
    "block rnn 16x4": BLOCK,
    "block bilinear 16x4": {**BLOCK, "correction": "bilinear"},
    "block markov 16x4": {**BLOCK, "correction": "markov"},
    "medusa 4": {"kind": "medusa", "heads": "ffn", "share_head": True, "num_heads": 4, "tree_nodes": 40},
    "draft_model 5x8": {"kind": "draft_model", "init": "target_layers", "length": 5, "top_k": 8, "tree_nodes": 40},
}
"""Options of each drafter: those of the demo, for trees of few and of many nodes."""
PROMPT_TOKENS = 100
PARTS = ("draft", "linears", "forward", "rest")
"""Parts of a step; `linears` is the share of matrix products in `draft`."""

Calls = list[tuple[nn.Module, torch.Tensor]]
"""Calls of modules, with their arguments."""
Report = dict[str, dict[str, float]]
"""Milliseconds of each part, by setting."""


def main() -> None:
    args = parse_args()
    checkouts = {"here": None} if args.against is None else {"here": None, "against": args.against}
    rounds: dict[str, list[Report]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(measure_apart(args, checkout))
    report: dict[str, Any] = {
        "target": Path(args.target).name,
        "dtype": args.dtype,
        "batch": args.batch,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "milliseconds_per_step": {name: medians(reports) for name, reports in rounds.items()},
        "environment": {**dataclasses.asdict(describe_environment(torch.device("cpu"))), "num_threads": args.threads},
    }
    write_json(args.output, report)
    print_report(report["milliseconds_per_step"])
    print(f"Written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(Path(__file__).parents[1] / "models" / "demo_target"), help="directory")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--against", type=Path, help="another checkout, with the same names of modules")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/drafting.json"))
    parser.add_argument("--one-round", action="store_true", help="measure in this process, and print JSON")
    return parser.parse_args()


def measure_apart(args: argparse.Namespace, checkout: Path | None) -> Report:
    """Measure one round in a new process, with the package of this environment or of a checkout."""
    command = [sys.executable, __file__, "--one-round", "--target", args.target, "--dtype", args.dtype]
    sizes = {"--batch": args.batch, "--threads": args.threads, "--new-tokens": args.new_tokens}
    command += [str(value) for pair in sizes.items() for value in pair] + ["--settings", *args.settings]
    with tempfile.TemporaryDirectory() as folder:
        paths = os.environ.get("PYTHONPATH", "")
        if checkout is not None:
            (Path(folder) / "outrider").symlink_to(checkout.resolve(), target_is_directory=True)
            paths = os.pathsep.join([folder, paths])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(args.threads)}
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    report: Report = json.loads(output.splitlines()[-1])
    return report


def one_round(args: argparse.Namespace) -> Report:
    """Measure every setting in this process."""
    torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype=args.dtype), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, target.vocab_size, (args.batch, PROMPT_TOKENS), generator=generator)
    return {name: measure(target, SETTINGS[name], prompts, args.new_tokens) for name in args.settings}


def choose_linears(drafter: nn.Module) -> None:
    """Choose the kernels of a drafter's linear layers, if the checkout has such a choice."""
    if importlib.util.find_spec("outrider.models.llm.linears") is not None:
        importlib.import_module("outrider.models.llm.linears").choose_linears(drafter)


def measure(target: HFTarget, options: dict[str, Any] | None, prompts: torch.Tensor, new_tokens: int) -> dict[str, float]:
    """Decode twice, first to warm up, and return the milliseconds per step of each part."""
    drafter: Any = NullDrafter()
    if options is not None:
        torch.manual_seed(0)
        drafter = build_drafter(parse_drafter(options), target).to(target.dtype).eval().requires_grad_(False)
        choose_linears(drafter)
    propose, seconds = drafter.propose, dict.fromkeys(PARTS, 0.0)
    calls: Calls = []

    def timed_propose(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = propose(*args, **kwargs)
        seconds["draft"] += time.process_time() - start
        return result

    # 1. Decode, with clocks around the draft and the model.
    drafter.propose = timed_propose
    hooks = clock_model(target.model, seconds)
    for _ in range(2):
        seconds.update(dict.fromkeys(PARTS, 0.0))
        steps = generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=new_tokens)
        next(steps)  # the prefill
        seconds["forward"] = 0.0
        start = time.process_time()
        num_steps = len(list(steps))
        whole = time.process_time() - start
    for hook in hooks:
        hook.remove()
    seconds["rest"] = whole - seconds["draft"] - seconds["forward"]
    # 2. Record the calls of the drafter's linear layers in two steps, and repeat those of the last.
    if options is not None:
        drafter.propose = recording(propose, drafter, calls)
        list(zip(generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=new_tokens), range(3), strict=False))
        seconds["linears"] = num_steps * repeat(calls)
    return {part: 1000 * value / num_steps for part, value in seconds.items()}


def clock_model(model: nn.Module, seconds: dict[str, float]) -> list[Any]:
    """Add the model's time to `seconds`, by hooks, which are returned."""

    def begin(*_: Any) -> None:
        seconds["forward"] -= time.process_time()

    def end(*_: Any) -> None:
        seconds["forward"] += time.process_time()

    return [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]


def recording(propose: Callable[..., Any], drafter: nn.Module, calls: Calls) -> Callable[..., Any]:
    """Return a `propose` that keeps the last draft's calls of linear layers in `calls`."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.clear()
        linears = [module for module in drafter.modules() if isinstance(module, nn.Linear)]
        hooks = [linear.register_forward_pre_hook(lambda module, args: calls.append((module, args[0]))) for linear in linears]
        result = propose(*args, **kwargs)
        for hook in hooks:
            hook.remove()
        return result

    return recorded


@torch.inference_mode()
def repeat(calls: Calls, times: int = 30) -> float:
    """Return the median seconds of all these calls in a row."""
    seconds = []
    for _ in range(times):
        start = time.process_time()
        for linear, x in calls:
            linear(x)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def medians(reports: list[Report]) -> Report:
    """Return the median of each number over the rounds."""
    return {
        name: {part: statistics.median(report[name][part] for report in reports) for part in parts}
        for name, parts in reports[0].items()
    }


def print_report(reports: dict[str, Report]) -> None:
    """Print a line for each setting and checkout."""
    print(f"{'ms of the processor per step':32s}" + "".join(f"{part:>10s}" for part in PARTS))
    for setting in reports["here"]:
        for name, report in reports.items():
            print(f"{setting + ', ' + name:32s}" + "".join(f"{report[setting][part]:10.3f}" for part in PARTS))


if __name__ == "__main__":
    options = parse_args()
    if options.one_round:
        print(json.dumps(one_round(options)))
    else:
        main()
