"""Table in the terminal, at most 80 columns wide."""

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..records.names import TABLE_FILE
from .headline import headline
from .notes import measured_notes, problems
from .rows import Row, group_name, is_broken
from .tables import READ_COLUMN, frame

MAX_WIDTH, MAX_NOTE_LINES = 80, 10
COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Identical", READ_COLUMN)
"""Columns of the frame that have room; the file of the table has all."""
WIDTHS = {"Speedup [95 %]": (21, 21), "Identical": (9, 10)}
"""Smallest and largest width of columns with words, in characters; longer texts take several
lines."""
METHOD_WIDTH = 25
"""Width of a method's name beside the widest figures, in characters; longer names take several
lines."""
READ_WIDTH = 8
"""Width that the column of bytes read takes from it."""


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
    columns = [column for column in COLUMNS if column in lines[0]]
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
