"""Study of sampled decoding: drawn draft trees, and labels that are sampled.

    python scripts/sampling_study.py --record benchmarks/sampling_study.json

**Trees**: EAGLE, EAGLE-3 and a draft model decode with deterministic trees and with drawn ones of
the same number of nodes. **Labels**: a drafter is trained on greedy labels, on labels sampled at
each temperature, and with KL against the target's distribution, for each seed.

All sample held-out prompts at each temperature. Only tokens per step count, which don't depend on
the clock. A cell is a training, or the decoding with one drafter, tree and temperature; OUTPUT has
a file for each, and the same command continues after a kill. With the default options this takes
about 25 minutes on two cores.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import silence  # noqa: F401 - before torch, whose libraries it silences
import torch
from hydra import compose, initialize_config_module
from study_cells import SETTINGS_FILE, require_same_settings
from study_trainings import decode, held_out_prompts, trained

from outrider.cli.config import RunConfig, register, to_run_config
from outrider.data.files import locked, read_json, write_json
from outrider.eval.measure.environment import describe_environment
from outrider.eval.results.stats import bootstrap, ratio, ratio_of_ratios
from outrider.eval.run import cpu_threads
from outrider.models.drafters import load_drafter
from outrider.models.llm.loading import load_target

KINDS = ("eagle", "eagle3", "draft_model")
DEPTH, TOP_K = 5, 8
WIDTHS = (2, 4)
"""Siblings in a group of the drawn trees."""
TINY = {"texts": 6, "steps": 2, "positions": 16, "seeds": [0, 1], "nodes": [4], "prompts": 2, "new_tokens": 6}
"""Options of `--tiny`, whose figures mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A drafter's kind, its labels and its loss. Name and folder are made of them."""

    kind: str
    label_temperature: float = 0.0
    loss: str = "cross_entropy"
    seed: int = 0

    @property
    def labels(self) -> str:
        """What the drafter learns from, in words."""
        sampled = f"sampled at {self.label_temperature:g}" if self.label_temperature else "greedy"
        return sampled if self.loss == "cross_entropy" else f"{sampled}, {self.loss}"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.label_temperature:g}-{self.loss}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Decoding with one drafter and tree, at one temperature."""

    part: str
    training: Training
    tree: str
    nodes: int
    temperature: float
    setting: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.part}-{self.training.name}-{self.tree.replace(' ', '_')}-{self.nodes}-{self.temperature:g}"


def main() -> None:
    try:
        run(parse_args())
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("interrupted; finished cells are kept, and the same command continues") from None


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo_target"), help="folder of the target")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--positions", type=int, default=192, help="positions per step")
    parser.add_argument("--label-kind", default="redrafter", choices=("redrafter", "draft_model"), help="of the part labels")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings of the part labels")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 40])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/sampling_study"))
    parser.add_argument("--record", type=Path, default=None, help="write a record of the figures")
    parser.add_argument("--tiny", action="store_true", help="a study of seconds, to see that it runs")
    args = parser.parse_args(arguments)
    vars(args).update(TINY if args.tiny else {})
    return args


def run(args: argparse.Namespace) -> None:
    # 1. Check everything before any long work.
    for name in ("texts", "steps", "positions", "prompts", "new_tokens", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    if min(args.temperatures) <= 0:
        raise ValueError(f"--temperatures has {min(args.temperatures):g}; the study is of temperatures above 0")
    if min(args.nodes) < max(WIDTHS):
        raise ValueError(f"--nodes has {min(args.nodes)}; a drawn tree has a group of {max(WIDTHS)} siblings at least")
    cells = [*tree_cells(args), *label_cells(args)]
    settings = {"target": args.target.resolve().name, **{name: getattr(args, name) for name in TINY if name != "seeds"}}
    require_same_settings(args.output, settings)
    missing = [cell for cell in cells if not path_of(cell, args).is_file()]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them done", flush=True)
    # 2. The cells that are missing.
    with locked(args.output), cpu_threads(args.threads):
        write_json(args.output / SETTINGS_FILE, settings)
        register()
        target = load_target(recipe(cells[0].training, args).target, torch.device("cpu"))
        prompts = held_out_prompts(target, limit=args.prompts, new_tokens=args.new_tokens)
        folders: dict[Training, Path] = {}
        for cell in missing:
            if cell.training not in folders:
                shards = args.output / f"labels-{cell.training.label_temperature:g}"
                folder = args.output / "trainings" / cell.training.name
                folders[cell.training] = trained(recipe(cell.training, args), target, shards, folder)
            drafter = load_drafter(folders[cell.training], target, **cell.setting)
            sums = decode(target, drafter, prompts, temperature=cell.temperature, new_tokens=args.new_tokens)
            write_json(path_of(cell, args), {"sums": sums})
            print(cell.name, flush=True)
        # 3. The figures of all cells.
        record = {
            **settings,
            "trees": tree_rows(cells, args),
            "labels": label_rows(cells, args),
            "environment": asdict(describe_environment(torch.device("cpu"))),
        }
    for path in filter(None, (args.output / "sampling_study.json", args.record)):
        write_json(path, record)
    for row in [*record["trees"], *record["labels"]]:
        what = f"{row['tree']}, {row['nodes']} nodes" if "tree" in row else f"labels {row['labels']}"
        low, high = row["ratio_interval"]
        print(
            f"{row['kind']}, {what}, T = {row['temperature']:g}: {row['tokens_per_step']:.2f} tokens per step, "
            f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}] of the reference"
        )


def tree_cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells that compare trees: each drawn tree follows the deterministic one."""
    for kind in KINDS:
        for temperature in args.temperatures:
            for nodes in args.nodes:
                search = {"length" if kind == "draft_model" else "depth": DEPTH, "tree_nodes": nodes}
                trees = {"deterministic": {**search, "top_k": TOP_K}}
                for width in WIDTHS:
                    trees[f"drawn by {width}"] = {**search, "top_k": width, "temperature": temperature}
                for tree, setting in trees.items():
                    training = Training(kind=kind)
                    yield Cell(
                        part="trees", training=training, tree=tree, nodes=nodes, temperature=temperature, setting=setting
                    )


def label_cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells that compare labels, with deterministic trees of the largest size."""
    nodes, kind = max(args.nodes), args.label_kind
    search = {"length": DEPTH, "top_k": TOP_K} if kind == "draft_model" else {"beam_length": DEPTH, "beam_width": TOP_K}
    for seed in args.seeds:
        trainings = [Training(kind=kind, seed=seed), Training(kind=kind, seed=seed, loss="kl")]
        trainings += [Training(kind=kind, seed=seed, label_temperature=temperature) for temperature in args.temperatures]
        for training in trainings:
            for temperature in args.temperatures:
                yield Cell(
                    part="labels",
                    training=training,
                    tree="deterministic",
                    nodes=nodes,
                    temperature=temperature,
                    setting={**search, "tree_nodes": nodes},
                )


def path_of(cell: Cell, args: argparse.Namespace) -> Path:
    """Return the file of a cell's figures."""
    return args.output / "cells" / f"{cell.name}.json"


def recipe(training: Training, args: argparse.Namespace) -> RunConfig:
    """Return the demo's configuration for a training."""
    overrides = [
        "conf=demo",
        f"drafter={training.kind}_demo",
        f"num_threads={args.threads}",
        f"seed={training.seed}",
        "data.seed=0",
        f"data.limit={args.texts}",
        f"target.name_or_path={args.target}",
        f"distill={{features: last_hidden, feature_layers: [], label_temperature: {training.label_temperature}, seed: 0}}",
        f"train={{steps: {args.steps}, batch_size: 2, max_positions: {args.positions}, loss: {training.loss}}}",
        f"train.warmup_steps={args.steps // 10}",
        "train.checkpoint_every=100",
    ]
    if args.tiny:
        overrides.append("data.max_length=200")
        overrides += {
            "eagle3": ["drafter.feature_layers=null"],
            "redrafter": ["drafter={exit_width: null, head_init: random}"],
        }.get(training.kind, [])
    with initialize_config_module("outrider.conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=overrides))


def sums_of(cell: Cell, args: argparse.Namespace) -> np.ndarray:
    """Return the tokens and steps of a cell's prompts; an answer that ended at once has no step."""
    return np.array(read_json(path_of(cell, args))["sums"], dtype=np.float64)


def tree_rows(cells: Sequence[Cell], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per step of each tree, and those of drawn trees over the deterministic one's."""
    rows = []
    for cell in (cell for cell in cells if cell.part == "trees"):
        sums = sums_of(cell, args)
        if cell.tree == "deterministic":
            reference = sums
        point, interval = bootstrap(sums, ratio, seed=0)
        over, over_interval = bootstrap(np.stack([sums, reference]), ratio_of_ratios, seed=0)
        row = {"kind": cell.training.kind, "tree": cell.tree, "nodes": cell.nodes, "temperature": cell.temperature}
        row |= {"tokens_per_step": point, "interval": interval, "ratio": over, "ratio_interval": over_interval}
        rows.append(row)
    return rows


def label_rows(cells: Sequence[Cell], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per step by labels and temperature: over all seeds, and by seed."""
    groups: dict[tuple[str, float], list[np.ndarray]] = {}
    for cell in (cell for cell in cells if cell.part == "labels"):
        groups.setdefault((cell.training.labels, cell.temperature), []).append(sums_of(cell, args))
    rows = []
    for (labels, temperature), by_seed in groups.items():
        total, greedy = np.sum(by_seed, axis=0), np.sum(groups["greedy", temperature], axis=0)
        point, interval = bootstrap(total, ratio, seed=0)
        over, over_interval = bootstrap(np.stack([total, greedy]), ratio_of_ratios, seed=0)
        row = {"kind": args.label_kind, "labels": labels, "temperature": temperature, "tokens_per_step": point}
        row |= {"interval": interval, "ratio": over, "ratio_interval": over_interval, "seeds": args.seeds}
        rows.append({**row, "by_seed": [float(tokens / steps) for tokens, steps in (sums.sum(0) for sums in by_seed)]})
    return rows


if __name__ == "__main__":
    main()
