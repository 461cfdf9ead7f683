"""Tables of the tokens of each step by their source, for merged drafters.

A table has a suite's merged methods over all prompts, and then by category.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..records.labels import title_of
from ..results.notes import PACE_NOTE
from ..results.plots import COLORS
from ..results.rows import depends_on_clock, method_name
from ..results.sources import BONUS, SEVERAL, source_shares
from .page_tables import Column, Line, Table, Value, number, table
from .runs import Entry, Group

SEVERAL_COLOR, BONUS_COLOR = "#4d565e", "#8a949e"


def sources(group: Group) -> list[Table]:
    """Build a table for each suite, temperature and batch size with a merged drafter."""
    tables = []
    for caption, entries in group.settings():
        merged = [entry for entry in entries if source_shares(entry.row) is not None]
        if not merged:
            continue
        names = _source_names(merged)
        lines = [Line(label=entry.label, detail=entry.detail, values=_values(entry.row, names)) for entry in merged]
        lines += _category_lines(merged, names)
        top = max((line.values[0].number or 0.0) for line in lines)
        columns = [Column(name="Tokens per step", kind="stack", top=top or 1.0, parts=_colors(names))]
        columns += [Column(name=_title(name)) for name in names]
        notes = [PACE_NOTE] if any(depends_on_clock(entry.row) for entry in merged) else []
        tables.append(table(f"{caption}: tokens per step by source", "Method", columns, lines, notes))
    return tables


def _category_lines(merged: Sequence[Entry], names: Sequence[str]) -> list[Line]:
    """Build a line for each category and method; none for a suite of one category."""
    categories = dict.fromkeys(name for entry in merged for name in entry.row["by_category"])
    if len(categories) < 2:
        return []
    return [
        Line(label=name, detail=_detail(entry, values, is_alone=len(merged) == 1), values=_values(values, names))
        for name in categories
        for entry in merged
        if (values := entry.row["by_category"].get(name)) is not None
    ]


def _detail(entry: Entry, values: Mapping[str, Any], *, is_alone: bool) -> str:
    """Describe a category's line: by its method, or by its prompts if there is only one method."""
    num_prompts = values["num_prompts"]
    return f"{num_prompts} prompt{'' if num_prompts == 1 else 's'}" if is_alone else method_name(entry.row)


def _source_names(merged: Sequence[Entry]) -> list[str]:
    """List the sources of all methods, then the shares that aren't of one source."""
    shares = [source_shares(entry.row) or {} for entry in merged]
    names = dict.fromkeys(name for of_method in shares for name in of_method)
    last = [name for name in (SEVERAL, BONUS) if name in names]
    return [*(name for name in names if name not in last), *last]


def _values(values: Mapping[str, Any], names: Sequence[str]) -> list[Value]:
    """Build the cells of a line: a bar of tokens per step in parts, and the share of each part."""
    shares, steps = source_shares(values), values["tokens_per_step"]
    if shares is None or steps is None:
        return [Value(text="-")] * (len(names) + 1)
    parts = [steps * shares.get(name, 0.0) for name in names]
    cells = [number(shares[name], ".0%") if name in shares else Value(text="-") for name in names]
    return [Value(text=f"{steps:.2f}", number=steps, parts=parts), *cells]


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Choose the color of each part of a bar."""
    greys = {SEVERAL: SEVERAL_COLOR, BONUS: BONUS_COLOR}
    return {_title(name): greys.get(name, COLORS[index % len(COLORS)]) for index, name in enumerate(names)}


def _title(name: str) -> str:
    title = title_of(name)
    return f"{title} tokens" if name == BONUS else title
