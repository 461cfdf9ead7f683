"""Tables of the pipeline bench. Every table names its clock."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pipeline_conditions import Condition, Unpadded, predicted
from pipeline_methods import (
    ABLATIONS,
    MICRO_BATCHES,
    PAPER,
    PAPER_CUTOFF,
    PIPELINED,
    PLAIN,
    USUAL_LENGTH,
    Row,
    best_synchronous,
    synchronous,
)

Rows = Mapping[str, Row]
Cells = Mapping[str, Rows]
"""The rows of each condition, by its name."""
RESAMPLES, INTERVAL, LEAST_TEXTS = 2000, (2.5, 97.5), 2
SWEEPS = ("acceptance", "stages", "hop", "entry", "draft", "head", "spread")
DETAILED = ("acceptance", "stages")
"""Sweeps whose details have a table."""
TITLES = {
    "acceptance": "acceptance",
    "stages": "stages of 160 ms",
    "hop": "hop latency",
    "entry": "further entry costs",
    "draft": "draft pass",
    "head": "head, per answer",
    "spread": "spread of q",
}


def ratio(row: Row, base: Row) -> float:
    """Return the speed of a method over another one."""
    return float(row["tokens_per_second"] / base["tokens_per_second"])


def interval(row: Row, base: Row) -> list[float]:
    """Return the 95 % interval of the speed over another method, over texts: a bootstrap."""
    seconds, base_seconds = np.array(row["text_seconds"]), np.array(base["text_seconds"])
    chosen = np.random.default_rng(0).integers(len(seconds), size=(RESAMPLES, len(seconds)))
    ratios = base_seconds[chosen].sum(1) / seconds[chosen].sum(1)
    return [float(end) for end in np.percentile(ratios, INTERVAL)]


def text(row: Row, base: Row) -> str:
    """Format a speed over another method, with its interval if there are several texts."""
    ends = "-" if len(row["text_seconds"]) < LEAST_TEXTS else ", ".join(f"{end:.2f}" for end in interval(row, base))
    return f"{ratio(row, base):.2f}x [{ends}]"


def of_sweep(cells: Cells, sweep: str) -> dict[str, Rows]:
    """Return the conditions of a sweep, by their values."""
    beginning = f"{sweep} "
    return {name.removeprefix(beginning): rows for name, rows in cells.items() if name.startswith(beginning)}


def sweep_tables(cells: Cells) -> list[str]:
    """Format a table for each sweep, and one for the other conditions."""
    tables = [speed_table(TITLES[sweep], rows) for sweep in SWEEPS if (rows := of_sweep(cells, sweep))]
    others = {name: rows for name, rows in cells.items() if name.partition(" ")[0] not in SWEEPS}
    return [*tables, *([speed_table("condition", others)] if others else [])]


def speed_table(title: str, cells: Cells) -> str:
    """Format tokens per second of all methods, and the speed of pipelined speculation over them."""
    note = f"Tokens per second, {clock_of(cells)}.\nRight: ours over plain (p), K=4, best K."
    columns = [title, "plain", "K=4", "best K", "ours", "/p", "/K=4", "/best"]
    body = []
    for name, rows in cells.items():
        best, ours = best_synchronous(rows), rows[PIPELINED]
        fixed = rows[synchronous(USUAL_LENGTH)]
        speeds = [number(rows[PLAIN]), number(fixed), f"{number(best)} ({best['num_drafts']})", number(ours)]
        body.append([name, *speeds, *(f"{ratio(ours, row):.2f}" for row in (rows[PLAIN], fixed, best))])
    return f"{note}\n\n{table(columns, body)}"


def paper_table(cells: Cells) -> str:
    """Format the speed of the paper's rule beside the other methods."""
    columns = ["condition", "paper's rule", "/p", "/K=4", "/best K", "ours over it"]
    body = []
    for name, rows in of_detail(cells).items():
        paper, bases = rows[PAPER], (rows[PLAIN], rows[synchronous(USUAL_LENGTH)], best_synchronous(rows))
        ratios = [f"{ratio(paper, base):.2f}" for base in bases]
        body.append([name, f"{number(paper)} ({paper['micro_batch']})", *ratios, f"{ratio(rows[PIPELINED], paper):.2f}"])
    note = (
        f"PipeInfer's own rule with a cutoff of {PAPER_CUTOFF:g}, tokens per second,\n"
        f"{clock_of(cells)}. In brackets: its best number of draft tokens in a run, of\n"
        f"{', '.join(map(str, MICRO_BATCHES))}, chosen in hindsight. Over plain (p), K=4 and the best K."
    )
    return f"{note}\n\n{table(columns, body)}"


def of_detail(cells: Cells) -> dict[str, Rows]:
    """Return the conditions whose details have a table."""
    return {name: rows for name, rows in cells.items() if name.startswith(DETAILED) or name.partition(" ")[0] not in SWEEPS}


def formula_table(cells: Mapping[str, tuple[Condition, Rows]]) -> str:
    """Format the simulator's speeds over plain decoding beside the formula's."""
    columns = ["acceptance", "K=4", "formula", "best K", "formula", "ours", "formula"]
    body = []
    for name, (condition, rows) in cells.items():
        expected, plain = predicted(condition), rows[PLAIN]
        pairs = [
            (rows[synchronous(USUAL_LENGTH)], expected.synchronous),
            (best_synchronous(rows), expected.best),
            (rows[PIPELINED], expected.pipelined),
        ]
        values = [word for row, speed in pairs for word in (f"{ratio(row, plain):.2f}", f"{speed / expected.plain:.2f}")]
        body.append([name.removeprefix("acceptance "), *values])
    return f"Speed over plain decoding, virtual time and the formula.\n\n{table(columns, body)}"


def ablation_table(cells: Cells) -> str:
    """Format the speed of each ablation over that of the whole."""
    columns = ["without a part (virtual time)", *(f"{name}" for name in cells)]
    body = [["pipelined, tokens/s", *(number(rows[PIPELINED]) for rows in cells.values())]]
    names = [name for name in ABLATIONS if any(name in rows for rows in cells.values())]
    body += [[name, *(over_whole(rows, name) for rows in cells.values())] for name in names]
    return table(columns, body)


def over_whole(rows: Rows, name: str) -> str:
    return f"{ratio(rows[name], rows[PIPELINED]):.2f}x" if name in rows else "-"


def details_table(cells: Cells) -> str:
    """Format what pipelined speculation does: latencies, and the use of the stages."""
    columns = ["condition", "first", "gap", "p95", "busy", "K=4", "saved", "KB/token"]
    body = []
    for name, rows in of_detail(cells).items():
        ours, fixed = rows[PIPELINED], rows[synchronous(USUAL_LENGTH)]
        milliseconds = [f"{1e3 * ours[key]:.0f} ms" for key in ("first_seconds", "gap_median_seconds", "gap_p95_seconds")]
        shares = [percent(ours["utilisation"]), percent(fixed["utilisation"]), percent(ours["saved_share"])]
        body.append([name, *milliseconds, *shares, f"{ours['hop_bytes_per_token'] / 1e3:.0f}"])
    note = (
        f"Pipelined, {clock_of(cells)}. First: the token after the prompt's own. Gap:\n"
        "between tokens, median. Busy: stages, beside those of K=4. Saved: cancelled\n"
        "work that wasn't done. KB/token: over each hop."
    )
    return f"{note}\n\n{table(columns, body)}"


def agreement(cells: Cells) -> list[dict[str, Any]]:
    """Return the speed of processes over that of the simulator: for each condition and method."""
    return [
        {
            "condition": condition,
            "method": method,
            "tokens_per_second": row["tokens_per_second"],
            "simulated": row["simulated"]["tokens_per_second"],
            "ratio": row["over_simulated"],
            "over_plain": ratio(row, rows[PLAIN]),
            "num_identical": row["num_identical"],
            "num_texts": row["num_texts"],
        }
        for condition, rows in cells.items()
        for method, row in rows.items()
    ]


def agreement_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Format the speeds of processes beside those of the simulator."""
    columns = ["condition", "method", "real", "simulator", "ratio", "identical"]
    body = [
        [
            point["condition"],
            point["method"].replace("synchronous ", "K = "),
            f"{point['tokens_per_second']:.2f}",
            f"{point['simulated']:.2f}",
            f"{point['ratio']:.3f}",
            f"{point['num_identical']} of {point['num_texts']}",
        ]
        for point in points
    ]
    note = (
        "Tokens per second: emulated stages by the wall clock, and virtual time. The\n"
        "simulator takes the head's seconds for an answer from the same real runs."
    )
    return f"{note}\n\n{table(columns, body)}"


def real_table(cells: Mapping[Unpadded, Rows]) -> str:
    """Format the speeds of real processes, over plain decoding by the same processes."""
    columns = ["stages", "method", "tokens/s", "over plain", "identical"]
    body = []
    for condition, rows in cells.items():
        for name, row in rows.items():
            identical = f"{row['num_identical']} of {row['num_texts']}"
            body.append([str(condition.num_stages), name, number(row), text(row, rows[PLAIN]), identical])
    size = next(iter(cells))
    note = (
        f"{clock_of({str(condition): rows for condition, rows in cells.items()}).capitalize()}. Nothing is emulated.\n"
        f"{size.target}, float32, and a draft model;\n"
        f"{size.num_texts} prompts about code, {size.new_tokens} tokens each; {os.cpu_count()} cores, one thread a process."
    )
    return f"{note}\n\n{table(columns, body)}"


def clock_of(cells: Cells) -> str:
    """Return the clock of all rows. Raises ValueError if rows have different ones."""
    clocks = {row["clock"] for rows in cells.values() for row in rows.values()}
    if len(clocks) != 1:
        raise ValueError(f"one table has rows of {len(clocks)} clocks: {', '.join(sorted(clocks))}; make a table for each")
    return next(iter(clocks))


def table(columns: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Format a table whose columns are padded: the first to the left, others to the right."""
    rows = [list(columns), *(list(row) for row in body)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    pad: Callable[[int, str], str] = lambda index, word: word.rjust(widths[index]) if index else word.ljust(widths[0])  # noqa: E731
    lines = [f"| {' | '.join(pad(index, word) for index, word in enumerate(row))} |" for row in rows]
    rule = "|".join("-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def number(row: Row) -> str:
    return f"{row['tokens_per_second']:.1f}"


def percent(share: Any) -> str:
    return "-" if share is None else f"{share:.0%}"
