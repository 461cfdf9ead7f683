"""Study of training on the target's own answers, at equal numbers of labels.

    python scripts/regeneration_study.py --output benchmarks/regeneration_study.json

The target answers many short prompts, greedily and by sampling. The demo's ReDrafter is trained for
the same steps on those answers, and on as many labelled positions of the data's own texts. (These
are whole texts, so the number is equal up to one text.) Then both are decoded on the same prompts,
from modules that neither has seen. Killed runs resume.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module

from outrider.cli.config import register, to_run_config
from outrider.data.files import read_json, write_json
from outrider.distill.label.run import load_examples
from outrider.eval.measure.environment import describe_environment
from outrider.eval.results.stats import bootstrap, ratio_of_ratios
from outrider.models.llm.loading import load_tokenizer

TRAIN = Path(__file__).parents[1] / "train.py"
CLOSE = 0.95
"""Ratio above which two numbers of labels count as equal."""
SETTING = {"beam_width": 16, "beam_length": 5, "tree_nodes": 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/regeneration_study"), help="the runs go there")
    parser.add_argument("--prompts", type=int, default=4000, help="prompts that the target answers")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-prompts", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="write a record of the figures")
    args = parser.parse_args()
    regenerated = {
        f"regenerated, temperature {temperature:g}": [
            "distill.mode=regenerate",
            f"distill.temperature={temperature}",
            f"distill.max_new_tokens={args.max_new_tokens}",
            "distill.shard_examples=1000",  # answers of similar length share a batch
            "data.answer_chars=150",  # distance between prompts that are cut from a text
            f"data.limit={args.prompts}",
        ]
        for temperature in args.temperatures
    }
    figures = []
    for seed in args.seeds:
        distilled = {}
        for name, options in regenerated.items():
            folder = args.folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            distilled[name] = run(folder, args, seed, options, "stages=[distill]")
        num_labels = min(statistics_of_run["num_positions"] for statistics_of_run in distilled.values())
        limit = round(num_labels / labels_per_text(seed))
        arms = {"the data's own texts": [f"data.limit={limit}"]}
        for name, options in regenerated.items():  # fewer texts if answers are longer
            share = num_labels / distilled[name]["num_positions"]
            arms[name] = options if share > CLOSE else [*options, f"data.limit={round(share * args.prompts)}"]
        for name, options in arms.items():
            stem = "text" if name not in regenerated else name.replace(", ", "_").replace(" ", "_")
            is_cut = name in regenerated and options is not regenerated[name]
            folder = args.folder / f"{stem}{'_cut' if is_cut else ''}_{seed}"
            statistics = run(folder, args, seed, options, "stages=[distill,train,eval]")
            ratio = paired_ratio(args.folder / f"text_{seed}", folder)
            figures.append({"texts": name, "seed": seed, **statistics, **measured(folder), **ratio})
    print(table(figures))
    if args.output is not None:
        environment = asdict(describe_environment(torch.device("cpu")))
        options = {key: value for key, value in vars(args).items() if key not in ("folder", "output")}
        write_json(args.output, {"options": options, "figures": figures, "environment": environment})


def run(folder: Path, args: argparse.Namespace, seed: int, options: list[str], stages: str) -> dict[str, Any]:
    """Run stages of the demo, and return statistics of its distillation."""
    settings = ",".join(f"{key}: {value}" for key, value in SETTING.items())
    common = [
        f"output_dir={folder}",
        f"seed={seed}",
        f"num_threads={args.threads}",
        f"train.steps={args.steps}",
        "train.checkpoint_every=50",
        f"eval.settings=[{{{settings}}}]",
        f"eval.suites=[{{name: stdlib, limit: {args.eval_prompts}}}]",
        "eval.profile_prompts=0",
        "eval.seed=0",  # the same prompts for all
    ]
    subprocess.run([sys.executable, str(TRAIN), "conf=demo", *common, *options, stages], check=True)
    statistics: dict[str, Any] = read_json(folder / "distill" / "stats.json")
    return {name: statistics[name] for name in ("num_examples", "num_text_tokens", "num_positions", "agreement")}


def labels_per_text(seed: int) -> float:
    """Compute the mean number of labelled positions per text of the demo's data."""
    register()
    with initialize_config_module("outrider.conf", version_base="1.3"):
        config = to_run_config(compose("config", overrides=["conf=demo", f"seed={seed}"]))
    examples, _ = load_examples(config.data, load_tokenizer(config.target))
    return sum(int(example.wanted.sum()) for example in examples) / len(examples)


def measured(folder: Path) -> dict[str, Any]:
    """Read tokens per step on the evaluation's prompts, and the last training loss."""
    _, row = read_json(folder / "eval" / "summary.json")  # the first row is plain decoding
    loss = read_json(folder / "train" / "summary.json")["metrics"]["loss"]
    return {"tokens_per_step": row["tokens_per_step"], "num_prompts": row["num_prompts"], "training_loss": loss}


def paired_ratio(reference: Path, folder: Path) -> dict[str, Any]:
    """Compute the ratio of tokens per step to the reference, with a bootstrap interval.

    Both have the same prompts, and the interval is over these.
    """
    theirs, ours = steps_by_prompt(reference), steps_by_prompt(folder)
    assert theirs.keys() == ours.keys()
    sums = np.array([[steps[prompt] for prompt in sorted(theirs)] for steps in (ours, theirs)])
    ratio, interval = bootstrap(sums, ratio_of_ratios, seed=0)
    return {"ratio": ratio, "ratio_ci95": interval}


def steps_by_prompt(folder: Path) -> dict[str, tuple[int, int]]:
    """Read tokens and verify steps of the drafter's answers, by prompt."""
    by_prompt = {}
    for line in (folder / "eval" / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["method"] != "baseline":
            histogram = record["accepted_histogram"]
            steps = sum(histogram)
            by_prompt[record["prompt_id"]] = (steps + sum(index * count for index, count in enumerate(histogram)), steps)
    return by_prompt


def table(figures: list[dict[str, Any]]) -> str:
    lines = [
        "| trained on | texts | labelled positions | agreement | tokens per step | over the data's own, by prompt [95 %] |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {figure['texts']} (seed {figure['seed']}) | {figure['num_examples']} | {figure['num_positions']} "
        f"| {figure['agreement']:.2f} | {figure['tokens_per_step']:.2f} "
        "| {:.2f} [{:.2f}, {:.2f}] |".format(figure["ratio"], *figure["ratio_ci95"])
        for figure in figures
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
