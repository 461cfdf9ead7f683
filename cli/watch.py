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
    from ..eval.results.watch import Change

MOST_ROWS = 24
"""Categories that are shown: those that fell, then those with the most requests."""
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
    from ..eval.results.watch import LEAST_CONVERSATIONS, watch

    found = watch([file for log in options.logs for file in record_files(log)], options.category)
    weeks, last, changes = found.weeks(), found.last_week(), found.changes()
    fallen = [change for change in changes if change.fell(options.fall)]

    # 1. The headline.
    console = Console()
    text = f"{weeks[last].ratio:.2f} tokens per step in {last}"
    if changes:
        of = ", ".join(change.category or "all requests" for change in fallen)
        verdict = f"fallen ({of})" if of else "not fallen" if changes[0].has_enough else "too few requests to tell"
        text += f", {changes[0].before.ratio:.2f} before: {verdict}"
    console.print(f"[bold]{escape(text)}[/]", soft_wrap=True)
    for note, count in found.notes.most_common():
        console.print(f"{count} {note}", soft_wrap=True)

    # 2. The tables, and the places of the costliest questions.
    table = Table("Week", "Requests", "Questions", "Tokens per step [95 %]", box=box.SIMPLE)
    for week, sums in weeks.items():
        low, high = sums.interval(Z)
        interval = f" [{low:.2f}, {high:.2f}]" if sums.num_conversations >= LEAST_CONVERSATIONS else ""
        table.add_row(week, f"{sums.count:,}", f"{sums.num_conversations:,}", f"{sums.ratio:.2f}{interval}")
    console.print(table)
    if changes:
        console.print(_changes(changes, last, options.fall))
    if costly := found.costliest(options.num_costly):
        total = sum(one.steps for conversations in found.groups.values() for one in conversations.values())
        console.print("Questions that cost the most steps beyond the mean:")
        for one in costly:
            asked = f"asked {one.count:,} times" if one.count > 1 else "asked once"
            console.print(f"{one.steps / total:6.1%} of the steps, {one.tokens / one.steps:.2f} tokens per step, {asked}:")
            console.print(escape(f"       {found.place(one)}"), soft_wrap=True)  # to be copied
    if fallen:
        raise SystemExit(1)


def _changes(changes: "list[Change]", last: str, fall: float) -> Table:
    table = Table("Category", f"In {last}", "Tokens per step", "Of those before", "", box=box.SIMPLE)
    shown = sorted(changes, key=lambda change: (change.category != "", not change.fell(fall), -change.last.count))
    for change in shown[:MOST_ROWS]:
        table.add_row(
            escape(change.category or "all"),
            f"{change.last.count:,}",
            f"{change.last.ratio:.2f}",
            f"{change.ratio:.2f}" + (f" [{change.low:.2f}, {change.high:.2f}]" if change.has_enough else ""),
            "fallen" if change.fell(fall) else "" if change.has_enough else "too few",
        )
    if len(shown) > MOST_ROWS:
        table.caption = f"and {len(shown) - MOST_ROWS} more categories"
    return table
