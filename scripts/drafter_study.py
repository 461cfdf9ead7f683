"""Study of all kinds of drafters on the same labels: tokens per step over the size of the training.

    python scripts/drafter_study.py --plan
    python scripts/drafter_study.py --record benchmarks/drafter_study

The demo's texts are distilled once, with the layers that all kinds read. A cell is a training (kind,
steps, positions per step, weights of the labels, learning rate, seed) and greedy decoding of held-out
prompts with trees of as many nodes for all kinds. Only tokens per step count, which don't depend on
the clock. The part `rates` compares learning rates, on held-out prompts that no other part reads; the
other parts have the rates of the recipes.

OUTPUT has a file for each cell, and the same command continues after a kill. It also gets
`drafter_study.json`, `table.md` and `label_curves.png`. `--record` copies these and the cells to
another folder, and continues from the cells there.
"""

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
from drafter_cells import (
    CURVE,
    FULL,
    MIXED_LOSS,
    MIXTURE,
    NODES,
    ON_POLICY,
    ON_POLICY_EVERY,
    PARTS,
    POSITIONS_PER_TEXT,
    RATES,
    SIZES,
    VARIANTS,
    Cell,
    Size,
    cells_of,
)
from drafter_study_report import write_report
from hydra import compose, initialize_config_module
from script_errors import script_errors
from study_cells import SETTINGS_FILE, require_same_settings
from study_trainings import decode, held_out_prompts, trained

from outrider.cli.config import RunConfig, register, to_run_config
from outrider.data.files import locked, read_json, write_json
from outrider.eval.measure.environment import describe_environment
from outrider.eval.run import cpu_threads
from outrider.models.drafters import load_drafter
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

FEATURE_LAYERS = [2, 4, 7]
"""Layers of the demo's target that EAGLE-3 and the block drafter read."""
WARMUP_STEPS = 15
"""Steps of the demo's warm-up; a short training has a tenth of its steps."""
CELLS, TRAINED_FILE = "cells", "trained.json"
SETTINGS = ("texts", "prompts", "new_tokens", "tiny")
TINY = {"texts": 6, "prompts": 2, "new_tokens": 6, "seeds": [0], "curve_seeds": [0], "threads": 1}
TINY_STEPS, TINY_POSITIONS = {FULL: 3, CURVE: 1}, 16
TINY_SIZES = {part: (Size(steps=TINY_STEPS.get(part, 2), positions=TINY_POSITIONS),) for part in PARTS}
"""Options and sizes of `--tiny`, whose figures mean nothing."""


def main() -> None:
    with script_errors(kept="cells"):
        run(parse_args())


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the target")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="drafters")
    parser.add_argument("--texts", type=int, default=600, help="texts that are distilled")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--curve-seeds", type=int, nargs="+", default=[0], help="of rates, and of sizes that only curves have")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("outputs/drafter_study"))
    parser.add_argument("--record", type=Path, default=None, help="copy record, table and plot to this folder")
    parser.add_argument("--plan", action="store_true", help="print the cells and an estimate, and end")
    parser.add_argument("--tiny", action="store_true", help="a study of seconds, to see that it runs")
    args = parser.parse_args(arguments)
    vars(args).update(TINY if args.tiny else {})
    return args


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    for name in ("texts", "prompts", "new_tokens", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    for name in ("seeds", "curve_seeds"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            raise ValueError(f"--{name.replace('_', '-')} has a seed twice; give each seed once")
    cells = chosen_cells(args.parts, args.variants, args)
    if not cells:
        raise ValueError(
            f"no part of {', '.join(args.parts)} measures {', '.join(args.variants)}; see scripts/drafter_cells.py"
        )
    settings = {"target": args.target.resolve().name, "nodes": NODES, **{name: getattr(args, name) for name in SETTINGS}}
    require_same_settings(args.output, settings)
    if args.record is not None:
        require_same_settings(args.record, settings, "--record")
    print_plan(cells, args)
    if args.plan:
        return
    # 2. The cells that are missing, and a report after each part.
    with locked(args.output), cpu_threads(args.threads):
        if args.record is not None and (args.record / SETTINGS_FILE).is_file():
            shutil.copytree(args.record / CELLS, args.output / CELLS, dirs_exist_ok=True)
        write_json(args.output / SETTINGS_FILE, settings)
        target = load_target(recipe(cells[0], args).target, torch.device("cpu"))
        for part in args.parts:
            of_part = {"limit": args.prompts, "new_tokens": args.new_tokens, "others": part == RATES}
            prompts = held_out_prompts(target, **of_part)
            for cell in cells:
                if cell.part == part and not path_of(cell, args).is_file():
                    measure(cell, args, target, prompts)
            report(settings, args)


def chosen_cells(parts: Sequence[str], variants: Sequence[str], args: argparse.Namespace) -> list[Cell]:
    return cells_of(
        parts,
        variants,
        rates={name: rate_of(VARIANTS[name].recipe) for name in variants},
        seeds=args.seeds,
        curve_seeds=args.curve_seeds,
        sizes=TINY_SIZES if args.tiny else SIZES,
    )


@cache  # a report after each part needs all of them
def rate_of(recipe: str) -> float:
    """Return the learning rate of a recipe."""
    return composed([f"drafter={recipe}"]).train.learning_rate


def measure(cell: Cell, args: argparse.Namespace, target: HFTarget, prompts: Sequence[torch.Tensor]) -> None:
    """Train a drafter and decode with it; write the cell's file."""
    # 1. The training, which another part may have done.
    folder, start = args.output / "trainings" / cell.training, time.perf_counter()
    if not (folder / TRAINED_FILE).is_file():
        trained(recipe(cell, args), target, args.output / "labels", folder)
        write_json(folder / TRAINED_FILE, {"seconds": time.perf_counter() - start})
        shutil.rmtree(folder / "train")  # the drafter itself is kept
    # 2. Decoding.
    start = time.perf_counter()
    search = {**VARIANTS[cell.variant].search, "tree_nodes": NODES}
    drafter = load_drafter(folder / "drafter", target, **search)
    sums = decode(target, drafter, prompts, temperature=0.0, new_tokens=args.new_tokens)
    seconds = {"training": read_json(folder / TRAINED_FILE)["seconds"], "decoding": time.perf_counter() - start}
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    write_json(path_of(cell, args), {"sums": sums, "parameters": parameters, "seconds": seconds})
    print(f"{cell.name}: {sum(row[0] for row in sums) / sum(row[1] for row in sums):.3f} tokens per step", flush=True)


def path_of(cell: Cell, args: argparse.Namespace) -> Path:
    """Return the file of a cell's figures."""
    path: Path = args.output / CELLS / f"{cell.name}.json"
    return path


def print_plan(cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Print the missing cells, and an estimate of their time from finished ones of the same kind."""
    # 1. Seconds per label, and those of decoding, of finished cells.
    per_label: dict[str, list[float]] = {}
    missing, decoding = [], []
    for cell in cells:
        if not path_of(cell, args).is_file():
            missing.append(cell)
            continue
        seconds = read_json(path_of(cell, args))["seconds"]
        per_label.setdefault(cell.variant, []).append(seconds["training"] / cell.size.labels)
        decoding.append(seconds["decoding"])
    # 2. The plan. The first cell's training includes the distillation, so the smallest figure counts.
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them done", flush=True)
    total = 0.0
    for cell in missing:
        if cell.variant not in per_label:
            print(f"  {cell.name}")
            continue
        estimate = min(per_label[cell.variant]) * cell.size.labels + sum(decoding) / len(decoding)
        total += estimate
        print(f"  {cell.name}: about {estimate / 60:.1f} min")
    if total:
        print(f"about {total / 60:.0f} min for the cells with an estimate", flush=True)


def recipe(cell: Cell, args: argparse.Namespace) -> RunConfig:
    """Return the demo's configuration for a training on the study's labels."""
    variant, layers = VARIANTS[cell.variant], [] if args.tiny else FEATURE_LAYERS
    batch_size = max(1, cell.size.positions // POSITIONS_PER_TEXT)
    overrides = [
        f"drafter={variant.recipe}",
        f"num_threads={args.threads}",
        f"seed={cell.seed}",
        "data.seed=0",
        f"data.limit={args.texts}",
        f"target.name_or_path={args.target}",
        f"distill={{features: last_hidden, feature_layers: {layers}, seed: 0}}",
        f"train={{steps: {cell.size.steps}, batch_size: {batch_size}, max_positions: {cell.size.positions}}}",
        f"train.warmup_steps={min(WARMUP_STEPS, cell.size.steps // 10)}",
        f"train.learning_rate={cell.rate}",
        f"train.label_weights={cell.label_weights}",
        f"train.loss={MIXED_LOSS if cell.part == MIXTURE else 'cross_entropy'}",
        f"train.on_policy_every={ON_POLICY_EVERY if cell.part == ON_POLICY else 'null'}",
        "train.checkpoint_every=100",
        *variant.options,
    ]
    if args.tiny:
        overrides.append("data.max_length=200")
        overrides += {
            "redrafter_demo": ["drafter={exit_width: null, head_init: random}"],
            **{
                name: ["drafter.feature_layers=null"]
                for name in ("eagle3_demo", "block_demo", "block_dspark_demo", "redrafter2_demo")
            },
        }.get(variant.recipe, [])
    return composed(overrides)


def composed(overrides: Sequence[str]) -> RunConfig:
    register()
    with initialize_config_module("outrider.conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=["conf=demo", *overrides]))


def report(settings: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Write record, table and plot of the finished cells of all parts; copy them where `--record` says."""
    cells = chosen_cells(PARTS, list(VARIANTS), args)
    figures = {cell: read_json(path_of(cell, args)) for cell in cells if path_of(cell, args).is_file()}
    environment = asdict(describe_environment(torch.device("cpu")))
    names = write_report(figures, len(cells), {**settings, "seeds": args.seeds, "environment": environment}, args.output)
    if args.record is not None:
        shutil.copytree(args.output / CELLS, args.record / CELLS, dirs_exist_ok=True)
        for name in (*names, SETTINGS_FILE):
            shutil.copyfile(args.output / name, args.record / name)


if __name__ == "__main__":
    main()
