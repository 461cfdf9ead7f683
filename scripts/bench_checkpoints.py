"""Benchmark of the time for which a checkpoint blocks training.

By default the model has 100 million parameters, with AdamW's state.

    python scripts/bench_checkpoints.py --output benchmarks/checkpoints.json

Three methods take turns. `save_state` is accelerate's own call, which returns when everything is
written. `at_once` and `background` are `outrider.train.checkpoint` without and with its thread. A
cycle has several training steps, with one checkpoint after the first step. The record has the
seconds for which the checkpoint blocks training: until `save` returns, and at the end of the cycle
until the checkpoint is complete, as the next checkpoint would wait. A writing thread also slows the
steps beside it, so the record has the additional time of the whole cycle too, compared with a cycle
without a checkpoint (`none`). All are wall-clock times, and medians over the cycles.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

from outrider.data.files import write_json
from outrider.eval.measure.environment import describe_environment
from outrider.train.checkpoint import Checkpoints

METHODS = ("none", "save_state", "at_once", "background")
FIGURES = ("held_up_seconds", "cycle_seconds")


def main() -> None:
    args = parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report = measure(args, Path(folder))
    report["environment"] = asdict(describe_environment(torch.device(report["device"])))
    if args.output is not None:
        write_json(args.output, report)
    Console().print(table(report))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, help="width of the model's square layers")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step's batch; more rows make slower steps")
    parser.add_argument("--steps", type=int, default=20, help="steps of a cycle")
    parser.add_argument("--cycles", type=int, default=5, help="cycles of each method")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch; by default torch chooses")
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder for the checkpoints; by default that of temporary files"
    )
    parser.add_argument("--output", type=Path, default=None, help="write a record of the figures")
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all methods; return the medians and the settings."""
    accelerator = Accelerator()
    layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
    model = nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    batch = torch.randn(args.rows, args.width, device=accelerator.device)

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    step()  # creates the optimizer's state
    figures: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    with ExitStack() as stack:
        savers: dict[str, Checkpoints | None] = {"none": None, "save_state": None}
        for method in ("at_once", "background"):
            checkpoints = Checkpoints(accelerator, folder / method, model, optimizer, keep=1, background=method == "background")
            savers[method] = stack.enter_context(checkpoints)
        for number in tqdm(range(1 + args.cycles), unit="round"):
            for method in METHODS:
                figures[method].append(cycle(args.steps, step, saver_of(method, savers[method], accelerator, folder, number)))
    medians = {
        # the first cycle is a warm-up
        method: {figure: median(one_cycle[figure] for one_cycle in cycles[1:]) for figure in FIGURES}
        for method, cycles in figures.items()
    }
    plain = medians["none"]["cycle_seconds"]
    for method in METHODS:
        medians[method]["extra_seconds"] = medians[method]["cycle_seconds"] - plain
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_seconds": plain / args.steps,
        "methods": medians,
        "cycles": {method: cycles[1:] for method, cycles in figures.items()},
        "settings": {name: getattr(args, name) for name in ("width", "layers", "rows", "steps", "cycles")},
        "device": str(accelerator.device),
    }


def saver_of(
    method: str, checkpoints: Checkpoints | None, accelerator: Accelerator, folder: Path, number: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that takes a checkpoint, and one that waits until it is complete."""
    if method == "none":
        return (lambda: None), (lambda: None)
    if checkpoints is not None:
        return (lambda: checkpoints.save(number, {})), checkpoints.finish

    def save() -> None:
        shutil.rmtree(folder / method, ignore_errors=True)
        accelerator.save_state(str(folder / method))

    return save, lambda: None


def cycle(num_steps: int, step: Callable[[], None], saver: tuple[Callable[[], None], Callable[[], None]]) -> dict[str, float]:
    """Time one step, the checkpoint, and the other steps while it is written."""
    save, finish = saver
    started = time.perf_counter()
    step()
    saved_at = time.perf_counter()
    save()
    held_up = time.perf_counter() - saved_at
    for _ in range(num_steps - 1):
        step()
    stepped = time.perf_counter()
    finish()
    ended = time.perf_counter()
    return {"held_up_seconds": held_up + ended - stepped, "cycle_seconds": ended - started}


def table(report: dict[str, Any]) -> Table:
    result = Table(
        title=f"{report['parameters'] / 1e6:.0f}M parameters, {report['step_seconds']:.2f} s a step, on {report['device']}"
    )
    for column in ("checkpoint", "holds up training, s", "cycle longer by, s"):
        result.add_column(column, justify="left" if column == "checkpoint" else "right")
    for method, figures in report["methods"].items():
        result.add_row(method, f"{figures['held_up_seconds']:.2f}", f"{figures['extra_seconds']:.2f}")
    return result


if __name__ == "__main__":
    main()
