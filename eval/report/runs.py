"""Finished evaluations as a report reads them.

Comparable runs are shown side by side, others in chapters of their own.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...data.fields import differences
from ..records.names import BASELINE, PLAIN_DECODING, RUN_FILE
from ..records.run_files import RunInfo, read_info
from ..results.rows import Row, read_rows

VARIES_WITHIN_A_TABLE = frozenset(
    {
        *("suites", "methods", "temperature", "temperatures", "batch_size", "batch_sizes"),
        *("repeats", "profile_prompts"),
    }
)
"""Options in which comparable runs may differ, because each number is shown with their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """Row of a run's summary, with its names in the report."""

    run: str
    """Name of the run's folder."""
    row: Row
    label: str
    """Name of the drafter, and of the folder if another run measured a method of that name."""
    detail: str
    """The method's setting."""

    @property
    def is_baseline(self) -> bool:
        return self.row["method"] == BASELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One evaluation, as read from its folder."""

    name: str
    directory: Path
    info: RunInfo
    rows: list[Row]

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions that must be equal for numbers to be comparable."""
        options = {name: value for name, value in self.info.config.items() if name not in VARIES_WITHIN_A_TABLE}
        environment = asdict(self.info.environment)
        del environment["linears"]  # the same by speed, but it names the matrices of the run's drafters
        if environment["device"] != "cpu":
            del environment["num_threads"]  # launchers set it arbitrarily
        return {**options, "environment": environment}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs under the same conditions: target, options and environment."""

    runs: list[Run]
    entries: list[RunEntry]
    differs_in: list[str]
    """Conditions in which this group differs from the first one."""

    @property
    def title(self) -> str:
        return f"{self.runs[0].info.config['target']['name']} in {self.entries[0].row['dtype']}"

    def settings(self) -> Iterator[tuple[str, list[RunEntry]]]:
        """Yield the rows of one table each, with its caption.

        A table has one suite, temperature and batch size.
        """
        tables: dict[tuple[str, str, float, int], list[RunEntry]] = defaultdict(list)
        for entry in self.entries:
            tables[cell_of(entry.row)[:4]].append(entry)
        for (_, _, temperature, batch_size), entries in tables.items():
            caption = f"{self.suite_name(entries[0])}, {decoding(temperature)}, batch size {batch_size}"
            yield caption, sorted(entries, key=lambda entry: not entry.is_baseline)

    def suite_name(self, entry: RunEntry) -> str:
        """Name an entry's suite.

        The revision is added if the group also measured other prompts of this suite.
        """
        suite, revision = entry.row["suite"], entry.row["prompt_set_revision"]
        revisions = {other.row["prompt_set_revision"] for other in self.entries if other.row["suite"] == suite}
        return suite if len(revisions) == 1 else f"{suite} (prompts {revision[:8]})"


def decoding(temperature: float) -> str:
    """Describe the decoding: greedy, or its temperature."""
    return f"temperature {temperature:g}" if temperature > 0 else "greedy"


def cell_of(row: Row) -> tuple[str, str, float, int, str]:
    """Return what identifies a row of a summary."""
    return row["suite"], row["prompt_set_revision"], row["temperature"], row["batch_size"], row["method"]


def read_groups(directories: Sequence[Path]) -> list[Group]:
    """Read the runs of these folders, grouped by comparability, in the given order.

    Raises ValueError for a folder that is given twice, and for one without a finished run.
    """
    resolved = [directory.resolve() for directory in directories]
    if repeated := [str(path) for index, path in enumerate(resolved) if path in resolved[:index]]:
        raise ValueError(f"{', '.join(repeated)} is given twice; give each folder once")
    runs = [read_run(path, name) for path, name in zip(resolved, short_names(resolved), strict=True)]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.conditions, sort_keys=True), []).append(run)
    groups_of_runs = []
    for members in groups.values():
        differs_in = list(differences(runs[0].conditions, members[0].conditions))
        groups_of_runs.append(Group(runs=members, entries=_entries(members), differs_in=differs_in))
    return groups_of_runs


def read_run(directory: Path, name: str) -> Run:
    """Read a finished run.

    Raises ValueError as `read_rows` and `read_info` do.
    """
    return Run(name=name, directory=directory, rows=read_rows(directory), info=read_info(directory / RUN_FILE))


def short_names(directories: Sequence[Path]) -> list[str]:
    """Shorten each path to its last parts, as many as make the paths distinct.

    A last folder `eval` is ignored, since every run has one.
    """
    parts = [path.parts[:-1] if path.name == "eval" and len(path.parts) > 2 else path.parts for path in directories]
    length = 1
    while len({path_parts[-length:] for path_parts in parts}) < len(parts) and length < max(map(len, parts)):
        length += 1
    names = ["/".join(path_parts[-length:]) for path_parts in parts]
    return names if len(set(names)) == len(names) else [str(path) for path in directories]


def _entries(runs: Sequence[Run]) -> list[RunEntry]:
    """Build the entries of comparable runs' rows.

    If several runs measured a method, the entry's label includes the run's folder.
    """
    # 1. Find the methods that several runs have measured in one table.
    runs_of: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for run in runs:
        for row in run.rows:
            runs_of[*cell_of(row)[:4], row["label"]].add(run.name)
    repeated = {cell[-1] for cell, run_names in runs_of.items() if len(run_names) > 1}
    # 2. Build the entries.
    entries = []
    for run in runs:
        for row in run.rows:
            described = run.info.config["methods"].get(row["method"])  # None for plain decoding
            drafter, detail = (described["drafter"], described["detail"]) if described else (PLAIN_DECODING, "")
            label = f"{drafter} [{run.name}]" if row["label"] in repeated else drafter
            named: Row = {**row, "label": ", ".join(filter(None, (label, detail)))}
            entries.append(
                RunEntry(
                    run=run.name,
                    row=named,
                    label=label,
                    detail=detail,
                )
            )
    return entries
