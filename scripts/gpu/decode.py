"""Measures decode steps on a GPU: plain and with drafters, in each form, beside transformers' `generate`.

    python scripts/gpu/decode.py
    python scripts/gpu/decode.py --shape tiny --device cpu      # does the script work?
    python scripts/gpu/decode.py --target meta-llama/Llama-3.1-8B-Instruct --drafter outputs/llama/drafter

The first command needs no download: target and drafters have random weights of the sizes of a Llama
of 8 billion parameters. Every step does all the work of a real one, but almost no draft token is
accepted. So the milliseconds of a step count, and `break_even`: the tokens per step from which on
a drafter is faster than the fastest plain decoding. With a real target and its drafters, the
`speedup` over transformers' `generate` counts, too.

- `bandwidth_share`: the bytes of the target's weights over a step's time, as a share of the
  bandwidth that reading a large tensor reaches in the same run.
- `waits`: how often the host waits for the device in a step, as PyTorch counts it.

A case that fails is listed with its error.
"""

import itertools
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from card import FAILURES, SHAPES, Report, clock, dtype_on, free_memory, open_device, random_llama, target_of

from outrider.eval.measure.roofline import MAX_ACCELERATOR_BYTES, measure_bandwidth, weight_bytes
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
PLAIN, GENERATE = "plain", "transformers"
ROOM = 8
"""Tokens of a step for which the cache has room, so that it never moves."""
COUNTED_STEPS = 4
CPU_BYTES = 2**26


def main(
    shape: Annotated[str, typer.Option(help=f"Of a random target: {', '.join(SHAPES)}.")] = "llama8b",
    target: Annotated[str | None, typer.Option(help="A real target, in place of a random one.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="A drafter of the real target. Repeatable.")] = None,
    form: Annotated[list[str] | None, typer.Option(help=f"{', '.join(FORMS)}; all unless given. Repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Repeatable; 1 unless given.")] = None,
    prompt_tokens: int = 512,
    steps: int = 30,
    warm_up: int = 8,
    device: str | None = None,
    output: Path = Path("decode.json"),
) -> None:
    """Measure decode steps on a GPU."""
    opened = open_device(device)
    forms = form or [name for name in FORMS if opened.type == "cuda" or name == "eager"]
    if unknown := {*forms} - FORMS.keys():
        raise typer.BadParameter(f"--form {', '.join(unknown)}; it must be one of {', '.join(FORMS)}")
    bench = Bench(opened, shape, target, drafter or [], steps, warm_up)
    facts = {"target": target or shape, "dtype": str(bench.dtype), "prompt_tokens": prompt_tokens, "steps": steps}
    report = Report(output, opened, **facts, gigabytes_per_second=bench.bandwidth)
    for name, size in itertools.product(forms, batch or [1]):
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(5, bench.vocab_size, (size, prompt_tokens), generator=generator).to(opened)
        for method in [*([GENERATE] if name == "eager" else []), PLAIN, *bench.drafters]:
            case = {"form": name, "batch": size, "method": method}
            try:
                report.add(case, bench.measure(name, method, prompts))
            except FAILURES as error:
                report.add(case, error)
    add_ratios(report.rows)
    report.print()


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
        steps = generate(target, drafter, rule, prompts, max_new_tokens=room)
        for _ in range(1 + self.warm_up):
            next(steps)
        seconds, num_new = [], 0
        for _ in range(self.steps):
            start = time.perf_counter()
            step = next(steps)
            seconds.append(time.perf_counter() - start)
            num_new += sum(map(len, step.tokens))
        # 2. What follows.
        step_seconds = statistics.median(seconds)
        return {
            "milliseconds": 1e3 * step_seconds,
            "tokens_per_step": num_new / self.steps / len(prompts),
            "tokens_per_second": num_new / sum(seconds),
            "bandwidth_share": self.num_bytes / step_seconds / 1e9 / self.bandwidth,
            "waits": count_waits(steps) if self.device.type == "cuda" else None,
        }

    def theirs(self, target: HFTarget, prompts: torch.Tensor) -> dict[str, Any]:
        """Measure transformers' `generate`, without its prefill: what more tokens take."""
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(prompts)}
        seconds = []
        for num_new in (2, 1, 1 + self.steps):  # the first one warms up
            start = clock(self.device)
            target.model.generate(prompts, max_new_tokens=num_new, **options)
            seconds.append(clock(self.device) - start)
        step_seconds = (seconds[2] - seconds[1]) / self.steps
        return {
            "milliseconds": 1e3 * step_seconds,
            "tokens_per_step": 1.0,
            "tokens_per_second": len(prompts) / step_seconds,
            "bandwidth_share": self.num_bytes / step_seconds / 1e9 / self.bandwidth,
        }


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


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add each row's break-even tokens per step, and its speedup over transformers, at the same batch size."""
    for row in rows:
        same = [other for other in rows if other["batch"] == row["batch"]]
        plain = [other["milliseconds"] for other in same if other["method"] == PLAIN]
        theirs = [other["tokens_per_second"] for other in same if other["method"] == GENERATE]
        row["break_even"] = row["milliseconds"] / min(plain) if plain else None
        row["speedup"] = row["tokens_per_second"] / theirs[0] if theirs else None


if __name__ == "__main__":
    typer.run(main)
