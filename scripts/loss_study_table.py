"""Table of tokens per step by loss, from a run of `conf=loss_study_demo`.

    python scripts/loss_study_table.py outputs/loss_study_demo --output benchmarks/loss_study.json

The prompts are the same for all losses of a seed.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from outrider.data.files import read_json, write_json
from outrider.eval.measure.environment import describe_environment
from outrider.models.drafters.losses import check_loss, describe_loss

REFERENCE = ("cross_entropy", "uniform")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--output", type=Path, default=None, help="write a record of the figures")
    args = parser.parse_args()
    figures = read_figures(args.folder)
    print(table(figures))
    if args.output is not None:
        write_json(args.output, {"figures": figures, "environment": asdict(describe_environment(torch.device("cpu")))})


def read_figures(folder: Path) -> list[dict[str, Any]]:
    """Read loss, weights, seed and tokens per step of each finished variant.

    Raises ValueError if there is none.
    """
    figures = []
    for path in sorted(folder.glob("variants/*/train/summary.json")):
        summary = read_json(path)
        train = summary["run"]["train"]
        figures.append(
            {
                "loss": describe_loss(check_loss(train["loss"])),
                "label_weights": train["label_weights"],
                "seed": train["seed"],
                "steps": summary["steps"],
                "tokens_per_step": summary["validation"]["validation_tokens_per_step"],
                "seconds": summary["seconds"],
            }
        )
    if not figures:
        raise ValueError(f"{folder} holds no finished variant; give the folder of conf=loss_study_demo")
    return figures


def table(figures: Iterable[dict[str, Any]]) -> str:
    """Make a Markdown table, the best mean first.

    Differences are computed per seed, since all losses of a seed have the same prompts.
    """
    by_loss: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for figure in figures:
        by_loss[figure["loss"], figure["label_weights"]][figure["seed"]] = figure["tokens_per_step"]
    reference = by_loss.get(REFERENCE, {})
    over_reference = "over cross-entropy, mean (deviation)"
    columns = ("loss", "labels that count", "seeds", "tokens per step, mean", "least", "most", over_reference)
    lines = [f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * 5]
    for (loss, weights), values in sorted(by_loss.items(), key=lambda item: -mean(item[1].values())):
        over = [value - reference[seed] for seed, value in values.items() if seed in reference]
        difference = f"{mean(over):+.3f} ({stdev(over):.3f})" if len(over) > 1 else "-"
        lines.append(
            f"| {loss} | {'all' if weights == 'uniform' else 'those reached'} | {len(values)} | {mean(values.values()):.3f} "
            f"| {min(values.values()):.3f} | {max(values.values()):.3f} | {difference} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
