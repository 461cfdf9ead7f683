"""Contents of a report: sections of tables, whose cells hold all that a drawing needs.

The page and the PNGs are made from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


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
    parts: list[float] = field(default_factory=list)
    """Parts of the number, in the order of the column's `parts`."""
    mark: str = ""
    """Reason why the number is uncertain, such as `disturbed`, on a line of its own."""
    tone: str = ""
    """`bad` for a cell that reports an error or a wrong result, `best` for the best cell of its
    line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of a table, drawn according to its kind.

    Kinds are `text`, `bar` (from 0 to `top`), `stack` (a bar in parts) and `heat` (a color from 0 to
    `top`).
    """

    name: str
    kind: str = "text"
    top: float = 1.0
    parity: float | None = None
    """Value of plain decoding, where the bar's column has a mark."""
    parts: dict[str, str] = field(default_factory=dict)
    """Colors of a stack's parts, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    label: str
    detail: str = ""
    values: list[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    caption: str
    corner: str
    """Title of the column with the lines' labels."""
    columns: list[Column]
    lines: list[Line]
    notes: list[str] = field(default_factory=list)

    @property
    def is_grid(self) -> bool:
        """Whether the table is a colored grid, which scrolls on a narrow screen.

        Each line of other tables becomes a card there.
        """
        return self.columns[0].kind == "heat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    id: str
    title: str
    intro: str
    tables: list[Table]


def number(value: float | None, spec: str = ".2f", unit: str = "", ci95: Sequence[float] | None = None) -> Value:
    """Build the cell of a number and its interval; "-" for None."""
    if value is None:
        return Value(text="-")
    low, high = ci95 or (None, None)
    note = f"{low:{spec}} to {high:{spec}}" if low is not None and high is not None else ""
    return Value(text=f"{value:{spec}}{unit}", number=value, low=low, high=high, note=note)


def column(name: str, kind: str, values: Sequence[Value], parity: float | None = None) -> Column:
    """Build a column whose scale includes all its values, their intervals and the parity."""
    ends = [end for value in values for end in (value.number, value.high) if end is not None]
    return Column(name=name, kind=kind, top=max([*ends, *([parity] if parity else [])], default=0.0) or 1.0, parity=parity)


def table(caption: str, corner: str, columns: Sequence[Column], lines: Sequence[Line], notes: Sequence[str] = ()) -> Table:
    assert all(len(line.values) == len(columns) for line in lines)
    return Table(caption=caption, corner=corner, columns=list(columns), lines=list(lines), notes=list(notes))
