"""Rows of a finished run.

They are computed from its records when it ends, and read from its summary later.
"""

from collections.abc import Iterable
from pathlib import Path

from ...data.files import read_dataclass
from ..records.names import SUMMARY_FILE
from ..records.records import EvalRecord
from ..records.run_files import Facts, OutOfMemory, RunInfo
from .lossless import judged
from .rows import Row, build_rows


def complete(
    records: Iterable[EvalRecord], out_of_memory: Iterable[OutOfMemory], without_profile: Iterable[OutOfMemory] = ()
) -> list[EvalRecord]:
    """Select the records of methods that did not run out of memory.

    A method that ran out of memory only in its profile loses only its profiled records.
    """
    left_out, unprofiled = ({failure.cell for failure in failures} for failures in (out_of_memory, without_profile))
    return [record for record in records if record.cell not in left_out and not (record.profiled and record.cell in unprofiled)]


def rows_of(records: Iterable[EvalRecord], info: RunInfo, facts: Facts) -> list[Row]:
    """Build the rows of a run from its records."""
    records = complete(records, facts.out_of_memory, facts.without_profile)
    return build_rows(records, judged(records, info.dtype, facts.audits, facts.unaudited), info, facts)


def read_rows(directory: Path) -> list[Row]:
    """Read the summary of a finished run.

    Raises ValueError if the summary is missing or malformed.
    """
    path = directory / SUMMARY_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} has no {path.name}: it is not a finished evaluation. Give the `eval/` folder of a run, or finish "
            "the run with the command that started it"
        )
    rows = read_dataclass(list[Row], path)
    if not rows:
        raise ValueError(f"{path} has no rows; run the evaluation's command again")
    return rows
