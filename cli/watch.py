"""`outrider watch`: whether the drafts of a server are accepted as before, by its logs."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data.fields import OPTIONS

if TYPE_CHECKING:
    from ..eval.results.watch import Change, Repeated, Watch

Z = 1.96
"""Standard deviations of a 95 % interval."""


@dataclass(kw_only=True, config=OPTIONS)
class WatchOptions:
    """Options of `outrider watch`."""

    logs: Annotated[list[str], Field(min_length=1)]
    """Files, folders or patterns of chat requests and replies as servers log them (data.source=openai)."""
    category: str | None = None
    """Key of a record, of its request or of their metadata, whose value is the category. null: tools, code or text."""
    fall: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Smallest share of tokens per step whose loss counts as a fall."""
    num_costly: Annotated[int, Field(ge=0, le=1000)] = 5
    """Questions to list, of those that cost the most steps."""

    POSITIONAL: ClassVar = ("logs",)


def watch_command(options: WatchOptions) -> None:
    """Report tokens per step by week and category, and the questions that cost the most steps; print no text of the log.

    Exits with status 1 if tokens per step fell in the last week: of all requests, or of a category.
    """
    from ..data.raw_records import record_files
    from ..eval.results.watch import watch

    found = watch([file for log in options.logs for file in record_files(log)], options.category)
    changes, weeks = found.changes(), found.weeks
    fallen = [change for change in changes if change.fell(options.fall)]

    # 1. The headline.
    console, (last, now) = Console(), list(weeks.items())[-1]
    text = f"{now.ratio:.2f} tokens per step in {last}"
    if len(weeks) > 1:
        of = ", ".join(change.category or "all requests" for change in fallen)
        text += f", {changes[0].before.ratio:.2f} before: " + (f"fallen ({of})" if of else "not fallen")
    console.print(f"[bold]{escape(text)}[/]", soft_wrap=True)
    for note, count in found.notes.most_common():
        console.print(f"{count} {note}", soft_wrap=True)

    # 2. The tables.
    table = Table("Week", "Requests", "Tokens per step [95 %]", box=box.SIMPLE)
    for week, sums in weeks.items():
        low, high = sums.interval(Z)
        table.add_row(week, f"{sums.count:,}", f"{sums.ratio:.2f}" + (f" [{low:.2f}, {high:.2f}]" if sums.count > 1 else ""))
    console.print(table)
    if changes:
        console.print(_changes(changes, last, options.fall))
    if costly := found.costliest(options.num_costly):
        console.print(_costly(found, costly))
    if fallen:
        raise SystemExit(1)


def _changes(changes: "list[Change]", last: str, fall: float) -> Table:
    table = Table("Category", f"Requests in {last}", "Tokens per step", "Of those before", "", box=box.SIMPLE)
    for change in changes:
        table.add_row(
            escape(change.category or "all"),
            f"{change.last.count:,}",
            f"{change.last.ratio:.2f}",
            f"{change.ratio:.3f} [{change.low:.3f}, {change.high:.3f}]",
            "fallen" if change.fell(fall) else "",
        )
    return table


def _costly(found: "Watch", costly: "list[tuple[Repeated, float]]") -> Table:
    total = sum(sums.s for sums in found.groups.values())
    table = Table("Asked", "Tokens per step", "Of all steps", "First one", box=box.SIMPLE, title="Costliest questions")
    for question, _ in costly:
        sums = question.sums
        table.add_row(f"{sums.count:,}", f"{sums.ratio:.2f}", f"{sums.s / total:.1%}", escape(question.place))
    return table
