"""Benchmark of our baseline: plain decoding against transformers' `generate`.

    python scripts/bench_plain_decoding.py --target models/demo_target --threads 2

Both decode greedily with a KV cache, one prompt at a time, and take turns (ours, theirs, ours,
...). Target, prompts and number of new tokens are equal, and there are no stop tokens. The script
ends with an error if the tokens differ. It writes medians and their ratio as JSON.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from outrider.data.chat import encode_prompt
from outrider.data.files import write_json
from outrider.data.suites import load_suite
from outrider.data.types import Turn
from outrider.eval.measure.environment import describe_environment
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter
from outrider.models.target.config import TargetConfig
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.loading import load_target


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name_or_path=args.target, dtype=args.dtype))
    # min_new_tokens would have the same effect, but it would add a logits processor to transformers
    # only.
    target.model.generation_config.eos_token_id = None
    prompts = [
        encode_prompt([Turn(role="user", content=prompt.turns[0])], target.tokenizer).to(target.device)
        for prompt in load_suite(args.suite, args.suite_path, args.prompts).prompts
    ]
    ours, theirs = measure(target, prompts, args.new_tokens, args.repeats)
    report = {
        "target": target.identity.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "suite": args.suite,
        "num_prompts": len(prompts),
        "prompt_tokens": [prompt.shape[1] for prompt in prompts],
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "ours_median_seconds": statistics.median(ours),
        "transformers_median_seconds": statistics.median(theirs),
        "ratio_of_medians": statistics.median(theirs) / statistics.median(ours),
        "median_of_paired_ratios": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "ours_tokens_per_second": args.new_tokens * len(ours) / sum(ours),
        "transformers_tokens_per_second": args.new_tokens * len(theirs) / sum(theirs),
        "tokens_equal": True,  # a difference ends the run before
        "environment": dataclasses.asdict(describe_environment(target.device)),
    }
    write_json(args.output, report)
    print(
        f"ours {report['ours_median_seconds']:.3f} s, transformers {report['transformers_median_seconds']:.3f} s for "
        f"{args.new_tokens} tokens (medians of {len(ours)}): ours is {report['ratio_of_medians']:.2f}x as fast; tokens equal. "
        f"Written to {args.output}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/demo_target", help="directory or Hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--suite", default="stdlib")
    parser.add_argument("--suite-path", default=None, help="local file of the suite")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each prompt on each side")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/plain_decoding.json"))
    return parser.parse_args()


def measure(target: HFTarget, prompts: list[torch.Tensor], new_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    """Measure the seconds of every generation, ours and theirs, in the same order.

    The first round is a warm-up and isn't counted.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(repeats + 1):
        for index, prompt in enumerate(prompts):
            our_seconds, our_tokens = timed(decode_ours, target, prompt, new_tokens)
            their_seconds, their_tokens = timed(decode_theirs, target, prompt, new_tokens)
            if our_tokens != their_tokens:
                raise SystemExit(f"prompt {index}: the tokens differ, ours {our_tokens}, theirs {their_tokens}")
            if repeat > 0:
                ours.append(our_seconds)
                theirs.append(their_seconds)
    return ours, theirs


def timed(
    decode: Callable[[HFTarget, torch.Tensor, int], list[int]], target: HFTarget, prompt: torch.Tensor, new_tokens: int
) -> tuple[float, list[int]]:
    """Time one generation; both methods read the tokens at the end, which synchronizes."""
    start = time.perf_counter()
    tokens = decode(target, prompt, new_tokens)
    return time.perf_counter() - start, tokens


def decode_ours(target: HFTarget, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    steps = generate(target, NullDrafter(), GreedyAcceptance(), prompt, max_new_tokens=new_tokens)
    return [token for step in steps for token in step.tokens[0]]


def decode_theirs(target: HFTarget, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    output = target.model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


if __name__ == "__main__":
    main()
