"""Tables of an evaluation: one frame of texts, as Markdown and for the terminal, and its numbers as CSV."""

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..records.names import OOM, TABLE_FILE
from .markdown import Markdown, escape_markdown
from .notes import headline, measured_notes, notes, problems
from .rows import Row, group_name, is_broken, speedup_text

if TYPE_CHECKING:
    from ...models.export.package import CertificateLine

READ_COLUMN = "GB/tok"
"""Column of tables with a memory budget: gigabytes of weights read from files per token."""
PHASES = ("draft", "verify", "accept", "rest")
CSV_COLUMNS = (
    *("suite", "temperature", "batch_size", "method", "label", "num_prompts", "num_turns", "num_repeats", "num_batches"),
    *("num_skipped", "num_truncated", "num_tokens", "tokens_per_step", "mean_accepted", "draft_tokens_per_step"),
    *("tokens_per_second", "decode_tokens_per_second", "speedup", "median_speedup", "num_faster", "num_compared", "noisy"),
    *("processor_seconds_per_token", "processor_speedup", "rho", "ceiling", "draft_seconds_per_step", "read_gb_per_token"),
    *("parameters", "roofline_fraction", "lossless_label", "num_mismatched_prompts", "num_within_noise", "dtype"),
    *("max_new_tokens", "pace", "pipelined", "prompt_set_revision", "prompt_set_source", "out_of_memory"),
)
"""Fields of a row under their names; those of `_spread` follow them."""
MAX_WIDTH, MAX_NOTE_LINES = 80, 10
TERMINAL_COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Identical", READ_COLUMN)
"""Columns of the frame that have room; the file of the table has all."""
WIDTHS = {"Speedup [95 %]": (21, 21), "Identical": (9, 10)}
"""Smallest and largest width of columns with words, in characters; longer texts take several
lines."""
METHOD_WIDTH = 25
"""Width of a method's name beside the widest figures, in characters; longer names take several
lines."""
READ_WIDTH = 8
"""Width that the column of bytes read takes from it."""


def frame(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Format all rows as texts by column; "-" stands where there is no number."""
    has_budget = rows[0]["budget"] is not None
    return [
        {
            "Suite": row["suite"],
            "Temperature": f"{row['temperature']:g}",
            "Batch": str(row["batch_size"]),
            "Method": row["label"],
            **{column: text for column, text in cells(row).items() if has_budget or column != READ_COLUMN},
        }
        for row in rows
    ]


def cells(row: Row) -> dict[str, str]:
    """Format a row's cells by column."""
    split, training, draft_seconds = row["time_split"] or {}, row["training"], row["draft_seconds_per_step"]
    processor_seconds, speed_format = row["processor_seconds_per_token"], ".3g" if row["budget"] else ".1f"
    none = OOM if row["out_of_memory"] else "-"
    return {
        "Tok/step": _number(row["tokens_per_step"], ".2f"),
        "Tok/s": none if row["tokens_per_second"] is None else _number(row["tokens_per_second"], speed_format),
        "Speedup [95 %]": none if row["speedup"] is None else speedup_text(row),
        "Ceiling": _number(row["ceiling"], ".2f", "x"),
        "Identical": row["lossless_label"],
        READ_COLUMN: _number(row["read_gb_per_token"], ".3g"),
        "Median": _number(row["median_speedup"], ".2f", "x"),
        "Faster on": f"{row['num_faster']} of {row['num_compared']}" if row["num_compared"] else "-",
        "CPU ms/tok": _number(None if processor_seconds is None else 1e3 * processor_seconds, ".2f"),
        "CPU speedup": _number(row["processor_speedup"], ".2f", "x"),
        "Params": "-" if row["parameters"] is None else _count(row["parameters"]),
        "Trained s": _number(training["seconds"] if training else None, ".0f"),
        "Draft ms": _number(None if draft_seconds is None else 1e3 * draft_seconds, ".2f"),
        **{phase.capitalize(): _number(split.get(phase), ".0%") for phase in PHASES},
        "Of roofline": _number(row["roofline_fraction"], ".0%"),
    }


def certificate_cells(line: "CertificateLine") -> dict[str, str]:
    """Format a line of a certificate by column."""
    verdict = "pass" if line.passed else "FAIL"
    return {"What": line.subject, "How": line.method, "Cases": str(line.num_cases), "Result": line.result, "Verdict": verdict}


def markdown_table(lines: Sequence[Mapping[str, str]], left: Collection[str]) -> Markdown:
    """Format lines of texts by column as a Markdown table.

    All columns except those of `left` are aligned to the right.
    """
    table: list[Iterable[str]] = [map(escape_markdown, lines[0]), ("---" if name in left else "---:" for name in lines[0])]
    table += [map(escape_markdown, line.values()) for line in lines]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in table))


def markdown(rows: Sequence[Row]) -> str:
    """Format the headline, the table and its notes as a Markdown page."""
    table = markdown_table(frame(rows), left=("Suite", "Method"))
    lines = "\n".join(f"- {escape_markdown(note)}" for note in notes(rows))
    return f"**{escape_markdown(headline(rows))}**\n\n{table}\n\n{lines}\n"


def csv_table(rows: Sequence[Row]) -> str:
    """Format a line for each row, with the numbers of the summary.

    A number that doesn't exist is an empty cell.
    """
    import pandas as pd  # slow to import

    lines = [{**row, **_spread(row)} for row in rows]
    spread = dict.fromkeys(name for row in rows for name in _spread(row))
    # As objects, integers beside empty cells stay integers.
    table = pd.DataFrame(lines, columns=[*CSV_COLUMNS, *spread], dtype=object)
    return str(table.to_csv(index=False, lineterminator="\n"))


def _spread(row: Row) -> dict[str, Any]:
    """Split a row's grouped values into one column each."""
    low, high = row["speedup_ci95"] or (None, None)
    split, training = row["time_split"] or {}, row["training"] or {}
    return {
        "speedup_ci95_low": low,
        "speedup_ci95_high": high,
        **{f"time_{phase}": split.get(phase) for phase in PHASES},
        "training_seconds": training.get("seconds"),
        **(row["runs"] or {}),
        **{f"accepted_by_{name}": count for name, count in (row["accepted_by"] or {}).items()},
    }


def _count(number: int) -> str:
    """Shorten a number to about three digits: 850, 1.4M, 12.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the headline, the results and a few notes.

    A method that should be lossless but isn't is red, and so is a noisy speedup.
    """
    console = console or Console()
    console.print(Text(headline(rows), style="bold"))
    # A narrower terminal wraps the lines, but loses no column.
    is_narrow = console.width < MAX_WIDTH
    width = MAX_WIDTH if is_narrow else None
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True, width=width)
    lines = frame(rows)
    columns = [column for column in TERMINAL_COLUMNS if column in lines[0]]
    method_width = METHOD_WIDTH - READ_WIDTH * (READ_COLUMN in columns)
    table.add_column("Method", min_width=method_width, overflow="fold")
    for column in columns:
        narrow, wide = WIDTHS.get(column, (None, None))
        table.add_column(column, justify="right", no_wrap=wide is None, min_width=narrow, max_width=wide, overflow="fold")
    for group, members in groupby(zip(rows, lines, strict=True), key=lambda member: group_name(member[0])):
        table.add_row(Text(group), style="bold")
        for row, line in members:
            shown = (_in_lines(row["label"], method_width), *(line[column].replace("], ", "]\n") for column in columns))
            table.add_row(*map(Text, shown), style="red" if is_broken(row) or row["noisy"] else None)
        table.add_section()
    console.print(table, crop=not is_narrow)
    for text in note_lines(rows, min(console.width, MAX_WIDTH)):
        console.print(Text(text), style="dim", soft_wrap=True)


def note_lines(rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of the notes that have room, the most important first.

    The file of the table has all notes; the last line names it.
    """
    lines: list[str] = []
    for note in [*problems(rows), *measured_notes(rows)]:
        wrapped = textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        if len(lines) + len(wrapped) >= MAX_NOTE_LINES:
            break
        lines += wrapped
    return [*lines, f"  {TABLE_FILE} has all notes, the ceilings and what each step costs."]


def _in_lines(name: str, width: int) -> str:
    """Put the setting of a long name on a line of its own."""
    return name if len(name) <= width else re.sub(r", (?![^(]*\))", ",\n", name, count=1)
