"""Speedup and tokens per step by category, as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..data.files import replacing
from .records import BASELINE
from .rows import Row

COLORS = ("#1b6ca8", "#d1603d", "#3b8f5a", "#8e5ea2", "#b8860b", "#5f6a72")
"""One per method; a seventh takes the first again."""
OVERALL = "all"
PARITY_TEXT: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": "0.35"}
ROW_INCHES, BAR_SHARE = 0.34, 0.8


def plot_suite(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of one suite's rows: a bar per category and method, labelled with its number; whiskers are 95 % intervals.

    "-" stands for a number that doesn't exist or must not be shown (see `Row`). Nothing is written where only the baseline was
    measured.
    """
    rows = [row for row in rows if row["method"] != BASELINE]
    if not rows:
        return
    import matplotlib as mpl  # heavy, and only plots need it
    from matplotlib.figure import Figure

    categories = [*_sorted_categories(rows[0]), OVERALL]
    height = ROW_INCHES * (len(categories) + 0.4) * max(1.0, 0.62 * len(rows)) + 1.2
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(9, height), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _bars(left, rows, categories, lambda values: (values["tokens_per_step"], None), "{:.2f}")
        _bars(right, rows, categories, lambda values: (values["speedup"], values["speedup_ci95"]), "{:.2f}x")
        left.set_title("Tokens per step", loc="left", fontweight="bold")
        right.set_title("Speedup, with 95 % interval over prompts", loc="left", fontweight="bold")
        left.set_yticks(range(len(categories)), [_category_label(rows[0], name) for name in categories])
        left.get_yticklabels()[-1].set_fontweight("bold")
        left.set_ylim(len(categories) - 0.4, -0.6)  # the first category at the top
        right.axvline(1.0, color="0.35", linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
        right.annotate("plain decoding", (1.0, 0), xycoords=("data", "axes fraction"), xytext=(0, -9), **PARITY_TEXT)
        figure.suptitle(_title(rows[0]), x=0.01, ha="left", fontsize=11)
        # Two columns, since the name of a method can be long.
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150)


def _bars(
    axes: Any,
    rows: Sequence[Row],
    categories: Sequence[str],
    value_of: Callable[[Any], tuple[float | None, Sequence[float] | None]],
    spec: str,
) -> None:
    thickness = BAR_SHARE / len(rows)
    furthest = 1.0
    for index, row in enumerate(rows):
        color = COLORS[index % len(COLORS)]
        offset = (index - (len(rows) - 1) / 2) * thickness
        for place, category in enumerate(categories):
            value, interval = value_of(row if category == OVERALL else row["by_category"][category])
            if value is None:
                axes.annotate("-", (0, place + offset), (4, 0), textcoords="offset points", va="center", fontsize=8)
                continue
            label = row["method"] if category == OVERALL else None
            alpha = 1.0 if category == OVERALL else 0.75
            axes.barh(place + offset, value, thickness * 0.9, color=color, alpha=alpha, label=label)
            end = value
            if interval:
                axes.plot(interval, [place + offset] * 2, color="0.15", linewidth=1, solid_capstyle="butt")
                end = max(value, interval[1])
            axes.annotate(
                spec.format(value), (end, place + offset), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
            furthest = max(furthest, end)
    axes.set_xlim(0, furthest * 1.15)  # room for the labels
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)  # the bars carry their numbers


def _sorted_categories(row: Row) -> list[str]:
    """From the most tokens per step to the fewest; categories without any step come last."""
    values = row["by_category"]
    return sorted(values, key=lambda name: values[name]["tokens_per_step"] or 0.0, reverse=True)


def _category_label(row: Row, category: str) -> str:
    num_prompts = row["num_prompts"] if category == OVERALL else row["by_category"][category]["num_prompts"]
    return f"{category} ({num_prompts})"


def _title(row: Row) -> str:
    return f"{row['suite']} by category (number of prompts); greedy, batch size {row['batch_size']}, {row['dtype']}"
