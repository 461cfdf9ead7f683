"""`outrider report`: one page of tables from the records of evaluations."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..data.fields import OPTIONS


@dataclass(kw_only=True, config=OPTIONS)
class ReportOptions:
    """Options of `outrider report`."""

    directories: Annotated[list[Path], Field(min_length=1)]
    """Folders of finished evaluations, from `outrider eval`."""
    output: Path = Path("outputs/report")
    """Folder for report.html."""

    POSITIONAL: ClassVar = ("directories",)


def report_command(options: ReportOptions) -> None:
    """Write the tables of evaluations as one static page.

    Nothing is measured. Evaluations with different targets, options or environments are in separate
    chapters.
    """
    from ..data.files import guarded
    from ..eval.report.page import write_report

    with guarded(options.output):
        page = write_report(options.directories, options.output)
    print(f"Report: {page}")
