"""Rows, marks, table and plot of the pace study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
from free_marks import mark
from pace_replay import WARM_STEPS, Fixed, Outcome, fixed_seconds

from outrider.eval.results.plots import PARITY_LINE, drawing

BEST_FIXED, EXPECTED, UNCALIBRATED, CONFIDENCE = "best fixed", "expected", "expected, uncalibrated", "confidence"
LEAST, LEAST_MEAN, MOST_ERROR = 0.95, 1.0, 0.15
RESAMPLES, INTERVAL = 2000, (2.5, 97.5)
COLORS = {EXPECTED: "C0", UNCALIBRATED: "C9", CONFIDENCE: "C1"}
StudyRow = dict[str, Any]


def fixed_row(fixed: Mapping[Fixed, Sequence[int]], tokens: Sequence[int], ratio: float) -> StudyRow:
    """Return the row of the fixed tree that is fastest at this ratio, chosen in hindsight."""
    setting = min(fixed, key=lambda setting: sum(fixed_seconds(setting, fixed[setting], ratio)))
    seconds, num_steps = fixed_seconds(setting, fixed[setting], ratio), sum(fixed[setting])
    return {
        "method": BEST_FIXED,
        "ratio": ratio,
        "setting": setting.described,
        "tokens_per_step": sum(tokens) / num_steps,
        "drafts_per_step": setting.length,
        "nodes_per_step": min(setting.nodes, setting.length * setting.width),
        "tokens_per_draft_pass": sum(tokens) / sum(seconds),
        "seconds": seconds,
    }


def rule_row(method: str, gamma: float, outcome: Outcome, best: StudyRow) -> StudyRow:
    """Return the row of a rule, beside that of the best fixed tree."""
    errors = outcome.errors[WARM_STEPS:]
    return {
        "method": method,
        "ratio": best["ratio"],
        "gamma": gamma,
        "tokens_per_step": sum(outcome.tokens) / outcome.steps,
        "drafts_per_step": outcome.drafts / outcome.steps,
        "nodes_per_step": outcome.nodes / outcome.steps,
        "tokens_per_draft_pass": outcome.rate,
        "over_best_fixed": outcome.rate / best["tokens_per_draft_pass"],
        "over_best_fixed_ci95": interval(outcome, best["seconds"]),
        "steps": outcome.steps,
        "error": mean(errors) if errors else None,
        "error_deviation": pstdev(errors) / len(errors) ** 0.5 if errors else None,
        "bins": outcome.bins,
    }


def interval(outcome: Outcome, best_seconds: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the speed over the best fixed tree, over texts: a bootstrap."""
    chosen = np.random.default_rng(0).integers(len(best_seconds), size=(RESAMPLES, len(best_seconds)))
    ratios = np.array(best_seconds)[chosen].sum(1) / np.array(outcome.seconds)[chosen].sum(1)
    return [float(end) for end in np.percentile(ratios, INTERVAL)]


def judge(rows: Sequence[StudyRow]) -> list[dict[str, Any]]:
    """Judge the marks: the expected pace against the best fixed tree, and its calibration."""
    cells = [row for row in rows if row["method"] == EXPECTED]
    worst = min(cells, key=lambda row: row["over_best_fixed"])
    average = mean(row["over_best_fixed"] for row in cells)
    marks = [
        mark(
            f"{EXPECTED} at least {LEAST} of the best fixed tree in every cell",
            worst["over_best_fixed"] >= LEAST,
            f"least {worst['over_best_fixed']:.3f} at {cell_of(worst)}",
        ),
        mark(f"{EXPECTED} at least {LEAST_MEAN:.1f} of it on average", average >= LEAST_MEAN, f"{average:.3f}"),
    ]
    judged = [row for row in cells if row["error"] is not None]
    if judged:
        wrong = max(judged, key=lambda row: abs(row["error"]))
        rule = f"accepted less expected draft tokens at most {MOST_ERROR} per step after {WARM_STEPS} steps"
        figures = f"most {wrong['error']:+.3f} (deviation {wrong['error_deviation']:.3f}) at {cell_of(wrong)}"
        marks.append(mark(rule, abs(wrong["error"]) <= MOST_ERROR, figures))
    return marks


def cell_of(row: StudyRow) -> str:
    return f"a pass of {row['ratio']:g} draft passes, gamma {row['gamma']:.3g}"


def table(rows: Sequence[StudyRow]) -> str:
    """Format the speeds over the best fixed tree, a line for each method and gamma."""
    best = [row for row in rows if row["method"] == BEST_FIXED]
    ratios = [row["ratio"] for row in best]
    lines = ["| a pass costs, in draft passes | gamma | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |"]
    lines.append("|---|---:|" + "---:|" * len(ratios))
    settings = [f"{row['setting']['length']} deep, {row['nodes_per_step']} nodes" for row in best]
    lines.append(f"| {BEST_FIXED} | | " + " | ".join(settings) + " |")
    lines.append("| its tokens per step | | " + " | ".join(f"{row['tokens_per_step']:.2f}" for row in best) + " |")
    for method in (EXPECTED, UNCALIBRATED, CONFIDENCE):
        for gamma in dict.fromkeys(row["gamma"] for row in rows if row["method"] == method):
            cells = {row["ratio"]: row for row in rows if row["method"] == method and row["gamma"] == gamma}
            speeds = [f"{cells[ratio]['over_best_fixed']:.2f}x" for ratio in ratios]
            lines.append(f"| {method} | {gamma:.3g} | " + " | ".join(speeds) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[StudyRow], path: Path) -> None:
    """Draw the speeds over the best fixed tree, and how often nodes of a probability are accepted."""
    with drawing(path, 10.4, 3.8) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
        styles = dict(zip(sorted({row["gamma"] for row in rows if "gamma" in row}), ("--", "-", ":"), strict=False))
        for method, color in COLORS.items():
            for gamma, style in styles.items():
                cells = [row for row in rows if row["method"] == method and row["gamma"] == gamma]
                speeds = [row["over_best_fixed"] for row in cells]
                options = {"color": color, "linestyle": style, "marker": "o", "markersize": 3}
                left.plot([row["ratio"] for row in cells], speeds, label=f"{method}, gamma {gamma:.3g}", **options)
                if method != CONFIDENCE:
                    right.plot(*reliability(cells), **options)
        left.axhline(1.0, **PARITY_LINE)
        ratios = sorted({row["ratio"] for row in rows})
        left.set_xscale("log")
        left.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        left.minorticks_off()
        left.set_xlabel("time of a target's pass, in draft passes")
        left.set_title("Speed over the best fixed tree", loc="left")
        left.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        right.plot([0, 1], [0, 1], **PARITY_LINE)
        right.set_xlabel("expected probability of a verified node")
        right.set_title("Share that was accepted", loc="left")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)


def reliability(cells: Sequence[StudyRow]) -> tuple[list[float], list[float]]:
    """Return the mean q of each bin of nodes, and the share of them that was accepted."""
    bins = np.array([row["bins"] for row in cells]).sum(0)  # [bin, 3]
    bins = bins[bins[:, 0] > 0]
    return (bins[:, 1] / bins[:, 0]).tolist(), (bins[:, 2] / bins[:, 0]).tolist()
