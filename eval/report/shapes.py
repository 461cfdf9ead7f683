"""Maps of a ReDrafter's speed over beam width and beam length (arXiv 2403.09919, figure 7)."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..records.labels import setting_words
from ..results.rows import is_lossy, is_wrong
from .page_tables import Column, Line, Table, Value, column, number, table
from .runs import Entry, Group, decoding
from .sections import NO_MEMORY, speedup

SHAPE = ("beam_width", "beam_length")


def shape_maps(group: Group) -> list[Table]:
    """Build two grids for each drafter that was measured in several widths and lengths.

    The drafter's other options, the prompts, the temperature and the batch size are equal in a grid.
    """
    # 1. Group the entries that differ only in their shape.
    families: dict[tuple[Any, ...], dict[tuple[int, int], Entry]] = defaultdict(dict)
    for entry in group.entries:
        if all(name in entry.options for name in SHAPE):
            rest = tuple(sorted((name, str(value)) for name, value in entry.options.items() if name not in SHAPE))
            key = (group.suite_name(entry), entry.row["temperature"], entry.row["batch_size"], entry.label, entry.weights, rest)
            families[key][entry.options["beam_width"], entry.options["beam_length"]] = entry

    # 2. A grid of tokens per step, and one of the speedup.
    tables = []
    for (suite, temperature, batch_size, label, _, _), cells in families.items():
        widths, lengths = (sorted({shape[axis] for shape in cells}) for axis in (0, 1))
        if min(len(widths), len(lengths)) < 2:
            continue
        options = next(iter(cells.values())).options
        words = setting_words("redrafter", {name: options.get(name) for name in ("top_k", "tree_nodes")}, {})
        caption = f"{label}{f', {words}' if words else ''}; {suite}, {decoding(temperature)}, batch size {batch_size}"
        for name, value_of in (("tokens per step", _steps), ("speedup", _speedup)):
            tables.append(_map(f"{caption}: {name}", cells, widths, lengths, value_of))
    return tables


def _map(
    caption: str,
    cells: Mapping[tuple[int, int], Entry],
    widths: Sequence[int],
    lengths: Sequence[int],
    value_of: Callable[[Entry], Value],
) -> Table:
    """Build a grid with a line for each length, and mark the best of all correct cells."""
    values = {shape: value_of(entry) for shape, entry in cells.items()}
    best = max((value.number for value in values.values() if value.number is not None and not value.tone), default=None)
    for shape, value in values.items():
        if value.number is not None and value.number == best:
            values[shape] = replace(value, tone=value.tone or "best")
    absent = Value(text="-")
    lines = [
        Line(label=f"length {length}", values=[values.get((width, length), absent) for width in widths]) for length in lengths
    ]
    top = column("", "heat", list(values.values())).top
    return table(caption, "", [Column(name=f"width {width}", kind="heat", top=top) for width in widths], lines)


def _steps(entry: Entry) -> Value:
    if entry.row["out_of_memory"]:
        return NO_MEMORY
    value = number(entry.row["tokens_per_step"])
    return replace(value, tone="bad") if is_wrong(entry.row) else value


def _speedup(entry: Entry) -> Value:
    """Build the cell of a speedup without its interval, which has no room in a grid."""
    value = speedup(entry)
    return value if value.number is None or is_lossy(entry.row) else replace(value, note="")
