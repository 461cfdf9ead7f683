"""Savings from reading a shared prefix once, in tokens and in time.

(See figure 6 of the ReDrafter paper.)
"""

from collections import defaultdict
from typing import Any

from ..records.labels import setting_words
from ..results.rows import fault, is_wrong
from .page_tables import Column, Line, Table, Value, column, number, table
from .runs import Entry, Group, decoding
from .sections import NO_MEMORY

VARIED = ("beam_width", "share_prefixes")
"""Options that vary within one table."""
SIDES = {"separate": "Tokens before merging", "shared": "Tokens after", "read": "Tokens read"}
"""Titles of the columns, by their names in `stats.tree_tokens`."""


def prefixes(group: Group) -> list[Table]:
    """Build the tables of draft tokens and speed, with and without merged prefixes."""
    sizes = _sizes(group)
    # Tree sizes hardly change with the batch size, but speeds do. So one table of sizes comes
    # first.
    return [*sizes[:1], *_speeds(group), *sizes[1:]]


def _sizes(group: Group) -> list[Table]:
    tables = []
    for caption, entries in group.settings():
        counted = [
            (entry, counts)
            for entry in entries
            if entry.options.get("share_prefixes", True) and (counts := entry.row["tree_tokens"]) is not None
        ]
        if not counted:
            continue
        lines = []
        for entry, counts in counted:
            sides = [_percentiles(counts[name]) for name in SIDES]
            lines.append(Line(label=entry.label, detail=entry.detail, values=[*sides, _saved(counts)]))
        top = column("", "bar", [value for line in lines for value in line.values[: len(SIDES)]]).top
        columns = [*(Column(name=name, kind="bar", top=top) for name in SIDES.values()), Column(name="Saved (median)")]
        tables.append(table(f"{caption}: draft tokens a step", "Method", columns, lines))
    return tables


def _saved(counts: dict[str, list[float]]) -> Value:
    """Compute the share of the tokens before merging that the target didn't read.

    Padding is read, so it saves nothing.
    """
    before, read = counts["separate"][1], counts["read"][1]
    return Value(text=f"{1 - read / before:.0%}" if before else "-")


def _percentiles(values: list[float]) -> Value:
    low, middle, high = values  # stats.TREE_PERCENTILES
    if low == high:
        return number(middle, ".0f")
    return Value(text=f"{middle:.0f}", number=middle, low=low, high=high, note=f"{low:.0f} to {high:.0f}")


def _speeds(group: Group) -> list[Table]:
    """Build a table of tokens/s for each drafter, suite and temperature.

    Its grid is batch size x beam width, with tree attention and without.
    """
    # 1. Group the entries by drafter, options, suite and temperature.
    grids: dict[tuple[Any, ...], dict[tuple[int, int, bool], Entry]] = defaultdict(dict)
    for entry in group.entries:
        if "beam_width" not in entry.options or entry.options.get("tree_nodes") is not None:
            continue
        rest = tuple(sorted((name, str(value)) for name, value in entry.options.items() if name not in VARIED))
        key = (entry.label, entry.weights, rest, group.suite_name(entry), entry.row["temperature"])
        cell = (entry.row["batch_size"], entry.options["beam_width"], entry.options.get("share_prefixes", True))
        grids[key][cell] = entry

    # 2. Make a table of the cells that were measured both ways.
    tables = []
    for (label, _, rest, suite, temperature), entries in grids.items():
        pairs = [(batch, width) for batch, width, shared in entries if not shared and (batch, width, True) in entries]
        if not pairs:
            continue
        widths = sorted({width for _, width in pairs})
        lines = []
        for batch in sorted({batch for batch, _ in pairs}):
            for shared in (True, False):
                values = [
                    _speed(entries, batch, width, shared) if (batch, width) in pairs else number(None) for width in widths
                ]
                lines.append(Line(label="with" if shared else "without", detail=f"batch size {batch}", values=values))
        top = column("", "heat", [value for line in lines for value in line.values]).top
        columns = [Column(name=f"width {width}", kind="heat", top=top) for width in widths]
        subject = ", ".join(
            filter(None, (label, setting_words("redrafter", {"beam_length": dict(rest).get("beam_length")}, {})))
        )
        caption = f"{subject}; {suite}, {decoding(temperature)}: tokens/s"
        tables.append(table(f"{caption} with and without tree attention", "", columns, lines))
    return tables


def _speed(entries: dict[tuple[int, int, bool], Entry], batch: int, width: int, shared: bool) -> Value:
    """Build the cell of a batch's tokens/s; with tree attention it adds the speedup over
    without."""
    entry, other = entries[batch, width, shared], entries[batch, width, not shared]
    speed, other_speed = entry.row["tokens_per_second"], other.row["tokens_per_second"]
    if speed is None:
        return NO_MEMORY if entry.row["out_of_memory"] else Value(text="-")
    if is_wrong(entry.row):
        return Value(text=f"{speed:.1f}", number=speed, note=fault(entry.row), tone="bad")
    ratio = f"{speed / other_speed:.2f}x" if shared and other_speed is not None and not is_wrong(other.row) else ""
    return Value(text=f"{speed:.1f}", number=speed, note=ratio)
