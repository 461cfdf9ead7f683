"""Profiles decode steps on a GPU: time by kind of kernel, and gaps between kernels.

    python scripts/gpu/profile_steps.py --output "$OUT/profile.json"
    python scripts/gpu/profile_steps.py --shape tiny --output /tmp/profile.json

The first command profiles an 8B-shaped Llama with ReDrafter in CUDA graphs. The second runs
anywhere; on a CPU it profiles operators, without graphs.

The script takes one trace of torch.profiler over a few steps. Shares are relative to the time in
which the device computed. `idle_share` is the part of the trace in which it didn't. `longest_gaps`
are the longest times between two kernels.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode_bench import FORMS, SHAPES, SHAPES_OF_TREES, SettableAcceptance, ShapedDrafter
from random_target import open_device, random_llama, target_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from outrider.data.files import write_json
from outrider.models.decoding import RowSeeds, generate
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.drafters.graphed import GraphedDrafter
from outrider.models.llm.graphed_rule import rule_beside

GROUPS = {
    "attention": ("fmha", "flash", "attention", "cudnn_generated"),
    "matrix": ("gemm", "gemv", "nvjet", "cutlass", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "copies": ("memcpy", "memset", "copy"),
}
"""Kinds of kernels, by parts of their names. The first match counts, since CUTLASS has attention
kernels, too."""
OTHER = "other"
NUM_GAPS, NUM_KERNELS = 10, 15
WARM_UP_STEPS = 8
NODES = 16


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


def main() -> None:
    args = parse_args()
    device = open_device(args.device)
    form = args.form if device.type == "cuda" else "eager"
    with torch.inference_mode():
        kernels = list(trace(args, device, form))
    report = {"shape": args.shape, "form": form, "steps": args.steps, "device": device.type, **summary(kernels)}
    report["milliseconds_per_step"] = report["microseconds"] / 1e3 / args.steps
    write_json(args.output, report)
    for name, share in report["shares"].items():
        print(f"{name:<12}{share:>6.1%}")
    print(f"idle {report['idle_share']:.1%} of {report['milliseconds_per_step']:.2f} ms a step; written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--form", choices=sorted(FORMS), default="cuda_graph")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=Path("profile.json"))
    return parser.parse_args()


def trace(args: argparse.Namespace, device: torch.device, form: str) -> Iterator[Kernel]:
    """Yield the kernels of some steps of tree decoding."""
    # 1. Build target and drafter, and warm up.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = target_of(random_llama(SHAPES[args.shape][0], dtype, device), **FORMS[form])
    width, length = SHAPES_OF_TREES[NODES]
    options = {"kind": "redrafter", "beam_width": width, "beam_length": length, "tree_nodes": NODES}
    with device:
        network: Any = build_drafter(parse_drafter(options), target).to(dtype).eval().requires_grad_(False)
    drafter: Any = ShapedDrafter(network, NODES, length, device)
    drafter = GraphedDrafter(drafter) if target.cuda_graphs else drafter
    prompt = torch.arange(args.prompt_tokens, device=device)[None] % target.vocab_size
    limit = (length + 1) * (2 + WARM_UP_STEPS + args.steps)
    rule = rule_beside(target, SettableAcceptance(0.7))
    steps = generate(target, drafter, rule, prompt, max_new_tokens=limit, generator=RowSeeds([0]))
    for _ in itertools.islice(steps, WARM_UP_STEPS):
        pass
    # 2. Profile some steps.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in itertools.islice(steps, args.steps):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    # 3. Yield the device's kernels, or on a CPU the operators.
    for event in profiler.events() or ():
        start = event.time_range.start
        if device.type == "cuda":
            if event.device_type == DeviceType.CUDA:
                yield Kernel(event.name, start, event.time_range.end)
        else:  # operators call each other, so each counts without its callees
            yield Kernel(event.name, start, start + event.self_cpu_time_total)


def summary(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Summarise a trace: shares by kind, the longest gaps, and the slowest kernels.

    Raises ValueError for a trace without kernels.
    """
    # 1. Add times by kind and by name, and measure the gaps.
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    if not ordered:
        raise ValueError("the trace holds no kernels; is CUPTI, the profilers' library, missing on this machine?")
    by_group, by_name = dict.fromkeys((*GROUPS, OTHER), 0.0), dict[str, float]()
    gaps, end = [], ordered[0].start
    for name, start, stop in ordered:
        by_group[group_of(name)] += stop - start
        by_name[name] = by_name.get(name, 0.0) + stop - start
        gaps.append(max(0.0, start - end))
        end = max(end, stop)
    # 2. Shares and the longest ones.
    whole = end - ordered[0].start
    busy = sum(by_group.values())
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:NUM_KERNELS]
    return {
        "num_kernels": len(ordered),
        "microseconds": whole,
        "shares": {name: value / busy for name, value in by_group.items()},
        "group_microseconds": by_group,
        "idle_share": sum(gaps) / whole,
        "longest_gaps_microseconds": sorted(gaps, reverse=True)[:NUM_GAPS],
        "kernels_microseconds": {name[:120]: value for name, value in longest},
    }


def group_of(name: str) -> str:
    """Return the kind of a kernel."""
    lower = name.lower()
    return next((group for group, parts in GROUPS.items() if any(part in lower for part in parts)), OTHER)


if __name__ == "__main__":
    main()
