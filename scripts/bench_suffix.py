"""Benchmark of SuffixDecoding's index: memory, and time per token, over long texts.

    python scripts/bench_suffix.py

Each text has a prompt, which is indexed at once, and an answer, which is drafted and indexed step
by step. The texts are Python's standard library, and three that an index may be bad at: random
tokens (every n-gram is new), one token repeated, and two tokens in turns (a match is as long as the
text). Time is that of the processor; memory is what Python allocated for the row's state. The
result is written as JSON.
"""

import argparse
import dataclasses
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from outrider.data.files import write_json
from outrider.data.stdlib import read_source, stdlib_files
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters.journal import Journal, Snapshot
from outrider.models.drafters.suffix import Suffix, SuffixConfig
from outrider.models.drafters.training_free import State

RANDOM_VOCABULARY = 32_000
STEP_TOKENS = 3
"""Tokens that a step of the answer adds."""


def main() -> None:
    args = parse_args()
    texts = {
        "standard library": library_tokens(args.tokenizer, args.tokens),
        "random tokens": random.Random(0).choices(range(RANDOM_VOCABULARY), k=args.tokens),
        "one token": [7] * args.tokens,
        "two tokens in turns": [7, 8] * (args.tokens // 2),
    }
    report: dict[str, Any] = {
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "step_tokens": STEP_TOKENS,
        "options": dataclasses.asdict(SuffixConfig()),
        "texts": {name: measure(text, args.prompt_tokens) for name, text in texts.items()},
        "environment": dataclasses.asdict(describe_environment(torch.device("cpu"))),
    }
    write_json(args.output, report)
    print(f"{'text':20} {'MB':>6} {'prompt s':>9} {'us/token':>9} {'draft us':>9} {'99th %':>7}")
    for name, values in report["texts"].items():
        print(
            f"{name:20} {values['megabytes']:6.1f} {values['prompt_seconds']:9.2f} {values['add_microseconds_per_token']:9.1f} "
            f"{values['draft_microseconds']:9.0f} {values['draft_microseconds_99th_percentile']:7.0f}"
        )
    print(f"Written to {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=str(Path(__file__).parents[1] / "models" / "demo_target"), help="directory")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of prompt and answer")
    parser.add_argument("--prompt-tokens", type=int, default=30_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/suffix.json"))
    return parser.parse_args()


def library_tokens(tokenizer_path: str, count: int) -> list[int]:
    """Return the first tokens of the modules that the demo's target was not trained on."""
    tokenizer, tokens = AutoTokenizer.from_pretrained(tokenizer_path), []
    for path in stdlib_files("eval"):
        tokens += tokenizer(read_source(path) or "", add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= count:
            break
    return tokens[:count]


def measure(text: Sequence[int], prompt_tokens: int) -> dict[str, float]:
    """Measure one text: times first, then memory, since measuring memory takes time."""
    drafter = Suffix(SuffixConfig())
    # 1. Index the prompt.
    start = time.process_time()
    state = Snapshot(Journal(drafter.store_factory(), [list(text[:prompt_tokens])]), 1)
    prompt_seconds = time.process_time() - start
    # 2. Draft and index the answer, step by step.
    draft_seconds, add_seconds = [], 0.0
    for begin in range(prompt_tokens, len(text), STEP_TOKENS):
        before = time.process_time()
        drafter.candidates(State((state,)), [text[begin]])
        drafted = time.process_time()
        state = state.after(list(text[begin : begin + STEP_TOKENS]))
        draft_seconds.append(drafted - before)
        add_seconds += time.process_time() - drafted
    # 3. Index everything again, and count the memory.
    tracemalloc.start()
    state = Snapshot(Journal(drafter.store_factory(), [list(text[:prompt_tokens])]), 1)
    for begin in range(prompt_tokens, len(text), STEP_TOKENS):
        state = state.after(list(text[begin : begin + STEP_TOKENS]))
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    return {
        "megabytes": round(megabytes, 1),
        "prompt_seconds": round(prompt_seconds, 3),
        "add_microseconds_per_token": round(1e6 * add_seconds / max(len(text) - prompt_tokens, 1), 2),
        "draft_microseconds": round(1e6 * statistics.median(draft_seconds), 1),
        "draft_microseconds_99th_percentile": round(1e6 * statistics.quantiles(draft_seconds, n=100)[-1], 1),
    }


if __name__ == "__main__":
    main()
