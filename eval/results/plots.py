"""The plot of a suite at a batch size: tokens per step and speedup of every drafter at each temperature."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.files import replacing
from ..records.names import BASELINE, OOM
from .rows import Row, decoding_name, fault, is_lossy, units

COLORS = ("#1b6ca8", "#d1603d", "#3b8f5a", "#8e5ea2", "#b8860b", "#5f6a72")
"""Colors of temperatures; the seventh repeats the first."""
TEXT: dict[Any, Any] = {"font.family": "DejaVu Sans", "text.parse_math": False, "font.size": 9, "axes.titlesize": 10}
"""Settings of matplotlib that print names with any characters, such as dollar signs."""
LINE_INCHES, DOT_INCHES = 0.2, 0.2
NAME_WIDTH = 34
"""Longest line of a method's name, in characters."""
PARITY_LINE: dict[str, Any] = {"color": "0.35", "linewidth": 0.8, "linestyle": (0, (4, 3))}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG that compares the drafters of one suite at one batch size.

    There is a line for each method, with a dot for each temperature. Methods are sorted by tokens
    per step at the first temperature. A number that doesn't exist has no dot. Nothing is written
    if only the baseline was measured.
    """
    import matplotlib as mpl  # heavy, and only plots need it
    from matplotlib.figure import Figure

    # 1. The methods besides the baseline, best first.
    rows = [row for row in rows if row["method"] != BASELINE]
    if all(row["out_of_memory"] for row in rows):
        return
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    best = sorted(rows, key=lambda row: (temperatures.index(row["temperature"]), -(row["tokens_per_step"] or 0.0)))
    names = {row["method"]: "\n".join(textwrap.wrap(row["label"], NAME_WIDTH, break_on_hyphens=False)) for row in best}
    lines = {method: line for line, method in enumerate(names)}

    # 2. A dot for each method and temperature.
    most_lines = 2 + max(name.count("\n") for name in names.values())
    inches = max(LINE_INCHES * most_lines, DOT_INCHES * (len(temperatures) + 1))
    with mpl.rc_context(TEXT), replacing(path) as temporary:
        figure = Figure(figsize=(10.0, inches * len(names) + 1.8), layout="constrained")
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
            for line in range(1, len(names), 2):  # a grey background for every other method, for easier reading
                axes.axhspan(line - 0.5, line + 0.5, color="0.965", linewidth=0, zorder=0)
        left.set_title("Tokens per step", loc="left", fontweight="bold")
        right.set_title(f"Speedup, with 95 % interval over {units(rows[0])}", loc="left", fontweight="bold")
        left.set_yticks(range(len(names)), [*names.values()])
        left.set_ylim(len(names) - 0.5, -0.5)  # the best at the top
        setting = f"batch size {rows[0]['batch_size']}, {rows[0]['dtype']}"
        prompts = max(row["num_prompts"] for row in rows)
        figure.suptitle(f"{rows[0]['suite']}, {prompts} prompts; {setting}", x=0.01, ha="left", fontsize=11)
        figure.legend(handles=_legend(rows), loc="outside lower left", ncols=4, frameon=False)
        figure.savefig(temporary, format="png", dpi=150)


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
