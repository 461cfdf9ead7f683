"""Check of packaged drafters in plain transformers: equal tokens and speed.

It compares `generate` of a package with `model.generate`. It needs only torch and transformers, and
no outrider. Such an environment:

    python -m venv plain && plain/bin/pip install torch transformers
    plain/bin/python scripts/engines/check_transformers.py --target models/demo_target FOLDER...

The script prints a JSON line for each folder and batch size, and exits with 1 if a token differs.
The first pass of the target reads the prompts. The other passes are the steps in `tokens_per_step`
(of unfinished rows). `one_token_seconds` is the time of a call for one new token, without any
draft: the overhead of a call.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "def parse(text, *, strict=True):\n    ",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_empty(self):\n",
)
NOT_NEEDED = ("outrider", "jaxtyping", "accelerate", "omegaconf")


def main(
    folders: Annotated[list[str], typer.Argument(help="Folder from `outrider package`, or its name on the Hub.")],
    target: Annotated[str, typer.Option(help="Folder or Hub id.")],
    dtype: str = "float32",
    max_new_tokens: int = 100,
    repeats: Annotated[int, typer.Option(help="Timed runs of each method, in turns; the median is printed.")] = 3,
    threads: int = 1,
    fast_linears: Annotated[bool, typer.Option("--fast-linears", help="With the drafter, pack faster linear layers.")] = False,
    options: Annotated[str, typer.Option(help="Options of the drafter: '{\"beam_width\": 8}'")] = "{}",
) -> None:
    """Check packaged drafters in plain transformers."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    drafting = {"drafter_options": json.loads(options), "fast_linears": fast_linears}
    all_equal = True
    for folder in folders:
        for prompts in ([PROMPTS[0]], list(PROMPTS)):
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
            common = {**inputs, "max_new_tokens": max_new_tokens, "do_sample": False}
            result = compare(model, common, folder, drafting, repeats, calls)
            print(json.dumps({"folder": folder.rpartition("/")[2], "batch_size": len(prompts), **result}))
            all_equal = all_equal and result["equal"]
    print(json.dumps({"installed": [name for name in NOT_NEEDED if find_spec(name) is not None]}))
    raise typer.Exit(int(not all_equal))


def compare(
    model: Any, common: dict[str, Any], folder: str, drafting: dict[str, Any], repeats: int, calls: list[int]
) -> dict[str, Any]:
    """Measure tokens and seconds of plain decoding and of the drafter, after a warm-up."""
    by_name = {**common, **drafting, "custom_generate": folder, "trust_remote_code": True}
    # A user with many short calls may load the code once, like this.
    loaded = partial(model.load_custom_generate(folder, trust_remote_code=True), model, drafter=folder)
    ways = {"plain": partial(model.generate, **common), "drafter": partial(model.generate, **by_name)}
    tokens, passes, seconds = take_turns(ways, repeats, calls)
    short = {**ways, "drafter, loaded once": partial(loaded, **common, **drafting)}
    one_token = take_turns({name: partial(way, max_new_tokens=1) for name, way in short.items()}, repeats, calls)[2]
    plain, drafter = seconds["plain"], seconds["drafter"]
    return {
        "equal": torch.equal(tokens["plain"], tokens["drafter"]),
        "new_tokens": tokens["plain"].shape[1] - common["input_ids"].shape[1],
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
    typer.run(main)
