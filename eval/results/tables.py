"""The table of an evaluation, for the terminal and as Markdown."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..records.names import BASELINE, OOM
from .lossless import LOSSY
from .rows import Row, decoding_name, is_broken, is_unproven

RESULT_COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Ceiling*", "Lossless")
COST_COLUMNS = ("Params", "Trained s", "Draft ms", "Draft", "Verify", "Accept", "Rest", "Of roofline")
NUM_OUTLIERS_NAMED = 3
FEW_UNITS = 8
"""A bootstrap over fewer prompts, or batches, hardly knows how far they spread."""
METHOD_WIDTH = 14
"""Characters for the name of a method on the narrowest terminal."""
BUFFER = "that size, at most 1 GiB (4 GiB on an accelerator)"
"""What bandwidth is measured on (`roofline.measure_bandwidth`), in words."""
BY_RULE_NOTE = (
    "by rule: a method that draws its drafts at random gives another sample than plain decoding by design. That it is "
    "lossless is claimed by its acceptance rule, which the command outrider certify tests."
)


def cells(row: Row) -> dict[str, str]:
    """A row's texts by column; "-" where there is no number."""
    interval, split, training = row["speedup_ci95"], row["time_split"] or {}, row["training"]
    draft_seconds = row["draft_seconds_per_step"]
    if row["out_of_memory"]:
        return {**dict.fromkeys((*RESULT_COLUMNS, *COST_COLUMNS), "-"), "Tok/s": OOM, "Speedup [95 %]": OOM}
    shown = {
        "Tok/step": _number(row["tokens_per_step"], ".2f"),
        "Tok/s": _number(row["tokens_per_second"], ".1f"),
        "Speedup [95 %]": _number(row["speedup"], ".2f", "x"),
        "Ceiling*": _number(row["ceiling"], ".2f", "x"),
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


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to judge the numbers, and what went wrong: the lines of `templates/footnotes.jinja`."""
    loader = PackageLoader("outrider.eval", "templates")
    # A note is one line, whatever stands in a name.
    environment = Environment(loader=loader, undefined=StrictUndefined, finalize=lambda value: " ".join(str(value).split()))
    measured = [row for row in rows if not row["out_of_memory"]]
    text = environment.get_template("footnotes.jinja").render(
        first=rows[0],
        batch_sizes=dict.fromkeys(row["batch_size"] for row in rows),
        rows=measured,
        groups=_groups(measured),
        left_out=_groups([row for row in rows if row["out_of_memory"]]),
        num_named=NUM_OUTLIERS_NAMED,
        baseline=BASELINE,
        oom=OOM,
        lossy=LOSSY,
        by_rule=BY_RULE_NOTE,
        buffer=BUFFER,
        too_few=too_few,
        decoding_name=decoding_name,
        is_broken=is_broken,
        is_unproven=is_unproven,
    )
    return [line for line in text.splitlines() if line]


def escape_markdown(text: str) -> str:
    """The text as Markdown shows it, on one line. Underscores within a word are left: they mean nothing there."""
    text = re.sub(r"[\\`*|<>&$~]", r"\\\g<0>", " ".join(text.split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def texts(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the table as a reader sees it: of each row the texts by column, what it is about first."""
    return [
        {
            "Suite": row["suite"],
            "Temperature": f"{row['temperature']:g}",
            "Batch": str(row["batch_size"]),
            "Method": row["method"],
            **{column: cells(row)[column] for column in columns},
        }
        for row in rows
    ]


def markdown_table(lines: Sequence[Mapping[str, str]], left: Collection[str]) -> str:
    """Write texts by column as a table of Markdown; all columns but those of `left` are aligned to the right."""
    table: list[Iterable[str]] = [map(escape_markdown, lines[0]), ("---" if name in left else "---:" for name in lines[0])]
    table += [map(escape_markdown, line.values()) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def markdown(rows: Sequence[Row]) -> str:
    """The table and its notes as a Markdown page."""
    table = markdown_table(texts(rows, (*RESULT_COLUMNS, *COST_COLUMNS)), left=("Suite", "Method"))
    notes = "\n".join(f"- {escape_markdown(note)}" for note in footnotes(rows))
    return f"{table}\n\n{notes}\n"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """The results, their costs and the notes on the terminal; a method that isn't lossless in red."""
    console = console or Console()
    for columns in (RESULT_COLUMNS, COST_COLUMNS):
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
        table.add_column("Method", min_width=METHOD_WIDTH)
        for column in columns:
            # The heads of costs are wider than what they stand over.
            head = column.replace(" ", "\n") if columns is COST_COLUMNS else column
            table.add_column(head, justify="right", no_wrap=True)
        for group, of_group in _groups(rows).items():
            table.add_row(Text(group), style="bold")
            for row in of_group:
                shown = (Text(text) for text in (row["method"], *(cells(row)[column] for column in columns)))
                table.add_row(*shown, style="red" if is_broken(row) else None)
            table.add_section()
        console.print(table)
    for note in footnotes(rows):
        console.print(Padding(Text(note), (0, 0, 0, 2)), style="dim")


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by suite, temperature and batch size, under the names that a reader sees."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['suite']}, {decoding_name(row)}", []).append(row)
    return groups


def too_few(num_units: int) -> str:
    """What there is to say of an interval over so few prompts or batches."""
    return ", too few for an interval to say much" if num_units < FEW_UNITS else ""


def _count(number: int) -> str:
    """Three digits or so: 850, 1.4M, 12.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
