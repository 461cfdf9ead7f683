"""Benchmark of the baseline: plain decoding against the other ways to decode plainly.

    python scripts/bench_plain_decoding.py --target models/demo_target

`ours` is plain decoding as every evaluation runs it, with linear layers in the layouts that this
machine multiplies fastest. The others are `rows first` (our loop, layers as transformers computes
them), `packed` (our loop, every layer packed) and transformers' `generate`. All decode the same
prompts greedily with a KV cache, one at a time, in turns whose order rotates. There are no stop
tokens. The script ends with an error if the tokens of a float32 target differ. It measures each
number type and number of threads, and writes wall and processor seconds with their ratios as JSON.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from outrider.data.chat import encode_prompt
from outrider.data.files import write_json
from outrider.data.suites import load_suite
from outrider.data.types import Turn
from outrider.eval.measure.environment import describe_environment
from outrider.eval.results.stats import bootstrap, ratio_of_ratios
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.target.config import TargetConfig
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.linears import PackedForSomeRows
from outrider.models.target.loading import load_target

MARK = 1.02
"""Most that plain decoding may take, relative to any other way."""
Way = Callable[[torch.Tensor], list[int]]


def main() -> None:
    args = parse_args()
    cells = []
    for dtype, threads in itertools.product(args.dtypes, args.threads):
        torch.set_num_threads(threads)
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
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each prompt in each way")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/plain_decoding.json"))
    return parser.parse_args()


def measure(args: argparse.Namespace, dtype: str, threads: int) -> dict[str, Any]:
    """Measure all ways with one number type and number of threads."""
    # 1. The targets, whose answers have no end.
    chosen, plain, packed = (
        load_target(TargetConfig(name_or_path=args.target, dtype=dtype, fast_linears=fast, device="cpu"))
        for fast in (True, False, False)
    )
    for target in (chosen, plain, packed):
        # min_new_tokens would have the same effect, but adds a logits processor to transformers only.
        target.model.generation_config.eos_token_id = None
    pack_all(packed.model)
    prompts = [
        encode_prompt([Turn(role="user", content=prompt.turns[0])], chosen.tokenizer)
        for prompt in load_suite(args.suite, args.suite_path, args.prompts).prompts
    ]
    ways: dict[str, Way] = {
        "ours": lambda prompt: decode_ours(chosen, prompt, args.new_tokens),
        "rows first": lambda prompt: decode_ours(plain, prompt, args.new_tokens),
        "packed": lambda prompt: decode_ours(packed, prompt, args.new_tokens),
        "transformers": lambda prompt: decode_theirs(plain, prompt, args.new_tokens),
    }
    # 2. The seconds of every answer.
    wall, processor = take_turns(ways, prompts, args.repeats, require_equal=dtype == "float32")
    return {
        "dtype": dtype,
        "threads": threads,
        "linears": chosen.linears,
        "tokens_per_second": {way: args.new_tokens / statistics.median(seconds) for way, seconds in wall.items()},
        "wall": compare(wall, len(prompts)),
        "processor": compare(processor, len(prompts)),
    }


def pack_all(model: nn.Module) -> None:
    """Let every linear layer use packed weights, for any number of rows."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            vars(module)["forward"] = PackedForSomeRows(module, 1, 2**31)


def decode_ours(target: HFTarget, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=new_tokens)
    return [token for step in steps for token in step.tokens[0]]


def decode_theirs(target: HFTarget, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    output = target.model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


def take_turns(
    ways: dict[str, Way], prompts: list[torch.Tensor], repeats: int, *, require_equal: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measure wall and processor seconds of each way on each prompt; the first round warms up."""
    wall: dict[str, list[float]] = {way: [] for way in ways}
    processor: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for turn, (repeat, prompt) in enumerate(tqdm(list(itertools.product(range(repeats + 1), prompts)), unit="prompt")):
        first = turn % len(names)
        answers = {}
        for way in (*names[first:], *names[:first]):
            start, start_processor = time.perf_counter(), time.process_time()
            answers[way] = ways[way](prompt)
            if repeat > 0:
                wall[way].append(time.perf_counter() - start)
                processor[way].append(time.process_time() - start_processor)
        if require_equal and any(answer != answers["ours"] for answer in answers.values()):
            raise SystemExit(f"a prompt's tokens differ: {answers}")
    return wall, processor


def compare(seconds: dict[str, list[float]], num_prompts: int) -> dict[str, Any]:
    """Compare each way with ours: seconds over ours, the median of pairs and an interval over prompts.

    A ratio above 1 means that ours is faster.
    """
    ours = np.array(seconds["ours"])

    def by_prompt(values: np.ndarray) -> np.ndarray:
        totals = values.reshape(-1, num_prompts).sum(0)
        return np.stack([totals, np.ones_like(totals)], axis=1)

    result = {}
    for way, values in seconds.items():
        theirs = np.array(values)
        ratio, interval = bootstrap(np.stack([by_prompt(theirs), by_prompt(ours)]), ratio_of_ratios, seed=0)
        result[way] = {
            "median_seconds": float(np.median(theirs)),
            "over_ours": ratio,
            "over_ours_ci95": interval,
            "median_over_ours": float(np.median(theirs / ours)),
        }
    return result


def print_cell(cell: dict[str, Any]) -> None:
    print(f"\n{cell['dtype']}, {cell['threads']} threads ({cell['linears'] or 'layers as transformers computes them'})")
    for way, values in cell["wall"].items():
        low, high = values["over_ours_ci95"] or (values["over_ours"],) * 2
        processor = cell["processor"][way]["median_over_ours"]
        missed = "  <- ours is slower than the mark" if values["median_over_ours"] < 1 / MARK else ""
        print(
            f"  {way:<13}{cell['tokens_per_second'][way]:7.1f} tokens/s  {values['over_ours']:.3f} of our seconds "
            f"[{low:.3f}, {high:.3f}], median {values['median_over_ours']:.3f}, processor {processor:.3f}{missed}"
        )


if __name__ == "__main__":
    main()
