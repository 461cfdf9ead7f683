"""Tables of tokens per step over the answer's length."""

from collections.abc import Sequence

from ..results.lengths import WINDOW_TOKENS, Window, window_name
from .page_tables import Column, Line, Table, Value, column, number, table
from .runs import Entry, Group

MAX_WINDOWS = 12
"""Number of windows shown; `summary.json` and the plots have all."""


def windows(group: Group) -> list[Table]:
    """Build a table for each suite, temperature and batch size: a line for each drafter."""
    tables = []
    for caption, entries in group.settings():
        by_entry = [(entry, entry.row.get("by_window") or []) for entry in entries if not entry.is_baseline]
        drafted = [(entry, of_entry) for entry, of_entry in by_entry if of_entry]
        if drafted:
            tables.append(_table(f"{caption}: tokens per step by the answer's tokens", drafted))
    return tables


def _table(caption: str, drafted: Sequence[tuple[Entry, list[Window]]]) -> Table:
    """Build one table; windows beyond MAX_WINDOWS are left out."""
    all_windows = {window["first_token"]: window_name(window) for _, of_entry in drafted for window in of_entry}
    names = dict(sorted(all_windows.items())[:MAX_WINDOWS])
    lines = []
    for entry, of_entry in drafted:
        cells = {window["first_token"]: _cell(window) for window in of_entry}
        values = [cells.get(first_token, Value(text="-")) for first_token in names]
        lines.append(Line(label=entry.label, detail=entry.detail, values=values))
    top = column("", "heat", [value for line in lines for value in line.values]).top
    columns = [Column(name=name, kind="heat", top=top) for name in names.values()]
    num_hidden = len(all_windows) - len(names)
    notes = [f"Windows of {WINDOW_TOKENS} tokens; {num_hidden} later ones are in summary.json."] if num_hidden else []
    return table(caption, "Method", columns, lines, notes)


def _cell(window: Window) -> Value:
    """Build the cell of a window, with its number of answers in small print."""
    value = number(window["tokens_per_step"])
    num_answers = window["num_answers"]
    return Value(text=value.text, number=value.number, note=f"{num_answers} answer{'' if num_answers == 1 else 's'}")
