"""Measures a pass's attention over long contexts on a GPU: whole, in parts, and without a mask.

    python scripts/gpu/attention_bench.py --output "$OUT/attention.json"
    python scripts/gpu/attention_bench.py --shape tiny --keys 512 1024 --device cpu --output /tmp/attention.json

The first command takes half a minute with the heads of an 8B model. The second runs anywhere.

A row has the milliseconds of all layers' attention in a pass, by form: `1` is one call of the kernel
for masks, other numbers are parts of the keys, `math` is PyTorch's plain arithmetic, and `flash` is
attention without a mask. All layers have random keys and values of their own, as in a pass, and on
CUDA the work is replayed as a graph. `chosen` is what decoding would choose from these times;
`gain` is the time of one call divided by that of the choice. `bandwidth_share` is the bytes of keys
and values, divided by the choice's time, as a share of the measured bandwidth.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_target import LLAMA_8B, TINY, memory_bandwidth, open_device
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from outrider.data.files import write_json
from outrider.models.llm.attention_speeds import LayerStates, choose, measure, time_in_turns

SHAPES = {"llama8b": LLAMA_8B, "tiny": TINY}
MAX_MATH_KEYS = 8192
"""Plain arithmetic keeps all scores in memory, so it isn't measured for more keys."""


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    device = open_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth = memory_bandwidth(device)
    report: dict[str, Any] = {"shape": args.shape, "dtype": str(dtype), "memory_bytes_per_second": bandwidth, "rows": []}
    report |= {"torch": torch.__version__, "skipped": [], "failed": []}
    for keys, batch, queries in itertools.product(args.keys, args.batches, args.queries):
        case = {"keys": keys, "batch": batch, "queries": queries}
        try:
            if time.perf_counter() - started > args.budget_seconds:
                report["skipped"].append(case)
            else:
                report["rows"].append(case | row(SHAPES[args.shape], case, device, dtype, bandwidth))
        except RuntimeError as error:  # out of memory, a kernel that doesn't take a shape
            report["failed"].append(case | {"error": str(error)[:500]})
        write_json(args.output, report)  # after each case, so that results are kept
    print_report(report)
    print(f"{time.perf_counter() - started:.0f} s; written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--keys", type=int, nargs="+", default=[2048, 8192, 32768], help="multiples of 256")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 16, 64], help="tokens of a row that a pass reads")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--budget-seconds", type=float, default=60, help="start no case after this time")
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=Path("attention_bench.json"))
    return parser.parse_args()


@torch.inference_mode()
def row(
    shape: dict[str, int], case: dict[str, int], device: torch.device, dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    """Measure one case."""
    # 1. Keys and values of all layers.
    num_heads, num_kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    width, is_recorded = shape["hidden_size"] // num_heads, device.type == "cuda"
    size = (2, case["batch"], num_kv_heads, case["keys"], width)
    states = [tuple(torch.randn(size, device=device, dtype=dtype)) for _ in range(shape["num_hidden_layers"])]
    # 2. The forms that decoding chooses from, and two others beside them.
    seconds: dict[Any, float] = measure(states, num_heads=num_heads, num_queries=case["queries"], is_recorded=is_recorded)
    chosen = choose(seconds)
    query = torch.randn(case["batch"], num_heads, case["queries"], width, device=device, dtype=dtype)
    works: dict[str, Callable[[], None]] = {"flash": partial(without_mask, query, states)}
    if case["keys"] <= MAX_MATH_KEYS:
        works["math"] = partial(by_arithmetic, query, states)
    others = time_in_turns(works, device, is_recorded=is_recorded)
    # 3. The record.
    num_bytes = sum(tensor.nbytes for layer in states for tensor in layer)
    return {
        "milliseconds": {str(form): 1e3 * value for form, value in (seconds | others).items()},
        "chosen": chosen,
        "gain": seconds[1] / seconds[chosen],
        "bandwidth_share": num_bytes / seconds[chosen] / bandwidth,
    }


def without_mask(query: torch.Tensor, states: LayerStates) -> None:
    for key, value in states:
        scaled_dot_product_attention(query, key, value, enable_gqa=True)


def by_arithmetic(query: torch.Tensor, states: LayerStates) -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        without_mask(query, states)


def print_report(report: dict[str, Any]) -> None:
    print("| keys | batch | queries | chosen | gain | bandwidth | ms of a pass by form |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for case in report["rows"]:
        forms = ", ".join(f"{form} {value:.2f}" for form, value in case["milliseconds"].items())
        print(
            f"| {case['keys']} | {case['batch']} | {case['queries']} | {case['chosen']} | {case['gain']:.1f} "
            f"| {case['bandwidth_share']:.0%} | {forms} |"
        )
    for case in report["failed"]:
        print(f"failed: {case}")


if __name__ == "__main__":
    main()
