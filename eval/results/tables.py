"""Table of an evaluation, for the terminal and as Markdown."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..records.names import BASELINE, OOM
from .lossless import LOSSY
from .rows import Row, decoding_name, is_broken, is_lossy, is_unproven, loop_share, method_name

RESULT_COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Ceiling", "Lossless")
COST_COLUMNS = ("Params", "Trained s", "Draft ms", "Draft", "Verify", "Accept", "Rest", "Of roofline")
FEW_UNITS = 8
"""Number of prompts or batches below which a bootstrap interval means little."""
NUM_OUTLIERS_NAMED = 3
LOOP_SHARE = 0.1
"""Smallest share of answers with loops at which a note warns about them."""
METHOD_WIDTH = 23
"""Width of a method's name on the narrowest terminal, in characters."""
LOSSLESS_WIDTH = 10
BUFFER = "that size, at most 1 GiB (4 GiB on an accelerator)"
"""Description of the buffer that bandwidth is measured on (`roofline.measure_bandwidth`)."""
BY_RULE_NOTE = (
    "by rule: the method samples its draft tokens at random, so its answers differ from those of plain decoding. Its "
    "acceptance rule preserves the target's distribution. The command outrider certify tests this."
)


def cells(row: Row) -> dict[str, str]:
    """Format a row's cells by column; "-" where there is no number."""
    interval, split, training = row["speedup_ci95"], row["time_split"] or {}, row["training"]
    draft_seconds = row["draft_seconds_per_step"]
    if row["out_of_memory"]:
        return {**dict.fromkeys((*RESULT_COLUMNS, *COST_COLUMNS), "-"), "Tok/s": OOM, "Speedup [95 %]": OOM}
    shown = {
        "Tok/step": _number(row["tokens_per_step"], ".2f"),
        "Tok/s": _number(row["tokens_per_second"], ".1f"),
        "Speedup [95 %]": _number(row["speedup"], ".2f", "x"),
        "Ceiling": _number(row["ceiling"], ".2f", "x"),
        "Lossless": row["lossless_label"],
        "Params": "-" if row["parameters"] is None else _count(row["parameters"]),
        "Trained s": _number(training["seconds"] if training else None, ".0f"),
        "Draft ms": _number(None if draft_seconds is None else 1e3 * draft_seconds, ".2f"),
        **{phase.capitalize(): _number(split.get(phase), ".0%") for phase in ("draft", "verify", "accept", "rest")},
        "Of roofline": _number(row["roofline_fraction"], ".0%"),
    }
    if interval:
        shown["Speedup [95 %]"] += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return shown


def headline(rows: Sequence[Row]) -> str:
    """Summarize the result in one sentence.

    It names the method with the highest speedup, as the geometric mean over the row groups.
    """
    # 1. The lossless methods that have a speedup in every group.
    groups = _groups(rows)
    speedups: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] != BASELINE and row["speedup"] is not None and not is_lossy(row):
            speedups.setdefault(method_name(row), []).append(row)
    complete = {name: of_method for name, of_method in speedups.items() if len(of_method) == len(groups)}
    if not complete:
        return "No lossless method has a speedup everywhere; the table shows the reasons."
    # 2. A sentence about the fastest of them.
    name, best = max(complete.items(), key=lambda item: geometric_mean([row["speedup"] or 0.0 for row in item[1]]))
    if len(best) == 1:
        (row,) = best
        (group,) = groups
        steps = _number(row["tokens_per_step"], ".2f")
        low, high = row["speedup_ci95"] or (0.0, 0.0)
        doubt = f" The interval [{low:.2f}, {high:.2f}] includes 1, so this may be chance." if low <= 1 <= high else ""
        return f"{_verdict([row])} on {group}: {name}. {row['speedup']:.2f}x plain decoding, {steps} tokens per step.{doubt}"
    values = [row["speedup"] or 0.0 for row in best]
    return f"{_verdict(best)} over {len(groups)} groups: {name}. {min(values):.2f}x to {max(values):.2f}x plain decoding."


def _verdict(rows: Sequence[Row]) -> str:
    is_faster = geometric_mean([row["speedup"] or 0.0 for row in rows]) > 1
    return "Fastest" if is_faster else "No method is faster than plain decoding; the best"


def footnotes(rows: Sequence[Row], *, costs: bool = True) -> list[str]:
    """Render the notes that explain the table.

    They are the lines of `templates/footnotes.jinja`. Without `costs` the notes on COST_COLUMNS are
    left out.
    """
    loader = PackageLoader("outrider.eval", "templates")
    # `finalize` keeps each note on one line, even if a name contains a line break.
    environment = Environment(loader=loader, undefined=StrictUndefined, finalize=lambda value: " ".join(str(value).split()))

    # Render all values that the template needs.
    measured = [row for row in rows if not row["out_of_memory"]]
    text = environment.get_template("footnotes.jinja").render(
        first=rows[0],
        costs=costs,
        batch_sizes=dict.fromkeys(row["batch_size"] for row in rows),
        rows=measured,
        groups=_groups(measured),
        left_out=_groups([row for row in rows if row["out_of_memory"]]),
        outliers=_worst_outliers(measured),
        num_outliers=sum(len(row["outliers"]) for row in measured),
        num_outliers_named=NUM_OUTLIERS_NAMED,
        looping=max((row for row in measured if loop_share(row) >= LOOP_SHARE), key=loop_share, default=None),
        baseline=BASELINE,
        oom=OOM,
        lossy=LOSSY,
        by_rule=BY_RULE_NOTE,
        loop_note=loop_note,
        buffer=BUFFER,
        too_few=too_few,
        method_name=method_name,
        decoding_name=decoding_name,
        is_broken=is_broken,
        is_unproven=is_unproven,
    )
    return [line for line in text.splitlines() if line]


def loop_note(row: Row) -> str:
    """Describe the row's answers that end in a loop, and how they distort the figures."""
    return (
        f"Loops: {row.get('num_loops', 0)} of {row['num_turns'] * row['num_repeats']} answers of {method_name(row)} on "
        f"{row['suite']} ({decoding_name(row)}) end in a short cycle of tokens ({loop_share(row):.0%}). Loops are "
        "easy to draft, so tokens per step and speedup mean little for such answers."
    )


def _worst_outliers(rows: Sequence[Row]) -> list[tuple[Row, dict[str, Any]]]:
    """Select the worst outliers, relative to their method's median."""
    outliers = [(row, outlier) for row in rows for outlier in row["outliers"]]
    return sorted(outliers, key=lambda pair: -pair[1]["ratio"])[:NUM_OUTLIERS_NAMED]


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown, on one line.

    Underscores within a word stay, since Markdown gives them no meaning there.
    """
    text = re.sub(r"[\\`*|<>&$~]", r"\\\g<0>", " ".join(text.split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def texts(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, str]]:
    """Format the table's lines: for each row its suite, setting, method and cells, by column."""
    return [
        {
            "Suite": row["suite"],
            "Temperature": f"{row['temperature']:g}",
            "Batch": str(row["batch_size"]),
            "Method": method_name(row),
            **{column: cells(row)[column] for column in columns},
        }
        for row in rows
    ]


def markdown_table(lines: Sequence[Mapping[str, str]], left: Collection[str]) -> str:
    """Format lines of texts by column as a Markdown table.

    All columns except those of `left` are aligned to the right.
    """
    table: list[Iterable[str]] = [map(escape_markdown, lines[0]), ("---" if name in left else "---:" for name in lines[0])]
    table += [map(escape_markdown, line.values()) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def markdown(rows: Sequence[Row]) -> str:
    """Format the table and its notes as a Markdown page."""
    table = markdown_table(texts(rows, (*RESULT_COLUMNS, *COST_COLUMNS)), left=("Suite", "Method"))
    notes = "\n".join(f"- {escape_markdown(note)}" for note in footnotes(rows))
    return f"{table}\n\n{notes}\n"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the headline, the results and the notes.

    A method that should be lossless but isn't is red.
    """
    console = console or Console()
    console.print(Text(headline(rows), style="bold"))
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("Method", min_width=METHOD_WIDTH)
    for column in RESULT_COLUMNS:
        is_words = column == "Lossless"
        table.add_column(column, justify="right", no_wrap=not is_words, max_width=LOSSLESS_WIDTH if is_words else None)
    for group, of_group in _groups(rows).items():
        table.add_row(Text(group), style="bold")
        for row in of_group:
            shown = (Text(text) for text in (_in_lines(method_name(row)), *(cells(row)[column] for column in RESULT_COLUMNS)))
            table.add_row(*shown, style="red" if is_broken(row) else None)
        table.add_section()
    console.print(table)
    for note in footnotes(rows, costs=False):
        console.print(Padding(Text(note), (0, 0, 0, 2)), style="dim")


def _in_lines(name: str) -> str:
    """Put the setting of a long name on a line of its own."""
    return name if len(name) <= METHOD_WIDTH else re.sub(r", (?![^(]*\))", ",\n", name, count=1)


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows by suite, temperature and batch size, under displayed names."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['suite']}, {decoding_name(row)}", []).append(row)
    return groups


def too_few(num_units: int) -> str:
    """Format a warning about an interval over few prompts or batches; empty for enough of them."""
    return ", too few for a reliable interval" if num_units < FEW_UNITS else ""


def _count(number: int) -> str:
    """Shorten a number to about three digits: 850, 1.4M, 12.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
