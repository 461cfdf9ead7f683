"""`outrider report`: one page of tables from the records of evaluations."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of finished evaluations, from `outrider eval`.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("outputs/report"),
) -> None:
    """Write the tables of evaluations as one static page.

    Nothing is measured. Evaluations with different targets, options or environments are in separate
    chapters.
    """
    from ..data.files import guarded
    from ..eval.report.page import write_report

    with guarded(output):
        page = write_report(directories, output)
    typer.echo(f"Report: {page}")
