"""One table over evaluations of a target in several types: float32, bfloat16, int8, int4."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..results.rows import is_lossy
from .page_tables import Column, Line, Table, Value, column, number, table
from .runs import Entry, Group, cell_of
from .sections import speedup

TYPE_OPTIONS = ("dtype", "quantization")
"""Facts about a target that its type consists of."""
BITS = {"load_in_8bit": "int8", "load_in_4bit": "int4"}
"""Short names of bitsandbytes' options."""


def type_tables(groups: Sequence[Group]) -> list[Table]:
    """Build a table for each suite, temperature and batch size measured in several types.

    Only groups that differ in nothing but the type share a table.
    """
    # 1. Collect the groups of each target and setting, by type.
    by_conditions: dict[str, dict[str, Group]] = defaultdict(dict)
    for group in groups:
        conditions = group.runs[0].conditions
        target = {name: value for name, value in conditions["target"].items() if name not in TYPE_OPTIONS}
        key = json.dumps({**conditions, "target": target}, sort_keys=True)
        name = type_name(conditions["target"])
        by_type = by_conditions[key]
        by_type[name if name not in by_type else f"{name}, {conditions['target']['quantization']}"] = group
    # 2. The tables.
    return [
        _table(caption, by_type)
        for groups_by_type in by_conditions.values()
        if len(groups_by_type) > 1
        for caption, by_type in _settings(groups_by_type).items()
        if len(by_type) > 1
    ]


def _settings(groups: Mapping[str, Group]) -> dict[str, dict[str, list[Entry]]]:
    """Collect the entries of each suite, temperature and batch size, by type."""
    settings: dict[tuple[Any, ...], dict[str, list[Entry]]] = defaultdict(dict)
    captions: dict[tuple[Any, ...], str] = {}
    for name, group in groups.items():
        for caption, entries in group.settings():
            key = cell_of(entries[0].row)[:4]
            captions.setdefault(key, f"{group.runs[0].info.config['target']['name']}, {caption}")
            settings[key][name] = entries
    return {captions[key]: by_type for key, by_type in settings.items()}


def _table(caption: str, by_type: Mapping[str, Sequence[Entry]]) -> Table:
    """Build a table with a line for each method, and a column for each type."""
    methods: dict[tuple[str, str], dict[str, Value]] = defaultdict(dict)
    for name, entries in by_type.items():
        for entry in entries:
            methods[entry.label, entry.detail][name] = _cell(entry)
    absent = Value(text="-")
    lines = [
        Line(label=label, detail=detail, values=[values.get(name, absent) for name in by_type])
        for (label, detail), values in methods.items()
    ]
    top = column("", "heat", [value for line in lines for value in line.values]).top
    columns = [Column(name=name, kind="heat", top=top) for name in by_type]
    return table(f"{caption}: tokens/s by type", "Method", columns, lines)


def _cell(entry: Entry) -> Value:
    """Build the cell of a method in a type: its speed, tokens per step and speedup, or its fault."""
    ratio = speedup(entry)
    if ratio.number is None:
        return ratio
    speed, steps = number(entry.row["tokens_per_second"], ".1f"), number(entry.row["tokens_per_step"])
    fault = ", not lossless" if is_lossy(entry.row) else ""
    return replace(speed, note=f"{steps.text} a step, {ratio.text}{fault}", mark=ratio.mark, tone=ratio.tone)


def type_name(target: Mapping[str, Any]) -> str:
    """Name a target's type: the bits of its quantised weights, or else its floating-point type."""
    dtype = str(target["dtype"]).removeprefix("torch.")
    if not (quantization := target.get("quantization")):
        return dtype
    try:
        options = json.loads(quantization)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        return f"{dtype}, {quantization}"
    bits = [name for option, name in BITS.items() if options.get(option)]
    if not bits and "bits" in options:
        bits = [f"int{options['bits']}"]
    return f"{bits[0] if bits else options.get('type', 'quantised')} ({options.get('method')}), {dtype}"
