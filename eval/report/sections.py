"""Tables of a report's sections, computed from rows, and from the records of drafts if there are any.

A section without figures in the rows has no table.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..records.names import OOM
from ..results.explain import CAUSES, advice, explain_folder
from ..results.notes import PACE_NOTE, measured_notes, problems
from ..results.rows import depends_on_clock, fault, is_broken, is_lossy, is_wrong, units
from ..results.tables import PHASES, cells
from .runs import Group, RunEntry, decoding

MAX_HISTOGRAM = 12
"""Number of accepted lengths shown separately; longer ones are summed in the last."""
LEAST_RANGE = 1.5
"""Least ratio to plain decoding that a color scale ends at. A smaller one would paint noise."""
TEXT_COLUMNS = ("Median", "Faster on", "CPU ms/tok", "CPU speedup", "Identical")
"""Columns of the evaluation's table that the results have too, beside their bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One cell of a table.

    Without a `number` nothing is drawn, and `text` gives the reason.
    """

    text: str
    number: float | None = None
    low: float | None = None
    """Lower end of the 95 % interval; `high` is its upper end."""
    high: float | None = None
    note: str = ""
    """Small print beside the text."""
    mark: str = ""
    """Reason why the number is uncertain, such as `noisy`, on a line of its own."""
    tone: str = ""
    """`bad` for a cell that reports an error or a wrong result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """Column of a table, drawn according to its kind.

    Kinds are `text`, `bar` (from 0 to `top`) and `heat` (a color from 0 to `top`; with a parity, two
    colors for the values below and above it).
    """

    name: str
    kind: str = "text"
    top: float = 1.0
    parity: float | None = None
    """Value of plain decoding: where a bar's column has a mark, and a heat map's no color."""

    def share(self, value: float | None) -> float:
        """Compute a value's share of the scale, from 0 to 1; with a parity in a heat map, from -1.

        Half and twice the parity have the same distance from it.
        """
        if value is None:
            return 0.0
        if self.kind == "heat" and self.parity:
            most = max(abs(math.log(self.top / self.parity)), math.log(LEAST_RANGE))
            return max(-1.0, min(1.0, math.log(max(value, 1e-9) / self.parity) / most))
        return max(0.0, min(1.0, value / self.top))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    label: str
    detail: str = ""
    values: list[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    caption: str
    corner: str
    """Title of the column with the lines' labels."""
    columns: Sequence[TableColumn]
    lines: Sequence[Line]
    notes: Sequence[str] = ()

    @property
    def is_grid(self) -> bool:
        """Whether the table is a colored grid, which scrolls on a narrow screen.

        Each line of other tables becomes a card there.
        """
        return self.columns[0].kind == "heat"


def number(value: float | None, spec: str = ".2f", unit: str = "", ci95: Sequence[float] | None = None) -> Value:
    """Build the cell of a number and its interval; "-" for None."""
    if value is None:
        return Value(text="-")
    low, high = ci95 or (None, None)
    note = f"{low:{spec}} to {high:{spec}}" if low is not None and high is not None else ""
    return Value(text=f"{value:{spec}}{unit}", number=value, low=low, high=high, note=note)


def column(name: str, kind: str, values: Sequence[Value], parity: float | None = None) -> TableColumn:
    """Build a column whose scale includes all its values, their intervals and the parity."""
    ends = [end for value in values for end in (value.number, value.high) if end is not None]
    return TableColumn(name=name, kind=kind, top=max([*ends, *([parity] if parity else [])], default=0.0) or 1.0, parity=parity)


NO_MEMORY, NOTHING = Value(text=OOM, tone="bad"), Value(text="-")


def speedup(entry: RunEntry) -> Value:
    """Build the cell of a speedup over plain decoding, as in the evaluation's table.

    Where answers differ from the target's by mistake, the cell shows the fault instead. A lossy rule's
    speedup and a noisy one are marked.
    """
    row = entry.row
    if row["out_of_memory"]:
        return NO_MEMORY
    if is_broken(row):
        return Value(text=fault(row), note=row["lossless_label"], tone="bad")
    value = number(row["speedup"], ".2f", "x", row["speedup_ci95"])
    value = replace(value, mark="noisy" * row["noisy"], tone="bad" if row["noisy"] else "")
    return replace(value, note="not lossless", tone="bad") if is_lossy(row) else value


def _grid(
    caption: str, corner: str, columns: Sequence[str], lines: Mapping[tuple[str, str], Sequence[Value]], parity: float | None
) -> PageTable:
    """Build a table whose cells share one scale of colors. The keys of its lines are label and detail."""
    scale = column("", "heat", [value for values in lines.values() for value in values], parity)
    return PageTable(
        caption=caption,
        corner=corner,
        columns=[replace(scale, name=name) for name in columns],
        lines=[Line(label=label, detail=detail, values=[*values]) for (label, detail), values in lines.items()],
    )


def results(group: Group) -> list[PageTable]:
    """Build tables of tokens per step and speedup by method and suite."""
    tables = _overviews(group)
    for caption, entries in group.settings():
        steps = [number(entry.row["tokens_per_step"], ci95=entry.row["tokens_per_step_ci95"]) for entry in entries]
        ratios = [speedup(entry) for entry in entries]
        speeds = [number(entry.row["tokens_per_second"], ".1f") for entry in entries]
        columns = [
            column("Tokens per step", "bar", steps, parity=1.0),
            column("Speedup", "bar", ratios, parity=1.0),
            column("Tokens/s", "bar", speeds),
            *(TableColumn(name=name) for name in TEXT_COLUMNS),
        ]
        texts = [[Value(text=cells(entry.row)[name]) for name in TEXT_COLUMNS] for entry in entries]
        lines = [_line(entry, [*bars, *text]) for entry, *bars, text in zip(entries, steps, ratios, speeds, texts, strict=True)]
        tables.append(PageTable(caption=caption, corner="Method", columns=columns, lines=lines, notes=_notes(entries)))
    return tables


def _notes(entries: Sequence[RunEntry]) -> list[str]:
    """Return the notes of the terminal's table, and those on figures that need an explanation."""
    rows = [entry.row for entry in entries]
    notes = [*problems(rows), *measured_notes(rows), *[PACE_NOTE] * any(map(depends_on_clock, rows))]
    notes.append(f"Median: of the speedups of single {units(rows[0])}. CPU ms/tok: processor time of all threads.")
    if len({entry.run for entry in entries}) > 1:
        notes.append("From several folders: each speedup is over plain decoding in the same folder.")
    return notes


def _overviews(group: Group) -> list[PageTable]:
    """Build tables of methods by suites, for each temperature and batch size with several
    suites."""
    # 1. Group the tables by temperature and batch size.
    groups: dict[tuple[float, int], dict[str, list[RunEntry]]] = defaultdict(dict)
    for caption, entries in group.settings():
        row = entries[0].row
        groups[row["temperature"], row["batch_size"]][caption] = entries
    tables = []
    for by_caption in groups.values():
        if len(by_caption) < 2:
            continue

        # 2. The cell of each method and suite.
        methods: dict[tuple[str, str], dict[str, Value]] = defaultdict(dict)
        for caption, entries in by_caption.items():
            for entry in entries:
                note = "" if entry.row["out_of_memory"] else f"{number(entry.row['tokens_per_step']).text} a step"
                methods[entry.label, entry.detail][caption] = replace(speedup(entry), note=note)
        suites = [group.suite_name(entries[0]) for entries in by_caption.values()]
        setting = next(iter(by_caption)).split(", ", 1)[1]
        lines = {method: [values.get(caption, NOTHING) for caption in by_caption] for method, values in methods.items()}
        tables.append(_grid(f"All suites, {setting}: speedup", "Method", suites, lines, parity=1.0))
    return tables


def categories(group: Group) -> list[PageTable]:
    """Build tables of speedup and tokens per step by category.

    There is a line for each category, and a column for each method.
    """
    tables = []
    for caption, entries in group.settings():
        drafted = [entry for entry in entries if not entry.is_baseline]
        names = list(dict.fromkeys(name for entry in drafted for name in entry.row["by_category"]))
        if len(names) < 2:
            continue
        labels = [entry.row["label"] for entry in drafted]
        for quantity, value_of, parity in (("speedup", _category_speedup, 1.0), ("tokens per step", _category_steps, None)):
            lines = {
                (name, _counted_prompts(drafted, name)): [
                    value_of(entry, entry.row["by_category"].get(name)) for entry in drafted
                ]
                for name in names
            }
            tables.append(_grid(f"{caption}: {quantity}", "Category", labels, lines, parity))
    return tables


def _counted_prompts(entries: Sequence[RunEntry], category: str) -> str:
    counts = [entry.row["by_category"][category]["num_prompts"] for entry in entries if category in entry.row["by_category"]]
    return f"{max(counts)} prompt{'s' if max(counts) > 1 else ''}"


def _category_speedup(entry: RunEntry, values: dict[str, Any] | None) -> Value:
    overall = speedup(entry)
    if values is None:
        return Value(text="-")
    if overall.number is None or is_lossy(entry.row):
        return Value(text="-", tone="bad")
    return replace(number(values["speedup"], ".2f", "x", values["speedup_ci95"]), tone=overall.tone)


def _category_steps(entry: RunEntry, values: dict[str, Any] | None) -> Value:
    return number(values["tokens_per_step"]) if values else Value(text="-")


def batch_sizes(group: Group) -> list[PageTable]:
    """Build grids of tokens/s by method and batch size, for each suite and temperature.

    The color of a cell is its ratio to plain decoding at the same batch size.
    """
    # 1. Group the entries by suite, temperature and method.
    groups: dict[tuple[str, float], dict[tuple[str, str], dict[int, RunEntry]]] = defaultdict(lambda: defaultdict(dict))
    for entry in sorted(group.entries, key=lambda entry: not entry.is_baseline):
        place = (group.suite_name(entry), entry.row["temperature"])
        groups[place][entry.label, entry.detail][entry.row["batch_size"]] = entry

    # 2. Make two grids for each group with several batch sizes.
    tables = []
    for (suite, temperature), methods in groups.items():
        sizes = sorted({size for by_size in methods.values() for size in by_size})
        entries = [(size, entry) for by_size in methods.values() for size, entry in by_size.items()]
        plain = {(entry.run, size): entry for size, entry in entries if entry.is_baseline}
        quantities = (("tokens/s of each answer", "answer_tokens_per_second"), ("tokens/s of the batch", "tokens_per_second"))
        for name, field in quantities if len(sizes) > 1 else ():
            lines = {method: [_speed(by_size.get(size), plain, field) for size in sizes] for method, by_size in methods.items()}
            columns = [f"batch size {size}" for size in sizes]
            tables.append(_grid(f"{suite}, {decoding(temperature)}: {name}", "Method", columns, lines, parity=1.0))
    return tables


def _speed(entry: RunEntry | None, plain: Mapping[tuple[str, int], RunEntry], field: str) -> Value:
    """Build the cell of a speed, with its ratio to plain decoding's in the same run."""
    if entry is None:
        return Value(text="-")
    if entry.row["out_of_memory"]:
        return NO_MEMORY
    baseline = plain.get((entry.run, entry.row["batch_size"]))
    speed: Any = dict(entry.row)[field]
    base: Any = None if baseline is None else dict(baseline.row)[field]
    value = number(speed, ".1f")
    if is_wrong(entry.row):  # its speed is still shown, but marked
        return replace(value, number=None, note=fault(entry.row), tone="bad")
    return replace(value, number=speed / base, note=f"{speed / base:.2f}x") if speed and base else replace(value, number=None)


def accepted_lengths(group: Group) -> list[PageTable]:
    """Build tables of the number of draft tokens that each verify step accepted."""
    tables = []
    for caption, entries in group.settings():
        drafted = [entry for entry in entries if not entry.is_baseline and any(entry.row["accepted_histogram"])]
        if not drafted:
            continue
        longest = min(MAX_HISTOGRAM, max(len(entry.row["accepted_histogram"]) for entry in drafted))
        names = [str(length) for length in range(longest)]
        if any(len(entry.row["accepted_histogram"]) > longest for entry in drafted):
            names[-1] += "+"
        lines = []
        for entry in drafted:
            counts = entry.row["accepted_histogram"]
            num_steps = sum(counts)
            tail: int = sum(counts[longest - 1 :])
            shown = [*counts[: longest - 1], tail] + [0] * (longest - len(counts))
            shares = [number(count / num_steps, ".0%") for count in shown[:longest]]
            mean = Value(text=f"{entry.row['mean_accepted']:.2f}")
            lines.append(_line(entry, [*shares, mean, Value(text=f"{num_steps:,}")]))
        top = column("", "heat", [value for line in lines for value in line.values]).top
        columns = [
            *(TableColumn(name=name, kind="heat", top=top) for name in names),
            TableColumn(name="Mean"),
            TableColumn(name="Steps"),
        ]
        tables.append(PageTable(caption=f"{caption}: steps by accepted length", corner="Method", columns=columns, lines=lines))
    return tables


def misses(group: Group) -> list[PageTable]:
    """Build a table of each folder's misses by cause, with the next steps; only of answers whose drafts were recorded."""
    tables = []
    for run in group.runs:
        lines, notes = list[Line](), list[str]()
        for explained in explain_folder(run.directory):
            counts = {cause.name: cause.count for cause in explained.causes}
            shares = [number(counts.get(cause, 0) / max(1, explained.num_misses), ".0%") for cause in CAUSES]
            figures = [Value(text=f"{explained.num_misses:,} of {len(explained.steps):,}"), number(explained.tokens_per_step)]
            lines.append(Line(label=explained.label, values=[*shares, *figures]))
            steps = [*filter(None, [explained.doubt]), *advice(explained)]
            notes.append(f"{explained.label}: {'; '.join(steps) if steps else 'no miss'}")
        if not lines:
            continue
        columns = [*(TableColumn(name=cause, kind="heat") for cause in CAUSES), TableColumn(name="Misses")]
        columns.append(TableColumn(name="Tokens per step"))
        caption = f"Answers of {run.name} whose drafts were recorded: share of misses by cause"
        tables.append(PageTable(caption=caption, corner="Method", columns=columns, lines=lines, notes=notes))
    return tables


def time_split(group: Group) -> list[PageTable]:
    """Build tables of the phases' shares of the decode time."""
    tables = []
    for caption, entries in group.settings():
        lines = []
        for entry in entries:
            if (split := entry.row["time_split"]) is None:
                continue
            shares = [number(max(0.0, split[phase]), ".0%") for phase in PHASES]
            seconds = entry.row["draft_seconds_per_step"]
            lines.append(_line(entry, [*shares, Value(text="-" if seconds is None else f"{1e3 * seconds:.2f}")]))
        if lines:
            columns = [*(TableColumn(name=phase, kind="heat") for phase in PHASES), TableColumn(name="Draft ms/step")]
            tables.append(PageTable(caption=f"{caption}: share of decode time", corner="Method", columns=columns, lines=lines))
    return tables


def _line(entry: RunEntry, values: list[Value]) -> Line:
    return Line(label=entry.label, detail=entry.detail, values=values)
