"""PNGs of a report's tables, for papers and slides, with the same values as the page."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..results.plots import drawing
from .page_tables import Column, Table, Value

BAR, WHISKER, PARITY, BAD = "#2a78b5", "#14202b", "#7a848e", "#b3261e"
MIN_LABELLED = 0.09
"""Smallest part of a stack with a label, as a share of the axis."""
LINE_INCHES, NAME_WIDTH, GRID_CELL_INCHES, GRID_NAME_WIDTH = 0.16, 44, 0.85, 13
DPI = 130


def plot_table(table: Table, title: str, path: Path) -> None:
    """Write a PNG of the table: a panel for each column of bars, or one colored grid."""
    names = ["\n".join([*_wrapped(line.label), *_wrapped(line.detail)]) for line in table.lines]
    inches = LINE_INCHES * (0.8 + max(name.count("\n") + 1 for name in names))
    drawn = [index for index, column in enumerate(table.columns) if column.kind in ("bar", "stack")]
    width = 3.4 + (GRID_CELL_INCHES * len(table.columns) if table.is_grid else 3.1 * len(drawn))
    with drawing(path, width, max(inches, 0.42) * len(names) + 1.3, font_size=8, dpi=DPI) as figure:
        if table.is_grid:
            _grid(figure.subplots(), table, names)
        else:
            panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
            for axes, index in zip(panels, drawn, strict=True):
                _panel(axes, table.columns[index], [line.values[index] for line in table.lines])
            panels[0].set_yticks(range(len(names)), names)
            panels[0].set_ylim(len(names) - 0.45, -0.55)
            if parts := [axes for axes, index in zip(panels, drawn, strict=True) if table.columns[index].parts]:
                figure.legend(*parts[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
        figure.suptitle("\n".join(textwrap.wrap(title, int(width * 13))), x=0.01, ha="left", fontsize=10)
        for axes in figure.axes:  # these lie inside the axes; computing their layout takes seconds
            for artist in (*axes.texts, *axes.patches, *axes.lines):
                artist.set_in_layout(False)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, NAME_WIDTH, break_long_words=False, break_on_hyphens=False)


def _panel(axes: Any, column: Column, values: Sequence[Value]) -> None:
    axes.set_title(column.name, loc="left", fontweight="bold")
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    for line, value in enumerate(values):
        _bar(axes, line, value)
        _stack(axes, line, value.parts, column, is_labelled=line == 0)
    axes.set_xlim(0, 1.65 * column.top)  # room for the texts
    if column.parity:
        axes.axvline(column.parity, color=PARITY, linewidth=0.8, linestyle=(0, (4, 3)))


def _bar(axes: Any, line: int, value: Value) -> None:
    text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
    if value.number is None:
        axes.annotate(value.text, (0, line), (4, 0), color=BAD if value.tone == "bad" else "0.3", **text)
        return
    axes.barh(line, value.number, 0.55, color=BAR)
    end = value.number
    if value.low is not None and value.high is not None:
        axes.plot([value.low, value.high], [line, line], color=WHISKER, linewidth=1.1, marker="|", markersize=5)
        end = max(end, value.high)
    label = (f"{value.text}  ({value.note})" if value.note else value.text) + (f"\n{value.mark}" if value.mark else "")
    axes.annotate(label, (end, line), (5, 0), color=BAD if value.tone == "bad" else "black", **text)


def _stack(axes: Any, line: int, parts: Sequence[float], column: Column, *, is_labelled: bool) -> None:
    """Draw the parts of a bar, each with its share where there is room."""
    left = 0.0
    for width, (name, color) in zip(parts, column.parts.items(), strict=False):  # a bar may have no parts
        axes.barh(line, width, 0.55, left=left, color=color, label=name if is_labelled else "_nolegend_")
        if width >= MIN_LABELLED * column.top:
            share = f"{width / sum(parts):.0%}"
            axes.text(left + width / 2, line, share, ha="center", va="center", fontsize=6.5, color="white")
        left += width


def _grid(axes: Any, table: Table, names: Sequence[str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("heat", ["white", "#8fb8d8"])
    for row, line in enumerate(table.lines):
        for index, (value, column) in enumerate(zip(line.values, table.columns, strict=True)):
            share = 0.0 if value.number is None else min(1.0, value.number / column.top)
            axes.add_patch(_square(index, row, colors(share)))
            text = "\n".join(filter(None, (value.text, value.note, value.mark)))
            style = {
                "fontweight": "bold" if value.tone == "best" else "normal",
                "color": BAD if value.tone == "bad" else "black",
            }
            axes.text(index, row, text, ha="center", va="center", fontsize=7, **style)
    axes.set_xlim(-0.5, len(table.columns) - 0.5)
    axes.set_ylim(len(table.lines) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    heads = ["\n".join(textwrap.wrap(column.name, GRID_NAME_WIDTH)) for column in table.columns]
    axes.set_xticks(range(len(heads)), heads)
    axes.tick_params(left=False, top=False, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)


def _square(column: int, line: int, color: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, line - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=1.5)
