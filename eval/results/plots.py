"""Plots of speedup and tokens per step.

One plot shows a single temperature by category, the other compares all drafters.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.files import replacing
from ..records.names import BASELINE, OOM
from .rows import Row, decoding_name, fault, is_lossy, units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#1b6ca8", "#d1603d", "#3b8f5a", "#8e5ea2", "#b8860b", "#5f6a72")
"""Colors of methods or of temperatures; the seventh repeats the first."""
OVERALL = "all"
PLAIN_TEXT: dict[Any, Any] = {"font.family": "DejaVu Sans", "text.parse_math": False}
"""Settings of matplotlib that print names with any characters, such as dollar signs."""
PARITY_TEXT: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": "0.35"}
ROW_INCHES, BAR_SHARE = 0.34, 0.8
LINE_INCHES, DOT_INCHES = 0.2, 0.2
NAME_WIDTH = 34
"""Longest line of a method's name, in characters."""
LEGEND_WIDTH = 60
"""Longest line of a method's name in a legend of two columns, in characters."""
PARITY_LINE: dict[str, Any] = {"color": "0.35", "linewidth": 0.8, "linestyle": (0, (4, 3))}


@contextmanager
def drawing(path: Path, width: float, height: float, *, font_size: int = 9, dpi: int = 150) -> "Iterator[Figure]":
    """Yield a figure of `width` by `height` inches, and write it as a PNG afterwards."""
    import matplotlib as mpl  # heavy, and only plots need it
    from matplotlib.figure import Figure

    with mpl.rc_context({**PLAIN_TEXT, "font.size": font_size, "axes.titlesize": font_size + 1}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=dpi)


def plot_suite(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the rows of one suite, temperature and batch size.

    There is a bar for each category and method, labelled with its number. Whiskers are 95 %
    intervals. "-" stands for a number that doesn't exist or must not be shown (see `Row`), OOM for
    a method that ran out of memory. Whether a speedup is noisy or not lossless follows the method's
    name. Nothing is written if only the baseline was measured.
    """
    # 1. The methods besides the baseline.
    rows = [row for row in rows if row["method"] != BASELINE]
    measured = [row for row in rows if not row["out_of_memory"]]
    if not measured:
        return
    categories = [*_sorted_categories(measured[0]), OVERALL]

    # 2. Tokens per step on the left, speedup on the right.
    height = ROW_INCHES * (len(categories) + 0.4) * max(1.0, 0.62 * len(rows)) + 1.2
    with drawing(path, 9.0, height) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _bars(left, rows, categories, "tokens_per_step", "{:.2f}")
        _bars(right, rows, categories, "speedup", "{:.2f}x")
        left.set_title("Tokens per step", loc="left", fontweight="bold")
        right.set_title(_speedup_title(rows[0]), loc="left", fontweight="bold")
        left.set_yticks(range(len(categories)), [_category_label(measured[0], name) for name in categories])
        left.get_yticklabels()[-1].set_fontweight("bold")
        left.set_ylim(len(categories) - 0.4, -0.6)  # the first category at the top
        right.axvline(1.0, zorder=3, **PARITY_LINE)
        right.annotate("plain decoding", (1.0, 0), xycoords=("data", "axes fraction"), xytext=(0, -9), **PARITY_TEXT)
        figure.suptitle(_title(rows[0]), x=0.01, ha="left", fontsize=11)
        # Two columns, since a method's name can be long.
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)


def plot_comparison(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG that compares the drafters of one suite at one batch size.

    There is a line for each method, with a dot for each temperature. Methods are sorted by tokens
    per step at the first temperature. A number that doesn't exist has no dot. Nothing is written
    for fewer than two methods.
    """
    # 1. The methods besides the baseline, best first.
    rows = [row for row in rows if row["method"] != BASELINE]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    first = sorted(
        (row for row in rows if row["temperature"] == temperatures[0]),
        key=lambda row: row["tokens_per_step"] or 0.0,
        reverse=True,
    )
    if len(first) < 2 or all(row["out_of_memory"] for row in first):
        return

    # 2. A dot for each method and temperature.
    lines = {row["method"]: line for line, row in enumerate(first)}
    names = [_wrapped(row["label"]) for row in first]
    inches = max(LINE_INCHES * (2 + max(name.count("\n") for name in names)), DOT_INCHES * (len(temperatures) + 1))
    with drawing(path, 10.0, inches * len(first) + 1.8) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for row in rows:
            index = temperatures.index(row["temperature"])
            offset = (index - (len(temperatures) - 1) / 2) * DOT_INCHES / inches
            _dots(left, right, row, lines[row["method"]] + offset, COLORS[index % len(COLORS)])

        # 3. Axes, titles and legend.
        for axes in (left, right):
            axes.axvline(1.0, zorder=1, **PARITY_LINE)
            axes.grid(axis="x", color="0.92", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.margins(x=0.1)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(left=False)
            for line in range(1, len(first), 2):  # a grey background for every other method, for easier reading
                axes.axhspan(line - 0.5, line + 0.5, color="0.965", linewidth=0, zorder=0)
        left.set_title("Tokens per step", loc="left", fontweight="bold")
        right.set_title(_speedup_title(first[0]), loc="left", fontweight="bold")
        left.set_yticks(range(len(first)), names)
        left.set_ylim(len(first) - 0.5, -0.5)  # the best at the top
        setting = f"batch size {first[0]['batch_size']}, {first[0]['dtype']}"
        figure.suptitle(f"{first[0]['suite']}, {first[0]['num_prompts']} prompts; {setting}", x=0.01, ha="left", fontsize=11)
        figure.legend(handles=_legend(rows), loc="outside lower left", ncols=4, frameon=False)


def _dots(left: Any, right: Any, row: Row, height: float, color: str) -> None:
    """Draw one method at one temperature.

    It has dots labelled with their numbers, an interval, and the ceiling as a tick.
    """
    from matplotlib.patheffects import withStroke

    style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
    style["path_effects"] = [withStroke(linewidth=2, foreground="white")]  # readable across lines
    for axes, value, spec in ((left, row["tokens_per_step"], "{:.2f}"), (right, row["speedup"], "{:.2f}x")):
        if value is not None:
            is_hollow = is_lossy(row) or (axes is right and row["noisy"])
            axes.plot(value, height, "o", color=color, markersize=5, fillstyle="none" if is_hollow else "full")
            axes.annotate(spec.format(value) + (_in_brackets(row) if axes is right else ""), (value, height), (0, 4.5), **style)
    if row["speedup"] is None:
        right.annotate(OOM if row["out_of_memory"] else fault(row), (1.0, height), (0, -3), color=color, **style)
        return
    if row["speedup_ci95"]:
        right.plot(row["speedup_ci95"], [height] * 2, color=color, linewidth=1.2, solid_capstyle="butt")
    if row["ceiling"] is not None:
        right.plot(row["ceiling"], height, "|", color=color, markersize=7, markeredgewidth=1.8)


def _in_brackets(row: Row) -> str:
    """Say whether a row's speedup is not lossless, or noisy; empty if it is neither."""
    texts = ["not lossless"] * is_lossy(row) + ["noisy"] * row["noisy"]
    return f" ({', '.join(texts)})" if texts else ""


def _speedup_title(row: Row) -> str:
    return f"Speedup, with 95 % interval over {units(row)}"


def _wrapped(name: str) -> str:
    """Break a method's name into short lines."""
    return "\n".join(textwrap.wrap(name, NAME_WIDTH, break_long_words=False, break_on_hyphens=False))


def _legend(rows: Sequence[Row]) -> list[Any]:
    from matplotlib.lines import Line2D

    names = dict.fromkeys(decoding_name(row) for row in rows)
    handles = [
        Line2D([], [], color=COLORS[index % len(COLORS)], marker="o", markersize=5, linewidth=1.2, label=name)
        for index, name in enumerate(names)
    ]
    ceiling = Line2D(
        [], [], color="0.35", marker="|", markersize=7, markeredgewidth=1.8, linestyle="", label="ceiling (computed)"
    )
    return [*handles, ceiling, Line2D([], [], label="plain decoding", **PARITY_LINE)]


def _bars(
    axes: Any,
    rows: Sequence[Row],
    categories: Sequence[str],
    figure: str,
    spec: str,
) -> None:
    """Draw the bars of one figure of the rows, `tokens_per_step` or `speedup`."""
    # 1. A bar for each method and category.
    thickness = BAR_SHARE / len(rows)
    furthest = 1.0
    for index, row in enumerate(rows):
        color = COLORS[index % len(COLORS)]
        offset = (index - (len(rows) - 1) / 2) * thickness
        if row["out_of_memory"]:
            last = len(categories) - 1 + offset
            axes.barh(last, 0.0, color=color, label=row["label"])  # for the legend
            axes.annotate(OOM, (0, last), (4, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        for line, category in enumerate(categories):
            values: Mapping[str, Any] = {**row} if category == OVERALL else row["by_category"][category]
            value = values[figure]
            interval = values["speedup_ci95"] if figure == "speedup" else None
            if value is None:
                axes.annotate("-", (0, line + offset), (4, 0), textcoords="offset points", va="center", fontsize=8)
                continue
            label = textwrap.fill(row["label"] + _in_brackets(row), LEGEND_WIDTH) if category == OVERALL else None
            alpha, hatch = 1.0 if category == OVERALL else 0.75, "///" if is_lossy(row) else None
            axes.barh(line + offset, value, thickness * 0.9, color=color, alpha=alpha, label=label, hatch=hatch)
            end = value
            if interval:
                axes.plot(interval, [line + offset] * 2, color="0.15", linewidth=1, solid_capstyle="butt")
                end = max(value, interval[1])
            axes.annotate(spec.format(value), (end, line + offset), (4, 0), textcoords="offset points", va="center", fontsize=8)
            furthest = max(furthest, end)

    # 2. The axes.
    axes.set_xlim(0, furthest * 1.15)  # room for the labels
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)  # the bars have labels


def _sorted_categories(row: Row) -> list[str]:
    """Sort categories from the most tokens per step to the fewest; those without any step come
    last."""
    values = row["by_category"]
    return sorted(values, key=lambda name: values[name]["tokens_per_step"] or 0.0, reverse=True)


def _category_label(row: Row, category: str) -> str:
    num_prompts = row["num_prompts"] if category == OVERALL else row["by_category"][category]["num_prompts"]
    return f"{category} ({num_prompts})"


def _title(row: Row) -> str:
    size = ", batch size 1" if row["batch_size"] == 1 else ""  # a larger one is in the name
    return f"{row['suite']} by category (number of prompts); {decoding_name(row)}{size}, {row['dtype']}"
