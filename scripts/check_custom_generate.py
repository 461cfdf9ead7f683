"""Check of packaged drafters in plain transformers: equal tokens and speed.

It compares `generate` of a package with `model.generate`. It needs only torch and transformers, and
no outrider. Such an environment:

    python -m venv plain && plain/bin/pip install torch transformers
    plain/bin/python scripts/check_custom_generate.py --target models/demo_target FOLDER...

The script prints a JSON line for each folder and batch size, and exits with 1 if a token differs.
The first pass of the target reads the prompts. The other passes are the steps in `tokens_per_step`
(of unfinished rows). `one_token_seconds` is the time of a call for one new token, without any
draft: the overhead of a call.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "def parse(text, *, strict=True):\n    ",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_empty(self):\n",
)
NOT_NEEDED = ("outrider", "jaxtyping", "accelerate", "omegaconf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folder from `outrider package`, or its name on the Hub")
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method, in turns; the median is printed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--fast-linears",
        action="store_true",
        help="with the drafter, use packed linear layers where they are faster (CPU)",
    )
    parser.add_argument("--options", type=json.loads, default={}, help="options of the drafter: '{\"beam_width\": 8}'")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    all_equal = True
    for folder in options.folders:
        for prompts in ([PROMPTS[0]], list(PROMPTS)):
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
            result = compare(model, inputs, folder, options, calls)
            print(json.dumps({"folder": folder.rpartition("/")[2], "batch_size": len(prompts), **result}))
            all_equal = all_equal and result["equal"]
    print(json.dumps({"installed": [name for name in NOT_NEEDED if find_spec(name) is not None]}))
    return 0 if all_equal else 1


def compare(model: Any, inputs: Any, folder: str, options: argparse.Namespace, calls: list[int]) -> dict[str, Any]:
    """Measure tokens and seconds of plain decoding and of the drafter, after a warm-up."""
    common = {**inputs, "max_new_tokens": options.max_new_tokens, "do_sample": False}
    drafter_arguments = {"drafter_options": options.options, "fast_linears": options.fast_linears}
    by_name = {**common, **drafter_arguments, "custom_generate": folder, "trust_remote_code": True}
    # A user with many short calls may load the code once, like this.
    loaded = partial(model.load_custom_generate(folder, trust_remote_code=True), model, drafter=folder)
    ways = {"plain": partial(model.generate, **common), "drafter": partial(model.generate, **by_name)}
    tokens, passes, seconds = take_turns(ways, options.repeats, calls)
    short = {**ways, "drafter, loaded once": partial(loaded, **common, **drafter_arguments)}
    one_token = take_turns({name: partial(way, max_new_tokens=1) for name, way in short.items()}, options.repeats, calls)[2]
    plain, drafter = seconds["plain"], seconds["drafter"]
    return {
        "equal": torch.equal(tokens["plain"], tokens["drafter"]),
        "new_tokens": tokens["plain"].shape[1] - inputs["input_ids"].shape[1],
        "tokens_per_step": (passes["plain"] - 1) / max(1, passes["drafter"] - 1),
        "plain_seconds": plain,
        "drafter_seconds": drafter,
        "speedup": plain / drafter if plain and drafter else None,
        "one_token_seconds": one_token,
    }


def take_turns(ways: dict[str, Callable[[], torch.Tensor]], repeats: int, calls: list[int]) -> tuple[dict[str, Any], ...]:
    """Return the tokens, the model's passes and the median seconds of each method.

    The seconds are None without timed repeats.
    """
    tokens, passes = {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in [*ways.items()] * (1 + repeats):
        calls.clear()
        start = time.perf_counter()
        tokens[name] = way()
        seconds[name].append(time.perf_counter() - start)
        passes[name] = len(calls)
    medians = {name: statistics.median(values[1:]) if repeats else None for name, values in seconds.items()}
    return tokens, passes, medians


if __name__ == "__main__":
    sys.exit(main())
