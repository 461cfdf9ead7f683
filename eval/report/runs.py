"""Finished evaluations as a report reads them: side by side where they may be compared, apart where they may not."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...data.differences import differences
from ...data.files import read_json
from ..records.names import BASELINE, RUN_FILE
from ..records.records import EvalRecord
from ..results.finished import read_finished
from ..results.rows import Row

VARIES_WITHIN_A_TABLE = frozenset(
    {
        *("suites", "methods", "temperature", "temperatures", "batch_size", "batch_sizes"),
        *("repeats", "warmup_prompts", "profile_prompts"),
    }
)
"""Options of a run in which comparable runs may differ: what they change is shown with each number."""
NUM_RESAMPLES = 2_000
ANYTHING = "anything, since a run.json is missing"
"""What may differ between runs of which one doesn't tell how it was made."""

Cell = tuple[str, str, float, int, str]
"""Suite, its prompts' revision, temperature, batch size and method: one row of a summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of a run's summary, and what a reader calls it."""

    run: str
    """Name of its folder."""
    row: Row
    label: str
    """Kind and place of the drafter; the folder too, where another run has a method of that name."""
    detail: str
    """The method's setting."""
    options: dict[str, Any]
    """All options of the drafter; where the run doesn't tell, those that the method's name has."""
    weights: str | None
    """Digest of the drafter's weights; None for plain decoding, and where the run doesn't tell."""
    tokens_per_step_ci95: tuple[float, float] | None
    """Bootstrap over prompts; None without records, and for fewer than two prompts."""

    @property
    def is_baseline(self) -> bool:
        return self.row["method"] == BASELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An evaluation's folder. `config` and `environment` are None where it doesn't say how it was made."""

    name: str
    directory: Path
    config: dict[str, Any] | None
    environment: dict[str, Any] | None
    rows: list[Row]
    num_records: int
    """0 where the rows are the summary's."""
    lacks: str
    """The file for want of which they are; empty where the rows are made of records."""
    intervals: dict[Cell, tuple[float, float]]
    """95 % intervals of tokens per step."""

    @property
    def conditions(self) -> dict[str, Any]:
        """What must be the same for numbers to be comparable. A run that doesn't tell is like no other."""
        if self.config is None or self.environment is None:
            return {"folder": str(self.directory), "dtype": self.rows[0]["dtype"]}
        options = {name: value for name, value in self.config.items() if name not in VARIES_WITHIN_A_TABLE}
        place = dict(self.environment)
        if place["device"] != "cpu":
            del place["num_threads"]  # which launchers set as they like
        return {**options, "environment": place}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs under the same conditions: target, options and environment."""

    runs: list[Run]
    entries: list[Entry]
    differs_in: list[str]
    """Conditions in which it differs from the first group, or ANYTHING."""

    @property
    def title(self) -> str:
        config, dtype = self.runs[0].config, self.entries[0].row["dtype"]
        return f"{config['target']['name']} in {dtype}" if config else f"{self.runs[0].name} (its run.json is missing)"

    def settings(self) -> Iterator[tuple[str, list[Entry]]]:
        """The rows that one table can hold: of one suite, temperature and batch size; with a caption that says so."""
        tables: dict[tuple[str, str, float, int], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            tables[cell_of(entry.row)[:4]].append(entry)
        for (_, _, temperature, batch_size), entries in tables.items():
            caption = f"{self.suite_name(entries[0])}, {decoding(temperature)}, batch size {batch_size}"
            yield caption, sorted(entries, key=lambda entry: not entry.is_baseline)

    def suite_name(self, entry: Entry) -> str:
        """The suite, with its prompts' revision where other prompts of that suite were measured too."""
        suite, revision = entry.row["suite"], entry.row["prompt_set_revision"]
        revisions = {other.row["prompt_set_revision"] for other in self.entries if other.row["suite"] == suite}
        return suite if len(revisions) == 1 else f"{suite} (prompts {revision[:8]})"


def decoding(temperature: float) -> str:
    """In a reader's words."""
    return f"temperature {temperature:g}" if temperature > 0 else "greedy"


def cell_of(row: Row) -> Cell:
    return row["suite"], row["prompt_set_revision"], row["temperature"], row["batch_size"], row["method"]


def read_groups(directories: Sequence[Path]) -> list[Group]:
    """The runs of these folders, by what may be compared, in the order given.

    Raises ValueError for a folder given twice, one that holds no finished run, and one whose files contradict each other.
    """
    resolved = [directory.resolve() for directory in directories]
    if twice := [str(path) for index, path in enumerate(resolved) if path in resolved[:index]]:
        raise ValueError(f"{', '.join(twice)} is given twice; give each folder once")
    runs = [read_run(path, name) for path, name in zip(resolved, short_names(resolved), strict=True)]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.conditions, sort_keys=True), []).append(run)
    made = []
    for members in groups.values():
        differs_in = list(differences(runs[0].conditions, members[0].conditions))
        if members[0] is not runs[0] and (members[0].config is None or runs[0].config is None):
            differs_in = [ANYTHING]
        made.append(Group(runs=members, entries=_entries(members), differs_in=differs_in))
    return made


def read_run(directory: Path, name: str) -> Run:
    """A finished run. Raises ValueError as `read_finished` does."""
    finished = read_finished(directory)
    config, environment = _described(directory / RUN_FILE)
    return Run(
        name=name,
        directory=directory,
        config=config,
        environment=environment,
        rows=finished.rows,
        num_records=len(finished.records),
        lacks=finished.lacks,
        intervals=_intervals(finished.records),
    )


def _described(path: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Configuration and environment of a run, maybe of an earlier version, whose options were fewer."""
    if not path.is_file():
        return None, None
    found = read_json(path)
    config, environment = (found.get(name) if isinstance(found, dict) else None for name in ("config", "environment"))
    needed = ((config, ("target", "methods", "suites")), (environment, ("device", "cpu", "num_threads")))
    if not all(isinstance(part, dict) and part.keys() >= set(keys) for part, keys in needed):
        raise ValueError(f"{path} doesn't tell how the run was made; restore it, or take it away and report the summary alone")
    return config, environment


def short_names(directories: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell them apart; `eval`, which every run has, tells nothing."""
    parts = [path.parts[:-1] if path.name == "eval" and len(path.parts) > 2 else path.parts for path in directories]
    length = 1
    while len({each[-length:] for each in parts}) < len(parts) and length < max(map(len, parts)):
        length += 1
    names = ["/".join(each[-length:]) for each in parts]
    return names if len(set(names)) == len(names) else [str(path) for path in directories]


def _intervals(records: Iterable[EvalRecord]) -> dict[Cell, tuple[float, float]]:
    """The intervals of tokens per step that these records give."""
    sums: dict[Cell, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for record in records:
        if not record.profiled:
            place = record.suite, record.prompt_set_revision, record.temperature
            total = sums[*place, record.batch_size, record.method][record.prompt_id]
            total[:] = total[0] + record.num_verify_tokens, total[1] + record.num_steps
    intervals = {cell: _interval(list(prompts.values())) for cell, prompts in sums.items()}
    return {cell: interval for cell, interval in intervals.items() if interval is not None}


def _interval(prompts: Sequence[Sequence[int]]) -> tuple[float, float] | None:
    """95 % interval of tokens per step: a percentile bootstrap over prompts, whose tokens and steps are summed."""
    counts = np.array(prompts)
    if len(counts) < 2 or not counts[:, 1].all():
        return None
    drawn = np.random.default_rng(0).multinomial(len(counts), [1 / len(counts)] * len(counts), size=NUM_RESAMPLES) @ counts
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)


def _entries(runs: Sequence[Run]) -> list[Entry]:
    """The rows of comparable runs. What several of them measured, or call the same though it isn't, is told apart."""
    described = {run.name: (run.config or {}).get("methods", {}) for run in runs}
    drafters: dict[str, set[str]] = defaultdict(set)
    times_measured: Counter[Cell] = Counter()
    for run in runs:
        times_measured.update(cell_of(row) for row in run.rows)
        for method, own in described[run.name].items():
            drafters[_label(method)[0]].add(own["weights"])
    twice = {cell[-1] for cell, count in times_measured.items() if count > 1}
    entries = []
    for run in runs:
        for row in run.rows:
            method = row["method"]
            own = described[run.name].get(method)
            label, detail = _label(method)
            contested = method in twice or len(drafters[label]) > 1
            entries.append(
                Entry(
                    run=run.name,
                    row=row,
                    label=f"{label} [{run.name}]" if contested else label,
                    detail=detail,
                    options=_options(own) if own else _options_in(method),
                    weights=own["weights"] if own else None,
                    tokens_per_step_ci95=run.intervals.get(cell_of(row)),
                )
            )
    return entries


def _label(method: str) -> tuple[str, str]:
    """A method's name in two parts: what drafts, and in which setting."""
    if method == BASELINE:
        return "plain decoding", ""
    words = method.split(" ")
    first = next((index for index, word in enumerate(words) if "=" in word), len(words))
    kind, place = words[0], " ".join(words[1:first]).removesuffix("/drafter")
    settings = re.split(r" (?=\w+=)", " ".join(words[first:]))
    return (kind if place in ("", kind) else f"{kind}, {place}"), ", ".join(each.replace("=", " ", 1) for each in settings)


def _options(described: dict[str, Any]) -> dict[str, Any]:
    """A drafter's options as the run tells them; none where tuning turned it off."""
    return {} if described["setting"] is None else {**described["config"], **described["setting"]}


def _options_in(method: str) -> dict[str, Any]:
    pairs = (word.split("=", 1) for word in method.split(" ") if "=" in word)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}
