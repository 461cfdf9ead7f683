"""Figures of the size study: rows of the table, marks, budget, plot."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from size_methods import LOOKUP, PLAIN, TRANSFORMERS, count_threads

from outrider.eval.results.plots import PARITY_LINE, drawing
from outrider.eval.results.stats import bootstrap, ceiling, ratio_of_ratios

MARK_SIZE, MARK, BF16_MARK = "400M", 1.5, 2.0
"""ReDrafter must be so many times as fast as plain decoding at this size; the second number is for
processors with bf16 matrix instructions."""
MARKED_KIND = "redrafter"
SLOWEST_PLAIN = 0.98
"""Least speed of our plain decoding, over transformers' `generate`."""
PHASES = ("draft", "verify", "accept", "rest")
Row = dict[str, Any]


def rows_of(cell: Mapping[str, Any]) -> list[Row]:
    """Return a row for each method of a cell."""
    # 1. The answers that count, and the faster of the two plain decodings.
    used = {
        name: [tries[number] for tries, number in zip(answers, cell["used_rounds"], strict=True)]
        for name, answers in cell["answers"].items()
    }
    fastest = min((PLAIN, TRANSFORMERS), key=lambda name: total(used[name], "seconds") / num_tokens(used[name]))
    plain_step = phase_milliseconds(used[PLAIN])
    assert plain_step is not None
    plain_milliseconds = sum(plain_step.values())
    kinds = {drafter["name"]: drafter for drafter in cell["settings"]["drafters"]}
    # 2. A row for each method.
    rows = []
    for name, answers in used.items():
        speedup, interval = ratio_to(used[fastest], answers, "seconds")
        pairs = [per_token(first) / per_token(second) for first, second in zip(used[fastest], answers, strict=True)]
        steps, phases = total(answers, "num_steps"), phase_milliseconds(answers)
        tau = (num_tokens(answers) - len(answers)) / steps if steps else None
        rho = phases["draft"] / plain_milliseconds if phases else None
        rows.append(
            {
                "size": cell["size"],
                "dtype": cell["dtype"],
                "threads": cell["threads"],
                "parameters": cell["parameters"],
                "method": name,
                "kind": kinds.get(name, {}).get("kind"),
                "baseline": fastest,
                "tokens_per_step": tau,
                "tokens_per_second": num_tokens(answers) / total(answers, "seconds"),
                "speedup": speedup,
                "speedup_ci95": interval,
                "median_speedup": statistics.median(pairs),
                "num_faster": sum(pair > 1 for pair in pairs),
                "processor_speedup": ratio_to(used[fastest], answers, "processor_seconds")[0],
                "num_prompts": len(answers),
                "num_identical": sum(a["token_ids"] == b["token_ids"] for a, b in zip(answers, used[PLAIN], strict=True)),
                "unexplained": cell["unexplained"].get(name, []),
                "num_repeated": sum(len(tries) > 1 for tries in cell["answers"][name]),
                "milliseconds_per_step": phases,
                "ceiling": ceiling(tau, rho),
            }
        )
    return rows


def total(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(answer[key] for answer in answers)


def num_tokens(answers: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(answer["token_ids"]) for answer in answers)


def per_token(answer: Mapping[str, Any]) -> float:
    seconds: float = answer["seconds"] / len(answer["token_ids"])
    return seconds


def ratio_to(
    baseline: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]], key: str
) -> tuple[float, tuple[float, float] | None]:
    """Return the baseline's seconds per token over the method's, and its 95 % interval."""
    sides = [[(answer[key], len(answer["token_ids"])) for answer in side] for side in (baseline, answers)]
    return bootstrap(np.array(sides), ratio_of_ratios, seed=0)


def phase_milliseconds(answers: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return milliseconds per step by phase, without the prefill; None for transformers."""
    steps = total(answers, "num_steps")
    if not steps or answers[0]["phases"] is None:
        return None
    return {name: 1e3 * sum(answer["phases"][name] for answer in answers) / steps for name in PHASES}


def table(rows: Sequence[Row]) -> str:
    """Format all rows as Markdown."""
    head = "| size | type | threads | method | tokens/step | tokens/s | speedup | median | by processor time | identical "
    lines = [f"{head}| ms/step: draft, verify, accept, rest |", "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        phases = row["milliseconds_per_step"]
        lines.append(
            f"| {row['size']} | {row['dtype']} | {row['threads']} | {row['method']} | {number(row['tokens_per_step'])} "
            f"| {row['tokens_per_second']:.1f} | {speedup_text(row)} | {row['median_speedup']:.2f}x "
            f"| {row['processor_speedup']:.2f}x | {row['num_identical']} of {row['num_prompts']} "
            f"| {', '.join(f'{phases[name]:.1f}' for name in PHASES) if phases else '-'} |"
        )
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Format the speedups over size, a table for each type and number of threads."""
    tables = []
    for dtype, threads in dict.fromkeys((row["dtype"], row["threads"]) for row in rows):
        here = [row for row in rows if (row["dtype"], row["threads"]) == (dtype, threads)]
        sizes = list(dict.fromkeys(row["size"] for row in here))
        lines = [f"| {dtype}, {count_threads(threads)} | {' | '.join(sizes)} |", "|---|" + "---:|" * len(sizes)]
        for name in dict.fromkeys(row["method"] for row in here):
            speedups = {row["size"]: row["speedup"] for row in here if row["method"] == name}
            lines.append(f"| {name} | " + " | ".join(f"{speedups[size]:.2f}x" for size in sizes) + " |")
        fastest = {row["size"]: row["tokens_per_second"] for row in here if row["method"] == row["baseline"]}
        lines.append("| tokens/s of the faster plain one | " + " | ".join(f"{fastest[size]:.1f}" for size in sizes) + " |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def speedup_text(row: Row) -> str:
    interval = row["speedup_ci95"]
    return f"{row['speedup']:.2f}x" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def notes(rows: Sequence[Row], *, has_bf16_matrices: bool) -> list[str]:
    """Return the lines below the table: what speedup means, doubts, and the marks."""
    lines = ["Speedup is over the faster plain decoding of the cell: ours or transformers' `generate`."]
    if repeated := sum(row["num_repeated"] for row in rows if row["method"] == PLAIN):
        lines.append(f"{repeated} prompts were decoded again by all methods, since one of them had stalled.")
    lines += [
        f"WRONG TEXT: {where(row)} at the prompts {row['unexplained']}; rounding can't explain it."
        for row in rows
        if row["unexplained"]
    ]
    lines += [
        f"Measurement error: {where(row)} is faster than its {row['tokens_per_step']:.2f} tokens per step allow; measure again."
        for row in rows
        if row["kind"] and row["tokens_per_step"] and row["speedup"] > row["tokens_per_step"]
    ]
    return lines + plain_marks(rows) + drafter_mark(rows, BF16_MARK if has_bf16_matrices else MARK)


def where(row: Row) -> str:
    return f"{row['method']} ({row['size']}, {row['dtype']}, {count_threads(row['threads'])})"


def plain_marks(rows: Sequence[Row]) -> list[str]:
    """State for our plain decoding whether it is slower than transformers' anywhere."""
    plain = [row for row in rows if row["method"] == PLAIN]
    slower = [f"{where(row)}: {row['speedup']:.3f}x" for row in plain if row["speedup"] < SLOWEST_PLAIN]
    rule = f"Mark: plain decoding at least {SLOWEST_PLAIN} of transformers' `generate` in each cell"
    return [f"{rule}: {'not reached by ' + '; '.join(slower) if slower else 'reached'}."]


def drafter_mark(rows: Sequence[Row], mark: float) -> list[str]:
    """State whether the best ReDrafter reaches its mark, and the budget of its step."""
    marked = [row for row in rows if row["size"] == MARK_SIZE]
    drafted = [row for row in marked if row["kind"] == MARKED_KIND]
    rule = f"Mark: {MARKED_KIND} at least {mark}x at {MARK_SIZE}, in the machine's better type"
    if not drafted:
        return [f"{rule}: not measured."]
    # The better type is the one of the fastest plain decoding.
    plain = max((row for row in marked if row["method"] in (PLAIN, TRANSFORMERS)), key=lambda row: row["tokens_per_second"])
    place = plain["dtype"], plain["threads"]
    here = [row for row in marked if (row["dtype"], row["threads"]) == place]
    best = max((row for row in here if row["kind"] == MARKED_KIND), key=lambda row: row["speedup"])
    return [
        f"{rule}: {'reached' if best['speedup'] >= mark else 'NOT reached'}, {best['speedup']:.2f}x by {where(best)}.",
        budget(best, here),
    ]


def budget(row: Row, cell: Sequence[Row]) -> str:
    """Describe the milliseconds of a step, and what the speedup would be without some of them."""
    step, plain = row["milliseconds_per_step"], next(r for r in cell if r["method"] == PLAIN)["milliseconds_per_step"]
    plain_step, tau = sum(plain.values()), row["tokens_per_step"]
    parts = ", ".join(f"{name} {step[name]:.1f}" for name in PHASES)
    without_draft = tau * plain_step / (sum(step.values()) - step["draft"])
    return (
        f"Its step: {sum(step.values()):.1f} ms ({parts}) for {tau:.2f} tokens; a plain step: {plain_step:.1f} ms. Without the "
        f"prefill {tau * plain_step / sum(step.values()):.2f}x; if drafting cost nothing {without_draft:.2f}x; if a tree were "
        f"verified in the time of a plain step {row['ceiling']:.2f}x."
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw speedup over size: a panel for each type and number of threads, a line per method."""
    # 1. The panels.
    dtypes, threads = (list(dict.fromkeys(row[name] for row in rows)) for name in ("dtype", "threads"))
    with drawing(path, 4.6 * len(threads) + 0.6, 3.4 * len(dtypes) + 1.6) as figure:
        panels = figure.subplots(len(dtypes), len(threads), squeeze=False, sharex=True, sharey=True)
        for dtype, line in zip(dtypes, panels, strict=True):
            for count, axes in zip(threads, line, strict=True):
                here = [row for row in rows if (row["dtype"], row["threads"]) == (dtype, count)]
                draw_panel(axes, here)
                axes.set_title(f"{dtype}, {count_threads(count)}", loc="left")
        # 2. Axes and legend. A panel may lack methods that another one has.
        for axes in panels[-1]:
            axes.set_xlabel("parameters of the target")
        for axes in panels[:, 0]:
            axes.set_ylabel("speedup")
        figure.suptitle("Speedup over the faster plain decoding", x=0.01, ha="left", fontsize=11)
        handles = {text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8)


def draw_panel(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the methods of one type and number of threads, with the marks."""
    axes.set_xscale("log")
    axes.axhline(1.0, **PARITY_LINE)
    sizes = dict(sorted({row["parameters"]: row["size"] for row in rows}.items()))
    axes.set_xticks(list(sizes), list(sizes.values()), minor=False)
    axes.minorticks_off()
    marked = [row["parameters"] for row in rows if row["size"] == MARK_SIZE]
    for mark in (MARK, BF16_MARK) if marked else ():
        axes.plot([marked[0]], [mark], marker="_", markersize=22, color="0.35", linestyle="none")
        axes.annotate(f"mark {mark}x", (marked[0], mark), (0, 3), textcoords="offset points", ha="center", fontsize=7)
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name != PLAIN]
    colors = dict.fromkeys(row["method"].split(",")[0] for row in rows if row["kind"])
    colors = {name: f"C{index % 10}" for index, name in enumerate(colors)}  # matplotlib's ten colors
    seen: dict[str, int] = {}
    for name in names:
        line = sorted((row for row in rows if row["method"] == name), key=lambda row: row["parameters"])
        drafter = name.split(",")[0]
        order = seen[drafter] = seen.get(drafter, -1) + 1
        axes.plot(
            [row["parameters"] for row in line],
            [row["speedup"] for row in line],
            label=name,
            color=colors.get(drafter, "0.55" if name == LOOKUP else "0.75"),
            linestyle=("-", "--", ":")[min(order, 2)],
            marker="os^"[min(order, 2)],
            markersize=4,
            linewidth=1.2,
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.6)
