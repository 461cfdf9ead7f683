"""`outrider report`: the paper's tables and figures, from the records of finished evaluations."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of finished evaluations: what `outrider eval` wrote.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for report.html and figures/.")] = Path("outputs/report"),
    figures: Annotated[bool, typer.Option(help="Write tables as PNGs, too: the first ones of each section.")] = True,
) -> None:
    """Tables and figures of one or several evaluations as one static page, and as PNGs.

    Measures nothing. Evaluations of different targets, options or environments get chapters of their own.
    """
    from ..eval.report.page import write_report

    typer.echo(f"Report: {write_report(directories, output, figures=figures)}")
