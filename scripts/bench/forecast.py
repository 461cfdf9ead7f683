"""Forecasts beside what evaluations measured afterwards.

    python scripts/bench/forecast.py FORECAST.json=EVALUATION FORECAST.json=EVALUATION@0.5 ... --output FILE

A pair is the record of `outrider forecast` and the folder of an evaluation of the drafters that the whole recipe
trained, or those of a multiple of its data (@0.5). Each trained method in both is a row, greedy and at batch size 1.
Figures of an evaluation are sums over its suites.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import finish

from outrider.eval.records.names import BASELINE, SUMMARY_FILE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", help="FORECAST.json=EVALUATION, and @MULTIPLE of the recipe's data")
    parser.add_argument("--output", type=Path, required=True, help="the record, in JSON")
    args = parser.parse_args()
    rows = [row for pair in args.pairs for row in rows_of(pair)]
    options = {"forecasts": len(args.pairs), "output": args.output.name}
    finish(args.output, rows, options, tokens_per_step=summary_of(rows, ""), speedup=summary_of(rows, " speedup"))


def rows_of(pair: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each trained method of a pair."""
    forecast_file, _, rest = pair.partition("=")
    folder, _, multiple = rest.partition("@")
    share = float(multiple or 1)
    record = json.loads(Path(forecast_file).read_text())
    measured = measured_of(json.loads((Path(folder) / SUMMARY_FILE).read_text()))
    for one in record["forecasts"]:
        if len(one["measured"]) == 1 or one["temperature"] or one["label"] not in measured:
            continue
        tokens_per_step, speedup = measured[one["label"]]
        row = {
            "target": record["target"],
            "drafter": one["label"],
            "sample": record["num_labels"][-1],
            "labels": round(record["total_labels"] * share),
            **compared(one["tokens_per_step"][str(share)], tokens_per_step, ""),
        }
        cells = compared(one["speedup"]["1"], speedup, " speedup")
        yield row | (cells if share == 1 else dict.fromkeys(cells, "-"))


def measured_of(summary: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return tokens per step and speedup of each greedy method at batch size 1, over all suites."""
    sums: dict[str, list[float]] = {}
    plain = {row["suite"]: row for row in summary if row["method"] == BASELINE and not row["temperature"]}
    for row in summary:
        if row["temperature"] or row["batch_size"] != 1 or row["method"] == BASELINE:
            continue
        steps = sum(row["accepted_histogram"])
        seconds = row["num_tokens"] / row["tokens_per_second"]
        before = row["num_tokens"] / plain[row["suite"]]["tokens_per_second"]
        so_far = sums.setdefault(row["label"], [0.0] * 4)
        sums[row["label"]] = [
            a + b for a, b in zip(so_far, (steps * row["tokens_per_step"], steps, before, seconds), strict=True)
        ]
    return {label: (tokens / steps, before / seconds) for label, (tokens, steps, before, seconds) in sums.items()}


def compared(forecast: list[float], measured: float, what: str) -> dict[str, Any]:
    """Return the cells of a forecast [value, low, high] and its measurement."""
    value, low, high = forecast
    return {
        f"forecast{what}": [round(bound, 3) for bound in forecast],
        f"measured{what}": round(measured, 3),
        f"held{what}": low <= measured <= high,
        f"error{what}": round(value / measured - 1, 3),
    }


def summary_of(rows: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return how many measurements their 90 % intervals hold, and the median size of the error."""
    found = [row for row in rows if row[f"held{what}"] != "-"]
    errors = [abs(row[f"error{what}"]) for row in found]
    return {
        "rows": len(found),
        "held": sum(row[f"held{what}"] for row in found),
        "median error": round(statistics.median(errors), 3),
    }


if __name__ == "__main__":
    main()
