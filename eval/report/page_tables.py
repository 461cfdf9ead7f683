"""Contents of a report: sections of tables, whose cells hold all that the page draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_RANGE = 1.5
"""Least ratio to plain decoding that a color scale ends at. A smaller one would paint noise."""


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
