"""What a report shows, as values: sections of tables, whose cells know how they are drawn.

Page and PNGs are made of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One cell.

    Without a `number` nothing is drawn, and `text` says why.
    """

    text: str
    number: float | None = None
    low: float | None = None
    """End of the 95 % interval, as `high`."""
    high: float | None = None
    note: str = ""
    """Small print beside the text."""
    tone: str = ""
    """`bad` where it is a refusal, `best` where it is the best of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, drawn as its kind says.

    `text`, `bar` (from 0 to `top`) or `heat` (a colour from 0 to `top`).
    """

    name: str
    kind: str = "text"
    top: float = 1.0
    parity: float | None = None
    """Where a bar would be as good as plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    label: str
    detail: str = ""
    values: list[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    caption: str
    corner: str
    """What the lines are."""
    columns: list[Column]
    lines: list[Line]
    notes: list[str] = field(default_factory=list)

    @property
    def is_grid(self) -> bool:
        """Whether it is coloured, so that a narrow screen scrolls it.

        Otherwise each line becomes a card.
        """
        return self.columns[0].kind == "heat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    id: str
    title: str
    intro: str
    tables: list[Table]


def number(value: float | None, spec: str = ".2f", unit: str = "", ci95: Sequence[float] | None = None) -> Value:
    """Return a number and its interval; "-" where there is none."""
    if value is None:
        return Value(text="-")
    low, high = ci95 or (None, None)
    note = f"{low:{spec}} to {high:{spec}}" if low is not None and high is not None else ""
    return Value(text=f"{value:{spec}}{unit}", number=value, low=low, high=high, note=note)


def column(name: str, kind: str, values: Sequence[Value], parity: float | None = None) -> Column:
    """Return a column whose scale holds all its values, their intervals and the parity."""
    ends = [end for value in values for end in (value.number, value.high) if end is not None]
    return Column(name=name, kind=kind, top=max([*ends, *([parity] if parity else [])], default=0.0) or 1.0, parity=parity)


def table(caption: str, corner: str, columns: Sequence[Column], lines: Sequence[Line], notes: Sequence[str] = ()) -> Table:
    assert all(len(line.values) == len(columns) for line in lines)
    return Table(caption=caption, corner=corner, columns=list(columns), lines=list(lines), notes=list(notes))
