"""Figures of the size study: its rows, summary, marks, budget, plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter_settings import DrafterSetting
from transformers_methods import LOOKUP, PLAIN, TRANSFORMERS

from outrider.eval.records.names import BASELINE
from outrider.eval.results import marks
from outrider.eval.results.attempts import MAX_RATIO
from outrider.eval.results.plots import PARITY_LINE, drawing
from outrider.eval.results.rows import Row, fault, is_broken

MARK_SIZE, MARK, BF16_MARK = "400M", 1.5, 2.0
"""ReDrafter must be so many times as fast as plain decoding at this size; the second number is for
processors with bf16 matrix instructions."""
MARKED_KIND = "redrafter"
SLOWEST_PLAIN = 0.98
"""Least speed of our plain decoding, over transformers' `generate`."""
PHASES = ("draft", "verify", "accept", "rest")
SizeRow = dict[str, Any]


def rows_of(measured: Sequence[Row], cell: Mapping[str, Any], drafters: Mapping[str, DrafterSetting]) -> list[SizeRow]:
    """Build the study's rows of a cell from the rows of its evaluation.

    `cell` has the values that all rows share. `drafters` are by the method's key. Evaluation's
    speedups are over our plain decoding. Where transformers' is faster, they are divided by its
    speedup, and its disturbed answers count for all rows.
    """
    # 1. The faster plain decoding.
    by_key = {row["method"]: row for row in measured}
    transformers = by_key[TRANSFORMERS]
    is_ours = (transformers["speedup"] or 0.0) <= 1
    factors = {
        name: value if not is_ours and (value := transformers.get(name)) else 1.0 for name in ("speedup", "processor_speedup")
    }
    # 2. A row for each method, those without a drafter first.
    rows = []
    for key in (BASELINE, TRANSFORMERS, LOOKUP, *drafters):
        row, drafter = by_key[key], drafters.get(key)
        speedup, interval, processor = row["speedup"], row["speedup_ci95"], row.get("processor_speedup")
        rows.append(
            {
                **cell,
                "method": PLAIN if key == BASELINE else drafter.name if drafter else key,
                "kind": drafter.kind if drafter else None,
                "baseline": PLAIN if is_ours else TRANSFORMERS,
                "tokens_per_step": row["tokens_per_step"],
                "tokens_per_second": row["tokens_per_second"],
                "speedup": speedup and speedup / factors["speedup"],
                "speedup_ci95": interval and [end / factors["speedup"] for end in interval],
                "processor_speedup": processor and processor / factors["processor_speedup"],
                "exceeds": row.get("exceeds", ""),
                "disturbed": row.get("disturbed", []) or ([] if is_ours else transformers.get("disturbed", [])),
                "num_repeated": row.get("num_repeated", 0),
                "num_prompts": row["num_prompts"],
                "num_identical": row["num_prompts"] - row["num_mismatched_prompts"],
                "fault": fault(row) if is_broken(row) else "",
                "milliseconds_per_step": phase_milliseconds(row),
                "ceiling": row["ceiling"],
            }
        )
    return rows


def phase_milliseconds(row: Row) -> dict[str, float] | None:
    """Compute the milliseconds of a step by phase, without the prefill; None for transformers."""
    if row["time_split"] is None or row["tokens_per_step"] is None or row["decode_tokens_per_second"] is None:
        return None
    step = 1e3 * row["tokens_per_step"] / row["decode_tokens_per_second"]
    return {name: step * row["time_split"][name] for name in PHASES}


def count_threads(number: int) -> str:
    return f"{number} thread" + "s" * (number != 1)


def speedup_text(row: SizeRow) -> str:
    """Format a speedup with its marks; a fault or an error of measurement has no speed."""
    if row["speedup"] is None:
        return row["fault"] or "-"
    interval = "" if row["speedup_ci95"] is None else " [{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
    return "error" if marks.is_error(row) else ", ".join([f"{row['speedup']:.2f}x{interval}", *marks.marks(row)])


def has_speed(row: SizeRow) -> bool:
    return row["speedup"] is not None and not marks.is_error(row)


def summary(rows: Sequence[SizeRow]) -> str:
    """Format the speedups over size, a table for each type and number of threads."""
    tables = []
    for dtype, threads in dict.fromkeys((row["dtype"], row["threads"]) for row in rows):
        panel = [row for row in rows if (row["dtype"], row["threads"]) == (dtype, threads)]
        sizes = list(dict.fromkeys(row["size"] for row in panel))
        head = f"| {dtype}, {count_threads(threads)} | tokens per step | {' | '.join(sizes)} |"
        lines = [head, "|---|" + "---:|" * (1 + len(sizes))]
        for name in dict.fromkeys(row["method"] for row in panel):
            of_method = {row["size"]: row for row in panel if row["method"] == name}
            steps = next((f"{row['tokens_per_step']:.2f}" for row in of_method.values() if row["tokens_per_step"]), "-")
            speedups = [speedup_text(of_method[size]) if size in of_method else "-" for size in sizes]
            lines.append(f"| {name} | {steps} | {' | '.join(speedups)} |")
        fastest = {row["size"]: row["tokens_per_second"] for row in panel if row["method"] == row["baseline"]}
        lines.append("| tokens/s of the faster plain one | - | " + " | ".join(f"{fastest[size]:.1f}" for size in sizes) + " |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def notes(rows: Sequence[SizeRow], *, has_bf16_matrices: bool) -> list[str]:
    """List the notes below the summary: what speedup means, doubts, and the marks."""
    lines = ["Speedup is over the faster plain decoding of the cell: ours or transformers' `generate`."]
    if repeated := sum(row["num_repeated"] for row in rows if row["method"] != PLAIN):
        lines.append(f"{repeated} answers were decoded again beside plain decoding's, since one of each pair was disturbed.")
    lines += [f"No speedup for {described(row)}: it is {row['fault']}." for row in rows if row["fault"]]
    lines += [
        f"No speedup for {described(row)}: it would exceed its {row['tokens_per_step']:.2f} tokens per step, so plain "
        "decoding's time is wrong. Measure again into another folder, while the machine is quiet."
        for row in rows
        if marks.is_error(row)
    ]
    if any(marks.is_disturbed(row) for row in rows):
        rule = f"Disturbed: an answer, or plain decoding's beside it, took over {MAX_RATIO:g} times its usual time"
        lines.append(f"{rule}. The same command measures only these answers again.")
    return lines + plain_marks(rows) + drafter_mark(rows, BF16_MARK if has_bf16_matrices else MARK)


def described(row: SizeRow) -> str:
    return f"{row['method']} ({row['size']}, {row['dtype']}, {count_threads(row['threads'])})"


def plain_marks(rows: Sequence[SizeRow]) -> list[str]:
    """State for our plain decoding whether it is slower than transformers' anywhere."""
    plain = [row for row in rows if row["method"] == PLAIN and row["speedup"] is not None]
    slower = [f"{described(row)}: {row['speedup']:.3f}x" for row in plain if row["speedup"] < SLOWEST_PLAIN]
    rule = f"Mark: plain decoding at least {SLOWEST_PLAIN} of transformers' `generate` in each cell"
    return [f"{rule}: {'not reached by ' + '; '.join(slower) if slower else 'reached'}."]


def drafter_mark(rows: Sequence[SizeRow], mark: float) -> list[str]:
    """State whether the best ReDrafter reaches its mark, and the budget of its step."""
    marked = [row for row in rows if row["size"] == MARK_SIZE and has_speed(row)]
    rule = f"Mark: {MARKED_KIND} at least {mark}x at {MARK_SIZE}, in the machine's better type"
    if not any(row["kind"] == MARKED_KIND for row in marked):
        return [f"{rule}: not measured."]
    # The better type is the one of the fastest plain decoding.
    plain = max((row for row in marked if row["method"] in (PLAIN, TRANSFORMERS)), key=lambda row: row["tokens_per_second"])
    cell = [row for row in marked if (row["dtype"], row["threads"]) == (plain["dtype"], plain["threads"])]
    best = max((row for row in cell if row["kind"] == MARKED_KIND), key=lambda row: row["speedup"], default=None)
    if best is None:
        return [f"{rule}: not measured."]
    verdict = "reached" if best["speedup"] >= mark else "NOT reached"
    return [f"{rule}: {verdict}, {speedup_text(best)} by {described(best)}.", budget(best, cell)]


def budget(row: SizeRow, cell: Sequence[SizeRow]) -> str:
    """Describe the milliseconds of a step, and what the speedup would be without some of them."""
    step, plain = row["milliseconds_per_step"], next(r for r in cell if r["method"] == PLAIN)["milliseconds_per_step"]
    if step is None or plain is None:
        return "Its step has no time split, because it wasn't profiled."
    plain_step, tau = sum(plain.values()), row["tokens_per_step"]
    parts = ", ".join(f"{name} {step[name]:.1f}" for name in PHASES)
    without_draft = tau * plain_step / (sum(step.values()) - step["draft"])
    return (
        f"Its step: {sum(step.values()):.1f} ms ({parts}) for {tau:.2f} tokens; a plain step: {plain_step:.1f} ms. Without the "
        f"prefill {tau * plain_step / sum(step.values()):.2f}x; if drafting cost nothing {without_draft:.2f}x; if a tree were "
        f"verified in the time of a plain step {row['ceiling']:.2f}x."
    )


def plot(rows: Sequence[SizeRow], path: Path) -> None:
    """Draw speedup over size: a panel for each type and number of threads, a line per method."""
    # 1. The panels.
    dtypes, threads = (list(dict.fromkeys(row[name] for row in rows)) for name in ("dtype", "threads"))
    with drawing(path, 4.6 * len(threads) + 0.6, 3.4 * len(dtypes) + 1.6) as figure:
        panels = figure.subplots(len(dtypes), len(threads), squeeze=False, sharex=True, sharey=True)
        for dtype, line in zip(dtypes, panels, strict=True):
            for count, axes in zip(threads, line, strict=True):
                panel = [row for row in rows if (row["dtype"], row["threads"]) == (dtype, count)]
                draw_panel(axes, panel)
                axes.set_title(f"{dtype}, {count_threads(count)}", loc="left")
        # 2. Axes and legend. A panel may lack methods that another one has.
        for axes in panels[-1]:
            axes.set_xlabel("parameters of the target")
        for axes in panels[:, 0]:
            axes.set_ylabel("speedup")
        figure.suptitle("Speedup over the faster plain decoding", x=0.01, ha="left", fontsize=11)
        handles = {text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8)


def draw_panel(axes: Any, rows: Sequence[SizeRow]) -> None:
    """Draw the methods of one type and number of threads, with the marks."""
    # 1. Axes: the sizes that were measured, and the marks.
    axes.set_xscale("log")
    axes.axhline(1.0, **PARITY_LINE)
    sizes = dict(sorted({row["parameters"]: row["size"] for row in rows}.items()))
    axes.set_xticks(list(sizes), list(sizes.values()), minor=False)
    axes.minorticks_off()
    marked = [row["parameters"] for row in rows if row["size"] == MARK_SIZE]
    for mark in (MARK, BF16_MARK) if marked else ():
        axes.plot([marked[0]], [mark], marker="_", markersize=22, color="0.35", linestyle="none")
        axes.annotate(f"mark {mark}x", (marked[0], mark), (0, 3), textcoords="offset points", ha="center", fontsize=7)
    # 2. A line for each method, a color for each drafter. A speed that isn't valid has no point.
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name != PLAIN]
    colors = dict.fromkeys(row["method"].split(",")[0] for row in rows if row["kind"])
    colors = {name: f"C{index % 10}" for index, name in enumerate(colors)}  # matplotlib's ten colors
    seen: dict[str, int] = {}
    for name in names:
        line = sorted((row for row in rows if row["method"] == name and has_speed(row)), key=lambda row: row["parameters"])
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
    # 3. Circles around disturbed speeds.
    disturbed = [row for row in rows if marks.is_disturbed(row) and has_speed(row)]
    if disturbed:
        points = [row["parameters"] for row in disturbed], [row["speedup"] for row in disturbed]
        axes.plot(*points, label=marks.DISTURBED, marker="o", markersize=9, fillstyle="none", color="0.2", linestyle="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", linewidth=0.6)
