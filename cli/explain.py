"""`outrider explain`: why an evaluation's drafts end, and what each cause costs at most."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic.dataclasses import dataclass
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data.fields import OPTIONS

if TYPE_CHECKING:
    import pandas as pd

    from ..eval.results.explain import Explanation

LEAST_REACHED = 10
"""How often a place of the draft is reached at least, for its line."""
NUM_GROUPS = 6
"""Most lines of a table of groups: those with the most misses."""


@dataclass(kw_only=True, config=OPTIONS)
class ExplainOptions:
    """Options of `outrider explain`."""

    directory: Path
    """Folder of a finished evaluation, with eval.profile_prompts above 0: their answers are explained."""
    method: str | None = None
    """Only methods whose label has this text, such as EAGLE. null: all."""

    POSITIONAL: ClassVar = ("directory",)


def explain_command(options: ExplainOptions) -> None:
    """Say why the drafts of an evaluation end, without decoding anew.

    Each miss has one cause: the target itself was uncertain, the text had the token already, the drafter ranked it too
    low, or has not learned it.
    """
    from ..eval.results.explain import explain_folder

    if not (explained := explain_folder(options.directory)):
        raise ValueError(
            "no answer's drafts were recorded: they are those of eval.profile_prompts, which is 0 here, or the evaluation is "
            "of an earlier version; evaluate again, for example with --eval.profile_prompts 16"
        )
    chosen = [one for one in explained if options.method is None or options.method.lower() in one.label.lower()]
    if not chosen:
        labels = "; ".join(one.label for one in explained)
        raise ValueError(f"method is {options.method!r}, and no label has this text; there are: {labels}")
    console = Console()
    for explanation in chosen:
        _print(explanation, console)


def _print(explanation: "Explanation", console: Console) -> None:
    """Print what a person acts on: a headline, the causes with the next steps, and where misses are."""
    from ..eval.results.explain import GROUPS, advice

    # 1. The headline.
    steps, misses = len(explanation.steps), explanation.num_misses
    answers = explanation.steps.groupby(["suite", "answer"]).ngroups
    console.print(
        f"[bold]{escape(explanation.label)}: {explanation.tokens_per_step:.2f} tokens per step; {misses} of {steps} drafts "
        f"missed a token[/] ({answers} answers)",
        soft_wrap=True,
    )
    if (doubt := explanation.doubt) is not None:
        console.print(f"[bold]{escape(doubt)}[/]", soft_wrap=True)
    # 2. The causes, and what to do about them.
    table = Table("Misses", "", "Cause", "At most", "Above all in", box=box.SIMPLE)
    for cause in explanation.causes:
        share = f"{cause.count / misses:.0%}"
        table.add_row(str(cause.count), share, cause.name, f"{cause.most:.2f}", escape(cause.where or ""))
    console.print(table)
    for number, step in enumerate(advice(explanation), start=1):
        console.print(f"{number}. {escape(step)}", soft_wrap=True)
    # 3. Where they are.
    positions = explanation.positions()
    if len(positions):  # the first place, and those behind it that are reached often
        console.print(_table(positions[(positions["reached"] >= LEAST_REACHED) | (positions.index < 1)]))
    for column in GROUPS:
        groups = explanation.groups(column)
        if len(groups) > 1:
            console.print(_table(groups.head(NUM_GROUPS)))


def _table(rows: "pd.DataFrame") -> Table:
    table = Table(*map(str, rows.columns), box=box.SIMPLE)
    for row in rows.itertuples(index=False):
        table.add_row(*(escape(f"{value:.2f}" if isinstance(value, float) else str(value)) for value in row))
    return table
