"""Plots of the pipeline bench: speeds of the sweeps, and what each stage does when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline_methods import PIPELINED, PLAIN, USUAL_LENGTH, best_synchronous, synchronous
from pipeline_play import Outcome
from pipeline_report import Cells, Rows, clock_of, of_sweep, ratio

from outrider.eval.results.plots import COLORS, PARITY_LINE, drawing

AXES = {"stages": "stages of a target of 160 ms", "acceptance": "acceptance", "hop": "hop latency in ms"}
LIVE, DEAD, DRAFT = COLORS[0], "0.75", COLORS[4]
MILLISECONDS = 1e3


def names_of(rows: Rows) -> dict[str, str]:
    """Return the method of each of a plot's lines."""
    return {
        f"synchronous, K = {USUAL_LENGTH}": synchronous(USUAL_LENGTH),
        "synchronous, best K": synchronous(best_synchronous(rows)["num_drafts"]),
        "pipelined": PIPELINED,
    }


def plot_sweeps(cells: Cells, points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the speed over plain decoding: over stages, acceptance and hop latency.

    `points` are speeds of processes, drawn as crosses.
    """
    with drawing(path, 11.0, 3.6) as figure:
        panels = figure.subplots(1, len(AXES), squeeze=False)[0]
        for axes, (sweep, label) in zip(panels, AXES.items(), strict=True):
            swept = of_sweep(cells, sweep)
            places = [value_of(name) for name in swept]
            for color, title in zip(COLORS, names_of(next(iter(swept.values()))), strict=False):
                speeds = [ratio(rows[names_of(rows)[title]], rows[PLAIN]) for rows in swept.values()]
                axes.plot(places, speeds, color=color, marker="o", markersize=3, label=title)
                measured = points_of(points, sweep, swept, title)
                axes.plot(*zip(*measured, strict=True), "x", color=color, markersize=7) if measured else None
            axes.axhline(1.0, label="plain", **PARITY_LINE)
            axes.set_xlabel(label)
            axes.set_ylabel("speed over plain decoding")
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_title(f"lines: {clock_of(cells)}", loc="left", fontsize=8)
        panels[0].legend(frameon=False, fontsize=7)
        if points:
            panels[1].set_title("crosses: emulated stages, wall clock", loc="left", fontsize=8)


def value_of(name: str) -> float:
    return float(name.split()[0])


def points_of(points: Sequence[Mapping[str, Any]], sweep: str, rows: Cells, title: str) -> list[tuple[float, float]]:
    """Return the place and the speed over plain decoding of each measured point of a line."""
    found = []
    for point in points:
        beginning, _, value = point["condition"].partition(" ")
        if beginning == sweep and value in rows and point["method"] == names_of(rows[value])[title]:
            found.append((value_of(value), point["over_plain"]))
    return found


def plot_gantt(texts: Mapping[str, Outcome], path: Path, *, first: int, last: int) -> None:
    """Draw what each stage computes, a panel for each method. Cancelled parts are hatched.

    The panels show the same tokens of one text: those after `first`, up to `last`. Each run has its
    number of entries. Ticks below show when tokens were emitted.
    """
    with drawing(path, 11.0, 1.2 + 2.1 * len(texts)) as figure:
        panels = figure.subplots(len(texts), 1, sharex=True, squeeze=False)[:, 0]
        panels[0].margins(x=0.01)
        for axes, (title, text) in zip(panels, texts.items(), strict=True):
            begin, end = (text.decoded.times[number - 1] for number in (first, last))
            draw_stages(axes, text, begin, end)
            axes.set_title(f"{title}: tokens {first + 1} to {last} of the text in {end - begin:.2f} s", loc="left")
        panels[-1].set_xlabel(f"milliseconds after token {first}, virtual time")
        panels[0].legend(handles=legend(), loc="upper right", ncols=4, fontsize=7, bbox_to_anchor=(1.0, 1.22), frameon=False)


def draw_stages(axes: Any, text: Outcome, begin: float, end: float) -> None:
    """Draw the bars of one method between two times, from 0 on."""

    def bar(start: float, stop: float) -> tuple[float, float]:
        """Return the begin and the length in milliseconds of the part that is drawn."""
        first, last = max(start - text.decoded.start, begin), min(stop - text.decoded.start, end)
        return MILLISECONDS * (first - begin), MILLISECONDS * max(last - first, 0.0)

    # 1. Runs at the stages: those that were cancelled at last are hatched.
    num_stages = text.pipeline.costs.num_stages
    for span in text.pipeline.spans:
        start, length = bar(span.start, span.end)
        if length:
            is_dead = span.number in text.pipeline.cancelled
            options: dict[str, Any] = {"hatch": "/////", "edgecolor": "0.35"} if is_dead else {"edgecolor": "white"}
            color = DEAD if is_dead else LIVE
            axes.broken_barh([(start, length)], (span.stage + 0.1, 0.8), facecolor=color, linewidth=0.4, **options)
            if not is_dead and span.stage == 0:
                middle = start + length / 2
                axes.text(middle, 0.55, str(span.num_entries), ha="center", va="center", color="white", fontsize=6)
    # 2. The head: draft passes, and the tokens.
    drafts = [part for part in (bar(*times) for times in text.drafts) if part[1]]
    axes.broken_barh(drafts, (-0.9, 0.8), facecolor=DRAFT, linewidth=0)
    ends = [MILLISECONDS * (time - begin) for time in text.decoded.times if begin < time <= end]
    axes.plot(ends, [num_stages + 0.35] * len(ends), "v", color=COLORS[1], markersize=4, clip_on=False)
    # 3. The axes.
    axes.set_yticks([-0.5, *(stage + 0.5 for stage in range(num_stages))], ["drafts", *map(str, range(1, num_stages + 1))])
    axes.tick_params(axis="y", length=0, labelsize=7)
    axes.set_ylim(num_stages + 0.7, -1.1)
    axes.set_ylabel("stage")
    axes.spines[["top", "right"]].set_visible(False)


def legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=LIVE, label="run (entries at stage 1)"),
        Patch(facecolor=DEAD, edgecolor="0.35", hatch="/////", label="cancelled run"),
        Patch(facecolor=DRAFT, label="draft passes"),
        Line2D([], [], color=COLORS[1], marker="v", linestyle="", markersize=4, label="token emitted"),
    ]
