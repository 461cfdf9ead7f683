"""Study of boost-tuning: a drafter that is trained where another one is wrong, and their merge.

    python scripts/boost_study.py --run outputs/demo --folder outputs/boost_study --record benchmarks/boost_study.json

`--run` is the folder of a finished run, with its labels. The script trains its drafter again for
each seed, with uniform weights and with `train.label_weights=missed_by:OTHER`. It decodes held-out
prompts with the other drafter, with each trained one, and with the merges of both, at equal numbers
of nodes. Only tokens per step count, which don't depend on the clock. Finished trainings are
skipped; with one thread each takes some minutes.
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

from outrider.cli.config import RunConfig, register, to_run_config
from outrider.data.chat import encode_prompt
from outrider.data.files import read_json, write_json
from outrider.data.types import Turn
from outrider.eval.measure.environment import describe_environment
from outrider.eval.results.stats import bootstrap, ratio, ratio_of_ratios
from outrider.eval.run import load_suites
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import load_drafter, make_training_free
from outrider.models.drafters.merged import MergedConfig, MergedDrafter
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.missed_by import describe_other
from outrider.train.run import train

SEARCH = {"beam_width": 16, "beam_length": 5}
"""The trained drafter's search, of which the tree has the likeliest nodes."""
CHECKPOINT_EVERY = 100
Sums = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""Tokens and steps of each prompt, without the prefill."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    parser.add_argument("--folder", type=Path, default=Path("outputs/boost_study"), help="trainings go there")
    parser.add_argument("--other", default="suffix", help="the other drafter: a training-free one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 40])
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=None, help="of each training; by default the run's own")
    parser.add_argument("--record", type=Path, default=None, help="write a record of the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    register()
    config = to_run_config(OmegaConf.create(OmegaConf.to_container(OmegaConf.load(args.run / "config.yaml"))))
    target = load_target(config.target, torch.device("cpu"))
    drafters = {seed: train_both(args, config, target, seed) for seed in args.seeds}
    prompts = held_out_prompts(args, config, target)
    rows = [row for nodes in args.nodes for row in compare(args, target, prompts, drafters, nodes)]
    for row in rows:
        print(row)
    if args.record is not None:
        record = {
            "other": describe_other(args.other),
            "search": SEARCH,
            "prompts": len(prompts),
            "new_tokens": args.new_tokens,
            "training": {
                name: read_json(folder / "train" / "summary.json")["run"] for name, folder in drafters[args.seeds[0]].items()
            },
            "rows": rows,
            "environment": asdict(describe_environment(torch.device("cpu"))),
        }
        write_json(args.record, record)


def train_both(args: argparse.Namespace, config: RunConfig, target: HFTarget, seed: int) -> dict[str, Path]:
    """Train the run's drafter with both weights, where that isn't done; return their folders."""
    folders = {}
    for name, weights in (("uniform", "uniform"), ("boosted", f"missed_by:{args.other}")):
        folder = args.folder / f"{name}-{seed}"
        steps = args.steps or config.train.steps
        options = replace(
            config.train, steps=steps, seed=seed, label_weights=weights, num_threads=1, checkpoint_every=CHECKPOINT_EVERY
        )
        spec, accelerator = config.drafter_runs()[0].drafter, Accelerator(cpu=True)
        train(options, spec, target, args.run / "distill", folder / "train", folder / "drafter", accelerator)
        folders[name] = folder
    return folders


def held_out_prompts(args: argparse.Namespace, config: RunConfig, target: HFTarget) -> list[torch.Tensor]:
    """Return the tokens of the first prompts of the run's evaluation."""
    prompts = [prompt for suite in load_suites(config.eval) for prompt in suite.prompts]
    turns = [Turn(role="user", content=prompt.turns[0]) for prompt in prompts[: args.prompts]]
    return [encode_prompt([turn], target.tokenizer)[0] for turn in turns]


def compare(
    args: argparse.Namespace,
    target: HFTarget,
    prompts: list[torch.Tensor],
    drafters: Mapping[int, Mapping[str, Path]],
    nodes: int,
) -> list[dict[str, Any]]:
    """Decode with all drafters at one number of nodes; the last rows compare the two merges."""
    options = MergedConfig(tree_nodes=nodes, pace="fixed")
    other = make_training_free(args.other, {"tree_nodes": nodes}, target)
    rows = [summary(f"{args.other}", nodes, None, [decode(target, other, prompts, args.new_tokens)])]
    merges: dict[str, list[Sums]] = {"uniform": [], "boosted": []}
    for name, merged in merges.items():
        alone = []
        for folders in drafters.values():
            trained = load_drafter(folders[name] / "drafter", target, **SEARCH, tree_nodes=nodes)
            alone.append(decode(target, trained, prompts, args.new_tokens))
            merge = MergedDrafter({"trained": trained, args.other: other}, options)
            merged.append(decode(target, merge, prompts, args.new_tokens))
        rows.append(summary(name, nodes, list(drafters), alone))
        rows.append(summary(f"{name}+{args.other}", nodes, list(drafters), merged))
    both = np.stack([np.sum(merges[name], axis=0) for name in ("boosted", "uniform")])
    point, interval = bootstrap(both, ratio_of_ratios, seed=0)
    return [*rows, {"name": "boosted merge / uniform merge", "nodes": nodes, "ratio": point, "interval": interval}]


def summary(name: str, nodes: int, seeds: list[int] | None, sums: list[Sums]) -> dict[str, Any]:
    """Return tokens per step over all seeds, with the interval over prompts, and of each seed."""
    point, interval = bootstrap(np.sum(sums, axis=0), ratio, seed=0)
    by_seed = [float(tokens / steps) for tokens, steps in (of_seed.sum(0) for of_seed in sums)]
    row = {"name": name, "nodes": nodes, "tokens_per_step": point, "interval": interval, "seeds": seeds, "by_seed": by_seed}
    print(row, flush=True)
    return row


def decode(target: HFTarget, drafter: Any, prompts: list[torch.Tensor], new_tokens: int) -> Sums:
    """Answer the prompts one by one, greedily."""
    sums = np.zeros((len(prompts), 2))
    for index, prompt in enumerate(prompts):
        for step in generate(
            target, drafter, GreedyAcceptance(), [prompt], max_new_tokens=new_tokens, stop_ids=target.stop_ids
        ):
            if not step.is_prefill:
                sums[index] += len(step.tokens[0]), 1
    return sums


if __name__ == "__main__":
    main()
