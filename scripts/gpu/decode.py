"""Measures decode steps on a GPU: plain and with drafters, in each form, beside transformers' `generate`.

    python scripts/gpu/decode.py
    python scripts/gpu/decode.py --shape tiny --device cpu      # does the script work?
    python scripts/gpu/decode.py --target meta-llama/Llama-3.1-8B-Instruct --drafter outputs/llama/drafter

The first command needs no download: target and drafters have random weights of the sizes of a Llama
of 8 billion parameters. Every step does all the work of a real one, but almost no draft token is
accepted. So the milliseconds of a step count, and `break_even`: the tokens per step from which on
a drafter is faster than the fastest plain decoding. A real target answers the held-out prompts of
the suite `stdlib`; with its drafters the `speedup` counts, too.

The fastest plain decoding is that of any measured form, or transformers' `generate`. `generate` runs
several times, and the median counts.

- `bandwidth_share`: the bytes of the target's weights over a step's time, as a share of the
  bandwidth that reading a large tensor reaches in the same run.
- `waits`: how often the host waits for the device in a step, as PyTorch counts it.

A case that fails is listed with its error.
"""

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from card import FAILURES, SHAPES, Report, clock, dtype_on, free_memory, open_device, random_llama, target_of
from ratios import GENERATE, PLAIN, add_ratios

from outrider.data.chat import encode_prompt
from outrider.data.conversations import Turn
from outrider.data.suites import load_suite
from outrider.eval.measure.environment import MAX_ACCELERATOR_BYTES, measure_bandwidth, weight_bytes
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.graphed import graphed
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.graphed_rule import rule_beside
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

FORMS = {"eager": {}, "graphs": {"cuda_graphs": True}, "compiled graphs": {"compiled": True, "cuda_graphs": True}}
"""Options of the target, by form. Only CUDA has graphs."""
FRESH: dict[str, dict[str, Any]] = {
    "redrafter": {"kind": "redrafter", "beam_width": 4, "beam_length": 5, "head_init": "random", "tree_nodes": 16},
    "eagle3": {"kind": "eagle3", "depth": 6, "top_k": 8, "tree_nodes": 48},
    "block": {"kind": "block", "block": 7, "width": 16, "tree_nodes": 48},
}
"""Drafters with random weights."""
ROOM = 8
"""Tokens of a step for which the cache has room, so that it never moves. An answer that is full begins anew."""
COUNTED_STEPS = 4
GENERATE_REPEATS = 3
CPU_BYTES = 2**26


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure decode steps on a GPU."""
    options = read_options(arguments)
    opened = open_device(options.device)
    forms = options.form or [name for name in FORMS if opened.type == "cuda" or name == "eager"]
    bench = Bench(opened, options.shape, options.target, options.drafter, options.steps, options.warm_up)
    facts = {name: getattr(options, name) for name in ("prompt_tokens", "steps", "warm_up")}
    facts |= {"target": options.target or options.shape, "dtype": str(bench.dtype)}
    report = Report(options.output, opened, **facts, gigabytes_per_second=bench.bandwidth)
    for name, size in itertools.product(forms, options.batch):
        prompts = bench.prompts(size, options.prompt_tokens)
        for method in [*([GENERATE] if name == "eager" else []), PLAIN, *bench.drafters]:
            case = {"form": name, "batch": size, "method": method}
            try:
                report.add(case, bench.measure(name, method, prompts))
            except FAILURES as error:
                report.add(case, error)
    add_ratios(report.rows)
    report.print()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure decode steps on a GPU.")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b", help="of a random target")
    parser.add_argument("--target", help="a real target, in place of a random one")
    parser.add_argument("--drafter", nargs="+", default=[], help="drafters of the real target")
    parser.add_argument("--form", nargs="+", choices=FORMS, help="all unless given")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="batch sizes")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, default=Path("decode.json"))
    return parser.parse_args(arguments)


class Bench:
    """The weights, and one form of the target at a time."""

    def __init__(
        self, device: torch.device, shape: str, name: str | None, drafters: list[str], steps: int, warm_up: int
    ) -> None:
        self.device, self.dtype, self.name, self.steps, self.warm_up = device, dtype_on(device), name, steps, warm_up
        self.model = None if name else random_llama(shape, device)
        self.drafters = drafters if name else [*FRESH]
        self.form, self.target = "", None
        target = self.target_in("eager")
        self.vocab_size, self.num_bytes = target.vocab_size, weight_bytes(target.model)
        self.bandwidth = measure_bandwidth(CPU_BYTES if device.type == "cpu" else MAX_ACCELERATOR_BYTES, device)

    def prompts(self, count: int, num_tokens: int) -> torch.Tensor:
        """Return prompts [count, num_tokens]: held-out ones for a real target, random ids for a random one."""
        if self.name is None:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(5, self.vocab_size, (count, num_tokens), generator=generator).to(self.device)
        assert self.target is not None
        texts = (prompt.turns[0] for prompt in load_suite("stdlib").prompts)
        ids = (encode_prompt([Turn(role="user", content=text)], self.target.tokenizer)[0] for text in texts)
        ends = list(itertools.islice((prompt[-num_tokens:] for prompt in ids if len(prompt) >= num_tokens), count))
        if len(ends) < count:
            raise ValueError(
                f"{len(ends)} held-out prompts have {num_tokens} tokens; --batch is {count}: give fewer --prompt-tokens"
            )
        return torch.stack(ends).to(self.device)

    def target_in(self, form: str) -> HFTarget:
        """Return the target in a form; the one of another form is freed."""
        if self.form != form or self.target is None:
            self.form, self.target = form, None
            free_memory(self.device)
            options = {"name_or_path": self.name, "dtype": str(self.dtype).removeprefix("torch."), **FORMS[form]}
            self.target = (
                load_target(TargetConfig(**options), self.device)
                if self.model is None
                else target_of(self.model, **FORMS[form])
            )
            self.target.model.generation_config.eos_token_id = None  # all answers have the same length
        return self.target

    def drafter(self, method: str, target: HFTarget) -> Any:
        """Return a drafter as evaluation runs it: in CUDA graphs, if the target uses them."""
        if method == PLAIN:
            return NullDrafter()
        if self.name is not None:
            drafter: Any = load_drafter(method, target)
        else:
            torch.manual_seed(0)
            with self.device:  # a CPU takes long to make that many random numbers
                drafter = build_drafter(parse_drafter(FRESH[method]), target).to(self.dtype).eval().requires_grad_(False)
        return graphed(drafter) if target.cuda_graphs else drafter

    @torch.inference_mode()
    def measure(self, form: str, method: str, prompts: torch.Tensor) -> dict[str, Any]:
        """Measure one case: the median of a step's milliseconds, and what follows from it."""
        target = self.target_in(form)
        if method == GENERATE:
            return self.theirs(target, prompts)
        drafter, rule = self.drafter(method, target), rule_beside(target, GreedyAcceptance())
        # 1. Steps one by one: each ends when its tokens are read.
        room = ROOM * (1 + self.warm_up + self.steps + COUNTED_STEPS)
        steps = timed_steps(lambda: generate(target, drafter, rule, prompts, max_new_tokens=room), len(prompts))
        measured = [next(steps) for _ in range(self.warm_up + self.steps)][self.warm_up :]
        # 2. What follows.
        step_seconds, num_new = statistics.median(seconds for seconds, _ in measured), sum(count for _, count in measured)
        return {
            "milliseconds": 1e3 * step_seconds,
            "tokens_per_step": num_new / self.steps / len(prompts),
            "tokens_per_second": num_new / sum(seconds for seconds, _ in measured),
            "bandwidth_share": self.num_bytes / step_seconds / 1e9 / self.bandwidth,
            "waits": count_waits(steps) if self.device.type == "cuda" else None,
        }

    def theirs(self, target: HFTarget, prompts: torch.Tensor) -> dict[str, Any]:
        """Measure transformers' `generate`, without its prefill: what more tokens take."""
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(prompts)}

        def seconds(num_new: int) -> float:
            start = clock(self.device)
            target.model.generate(prompts, max_new_tokens=num_new, **options)
            return clock(self.device) - start

        seconds(2)  # warms up
        totals = [seconds(1 + self.steps) - seconds(1) for _ in range(GENERATE_REPEATS)]
        step_seconds = statistics.median(totals) / self.steps
        return {
            "milliseconds": 1e3 * step_seconds,
            "tokens_per_step": 1.0,
            "tokens_per_second": len(prompts) / step_seconds,
            "bandwidth_share": self.num_bytes / step_seconds / 1e9 / self.bandwidth,
        }


def timed_steps(answer: Callable[[], Iterator[Any]], batch: int) -> Iterator[tuple[float, int]]:
    """Yield the seconds and the new tokens of steps over the whole batch, without end.

    An answer begins anew where a row has ended. Prefills are not timed.
    """
    while True:
        steps = answer()
        next(steps)
        start = time.perf_counter()
        for step in steps:
            if len(step.rows) < batch:
                break
            yield time.perf_counter() - start, sum(map(len, step.tokens))
            start = time.perf_counter()


def count_waits(steps: Iterator[Any]) -> float:
    """Return how often the host waits for CUDA in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(COUNTED_STEPS):
                next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught) / COUNTED_STEPS


if __name__ == "__main__":
    main()
