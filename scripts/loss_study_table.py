"""Tokens per step by loss, over the seeds: what `accelerate launch train.py conf=loss_study_demo` was made for.

python scripts/loss_study_table.py outputs/loss_study_demo/eval/summary.json
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

VARIANT = re.compile(r"(?P<loss>\w+)_(?P<seed>\d+)/drafter")
REACHED = "_reached"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, help="summary.json of the evaluation")
    print(table(json.loads(parser.parse_args().summary.read_text(encoding="utf-8"))))


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, the best mean first. Raises ValueError where no row is a variant of the study."""
    figures: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if variant := VARIANT.search(row["method"]):
            figures[variant["loss"]].append(row["tokens_per_step"])
    if not figures:
        raise ValueError("the summary has no row of a variant such as kl_0; give that of conf=loss_study_demo")
    lines = [
        "| loss | labels count | seeds | tokens per step, mean | standard deviation | least | most |",
        "|---|---|" + "---:|" * 5,
    ]
    for name, values in sorted(figures.items(), key=lambda item: -mean(item[1])):
        weights = "where reached" if name.endswith(REACHED) else "all"
        spread = f"{stdev(values):.3f}" if len(values) > 1 else "-"
        lines.append(
            f"| {name.removesuffix(REACHED)} | {weights} | {len(values)} | {mean(values):.3f} | {spread} "
            f"| {min(values):.3f} | {max(values):.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
