"""Table in the terminal, at most 80 columns wide."""

import re
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..records.names import OOM, TABLE_FILE
from .headline import group_name, headline
from .lossless import LOSSY
from .marks import (
    ABOVE_CEILING,
    DISTURBED,
    MEASURE_ANEW,
    disturbed_answers,
    is_above_ceiling,
    is_disturbed,
    is_error,
    num_repeated,
    units,
)
from .rows import Row, decoding_name, is_broken, is_timeless, is_unproven, loop_share, method_name
from .sources import depends_on_clock, merged_rows, shares_text
from .stages import SHORT_NOTE, pipelined_rows, stages_note
from .tables import LOOP_SHARE, READ_COLUMN, budget_note, by_group, cells, num_units, result_columns, too_few

MAX_WIDTH, MAX_NOTE_LINES = 80, 6
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

    A method that should be lossless but isn't is red, and so is a speedup that can't be trusted.
    """
    console = console or Console()
    console.print(Text(headline(rows), style="bold"))
    # A narrower terminal wraps the lines, but loses no column.
    is_narrow = console.width < MAX_WIDTH
    width = MAX_WIDTH if is_narrow else None
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True, width=width)
    columns = [column for column in result_columns(rows) if column != "Ceiling"]
    method_width = METHOD_WIDTH - READ_WIDTH * (READ_COLUMN in columns)
    table.add_column("Method", min_width=method_width, overflow="fold")
    for column in columns:
        narrow, wide = WIDTHS.get(column, (None, None))
        table.add_column(column, justify="right", no_wrap=wide is None, min_width=narrow, max_width=wide, overflow="fold")
    for group, of_group in by_group(rows).items():
        table.add_row(Text(group), style="bold")
        for row in of_group:
            figures = cells(row)
            name = _in_lines(method_name(row), method_width)
            shown = (name, *(figures[column].replace("], ", "]\n") for column in columns))
            is_red = is_broken(row) or is_error(row) or is_disturbed(row)
            table.add_row(*map(Text, shown), style="red" if is_red else None)
        table.add_section()
    console.print(table, crop=not is_narrow)
    for line in note_lines(rows, min(console.width, MAX_WIDTH)):
        console.print(Text(line), style="dim", soft_wrap=True)


def note_lines(rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of the notes, at most MAX_NOTE_LINES, the most important first.

    The file of the table has all notes; the last line names it.
    """
    lines: list[str] = []
    for note in _notes(rows):
        wrapped = textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        if len(lines) + len(wrapped) >= MAX_NOTE_LINES:
            break
        lines += wrapped
    return [*lines, f"  {TABLE_FILE} has all notes, the ceilings and what each step costs."]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Write the notes, the most important first, each as short as possible."""
    measured = [row for row in rows if not row["out_of_memory"]]
    notes = []
    # 1. Wrong answers, and speeds that can't be trusted.
    unproven = [row for row in measured if is_unproven(row)]
    if wrong := [row for row in measured if is_broken(row) and row not in unproven]:
        notes.append(f"NOT LOSSLESS, so without a speedup: {_names(wrong)}.")
    if unproven:
        notes.append(f"NOT PROVEN to be lossless, so without a speedup: {_names(unproven)}.")
    if rows[0].get("budget"):
        notes.append(budget_note(rows[0]))
    if stages := stages_note(rows[0]):
        notes.append(f"{stages} {SHORT_NOTE}" if pipelined_rows(rows) else stages)
    notes += _timing_notes(measured)
    # 2. What is absent or misleading.
    if num_skipped := sum(row["num_skipped"] for members in by_group(measured).values() for row in members[:1]):
        notes.append(f"{num_skipped} turns were SKIPPED: they don't fit the context window.")
    if left_out := [row for row in rows if row["out_of_memory"]]:
        notes.append(f"{OOM}: memory ran out for {_names(left_out)}.")
    if looping := [row for row in measured if loop_share(row) >= LOOP_SHARE]:
        most = max(looping, key=loop_share)
        notes.append(f"Loops: {loop_share(most):.0%} of the answers of {method_name(most)} end in a short cycle of tokens.")
    if any(row["lossless_label"] == LOSSY for row in measured):
        notes.append(f"{LOSSY}: the acceptance rule changes the target's distribution.")
    if any(row["lossless"] is None for row in measured):
        notes.append("by rule: random drafts, so other samples of the same distribution.")
    if any(map(depends_on_clock, measured)):
        notes.append("pace: expected lets tokens per step vary from run to run, not the answers.")
    # 3. How to read the table.
    notes += [_group_note(members) for members in by_group(measured).values()]
    notes += [f"Sources of {_names([row])}: {shares_text(row)}." for row in merged_rows(measured)]
    return notes


def _timing_notes(rows: Sequence[Row]) -> list[str]:
    """Write the notes about times that are wrong, disturbed or not judged."""
    notes = []
    if timeless := [row for row in rows if is_timeless(row)]:
        notes.append(f"No speeds for {_names(timeless)}: the clock jumped in all answers, so none has a positive time.")
    if errors := [row for row in rows if is_error(row) and not is_timeless(row)]:
        remedy = "" if any(map(is_disturbed, errors)) else f" {MEASURE_ANEW}"
        notes.append(
            f"No speedup for {_names(errors)}: it would exceed its tokens per step, so plain decoding's time is wrong.{remedy}"
        )
    if disturbed := disturbed_answers(rows):
        name, answer = disturbed[0]
        ratio = answer["ratio"]
        took = f"The worst took {ratio:.0f} times its usual time" if ratio > 0 else "The clock jumped in one"
        notes.append(f"{DISTURBED.capitalize()}: {_count(len(disturbed), 'answer')}. {took} ({name}).")
    if above := [row for row in rows if is_above_ceiling(row)]:
        notes.append(f"{ABOVE_CEILING.capitalize()}: {_names(above)}. Times of answers and profile contradict each other.")
    if number := num_repeated(rows):
        notes.append(f"Repeated: {_count(number, 'answer')}, since its timing or plain decoding's was disturbed.")
    if unjudged := [row for row in rows if not row.get("stalls_judged", True)]:
        notes.append(f"Too few answers to judge stalls: {_names(unjudged)}.")
    return notes


def _group_note(rows: Sequence[Row]) -> str:
    """Describe what was measured in a group, and the intervals."""
    row = rows[0]
    intervals = f" Intervals are over {units(row)}."
    if too_few(row):
        number = num_units(row)
        intervals = f" Intervals are over {number} {units(row)}, which are too few." if number > 1 else too_few(row)
    weights = " with quantised weights" if row.get("quantization") else ""
    measured = f"{row['num_prompts']} prompts in {row['dtype']}{weights}, up to {row['max_new_tokens']} new tokens"
    return f"{group_name(row)}: {measured}.{intervals}"


def _names(rows: Sequence[Row]) -> str:
    """Name the first of the rows, and count the others."""
    first = f"{method_name(rows[0])} ({rows[0]['suite']}, {decoding_name(rows[0])})"
    return first if len(rows) == 1 else f"{first} and {len(rows) - 1} more"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _in_lines(name: str, width: int) -> str:
    """Put the setting of a long name on a line of its own."""
    return name if len(name) <= width else re.sub(r", (?![^(]*\))", ",\n", name, count=1)
