"""Rows of `summary.json`: the results of each method on each suite."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic can't read typing's before Python 3.12

from ...data.files import read_dataclass
from ..records.names import SUMMARY_FILE
from ..records.records import BASELINE, EvalRecord
from ..records.run_files import Facts, OutOfMemory, RunInfo
from .figures import NO_FIGURES, Figures, compute_figures
from .lossless import Mismatch, judged


class Conditions(TypedDict):
    """Conditions of a measurement: method, prompts, settings and the drafter's training."""

    method: str
    """Name of the method in the records."""
    label: str
    """The drafter and its setting in words, as tables, plots and reports show them."""
    suite: str
    prompt_set_revision: str
    """Digest of the prompts."""
    prompt_set_source: str | None
    """Data set of the Hub, as ID@COMMIT."""
    dtype: str
    quantization: str
    """Options that quantised the target's weights when they were loaded; empty for unquantised
    weights."""
    temperature: float
    batch_size: int
    """Prompts decoded together, by the method and by the baseline."""
    pace: str | None
    """Pace of a merged drafter (`EvalRecord.pace`)."""
    max_new_tokens: int
    num_repeats: int
    parameters: int | None
    """Parameters of the drafter, without those of the target."""
    training: dict[str, Any] | None
    """Facts about the drafter's training (TrainingFacts)."""
    roofline: dict[str, Any] | None
    """None for a target in stages."""
    budget: dict[str, Any] | None
    """Facts about the target's memory budget (`BudgetFacts`); None without one."""
    stage_layers: list[int] | None
    """Number of layers of each of the target's stages; None for a target in one process."""
    pipelined: bool
    """Whether the drafter drafts while the stages of the target read."""
    tree_tokens: NotRequired[Any]
    """Percentiles that earlier versions computed; nothing reads them."""


class Row(Conditions, Figures):
    """Results of a method on a suite at a temperature and a batch size."""


def build_rows(records: Sequence[EvalRecord], mismatches: Sequence[Mismatch], info: RunInfo, facts: Facts) -> list[Row]:
    """Compute one row per suite, temperature, batch size and method.

    Rows have the run's order of suites, temperatures and batch sizes. In each group the baseline
    comes first, and methods that ran out of memory come last.
    """
    # 1. Go through the groups of suite, temperature and batch size.
    config = info.config
    rows: list[Row] = []
    on_cpu = info.environment.device == "cpu" and facts.budget is None  # streamed weights make it wait
    for group_key in product(config["suites"], config["temperatures"], config["batch_sizes"]):
        group = [record for record in records if record.group_key == group_key]
        plain = [record for record in group if record.method == BASELINE]
        num_skipped = facts.num_turns[group_key[0]] - sum(record.is_reference for record in plain)
        # 2. A row for each method with records, the baseline first.
        for method in sorted(dict.fromkeys(record.method for record in group), key=lambda name: name != BASELINE):
            of_method = [record for record in group if record.method == method]
            figures = compute_figures(plain, of_method, mismatches, info.roofline, num_skipped, config["seed"], on_cpu=on_cpu)
            rows.append({**_conditions(of_method[0], info, facts), **figures})
        # 3. Rows without figures, for methods that ran out of memory.
        failures = [failure for failure in facts.out_of_memory if failure.group_key == group_key]
        failures.sort(key=lambda failure: failure.method != BASELINE)
        without_figures: list[Row] = [{**_conditions(failure, info, facts), **NO_FIGURES} for failure in failures]
        rows += without_figures
    return rows


def group_name(row: Row) -> str:
    """Name the group of a row: its suite, temperature and batch size."""
    return f"{row['suite']}, {decoding_name(row)}"


def row_name(row: Row) -> str:
    """Name a row: its method and its group."""
    return f"{row['label']} on {row['suite']} ({decoding_name(row)})"


def decoding_name(row: Row) -> str:
    """Describe how the row's answers were decoded: temperature and batch size."""
    name = f"temperature {row['temperature']:g}" if row["temperature"] > 0 else "greedy"
    return name if row["batch_size"] == 1 else f"{name}, batch size {row['batch_size']}"


def speedup_text(row: Row) -> str:
    """Describe a row's speedup with its interval, and whether it is noisy."""
    interval = "" if row["speedup_ci95"] is None else " [{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
    return f"{row['speedup']:.2f}x{interval}" + ", noisy" * row["noisy"]


def is_broken(row: Row) -> bool:
    """Check whether a method that should be lossless gave an unexplained answer."""
    return row["speedup"] is None and not row["out_of_memory"]


def is_unproven(row: Row) -> bool:
    """Check whether a row is broken only because audits ran out of memory.

    No answer of such a row is known to be wrong.
    """
    return is_broken(row) and row["lossless_label"].startswith("unproven")


def is_wrong(row: Mapping[str, Any]) -> bool:
    """Check whether a row's answers differ from the target's, by mistake or by a lossy rule.

    Differences that arithmetic noise explains don't count.
    """
    return row["lossless"] is False and row["num_within_noise"] < max(1, row["num_mismatched_prompts"])


def fault(row: Row) -> str:
    """Describe the fault of a broken row in a word or two."""
    return "unproven" if is_unproven(row) else "not lossless"


def is_lossy(row: Row) -> bool:
    """Check whether a row's answers differ because its rule doesn't claim to be lossless.

    Such a row has a speedup, which must be marked.
    """
    return is_wrong(row) and not is_broken(row)


def units(row: Row) -> str:
    """Name the units of the row's intervals: prompts, or batches of prompts."""
    return "prompts" if row["batch_size"] == 1 else "batches"


def depends_on_clock(row: Row) -> bool:
    """Check whether the row's draft trees depended on the clock."""
    return row["pace"] == "expected"


def loop_share(row: Row) -> float:
    """Compute the share of a row's answers that end in a repeated cycle."""
    return row["num_loops"] / row["num_turns"] if row["num_turns"] else 0.0


def _conditions(source: EvalRecord | OutOfMemory, info: RunInfo, facts: Facts) -> Conditions:
    drafter = facts.drafters.get(source.method)
    return {
        "method": source.method,
        "label": source.label,
        "suite": source.suite,
        "prompt_set_revision": source.prompt_set_revision,
        "prompt_set_source": source.prompt_set_source,
        "dtype": info.dtype,
        "quantization": info.config["target"].get("quantization", ""),
        "temperature": source.temperature,
        "batch_size": source.batch_size,
        "pace": source.pace if isinstance(source, EvalRecord) else None,
        "max_new_tokens": info.config["max_new_tokens"],
        "num_repeats": info.config["repeats"],
        "parameters": drafter.parameters if drafter else None,
        "training": drafter.training if drafter else None,
        "roofline": None if info.roofline is None else info.roofline.to_json(),
        "budget": None if facts.budget is None else asdict(facts.budget),
        "stage_layers": info.stage_layers,
        "pipelined": info.is_pipelined(source.method),
    }


def complete(records: Iterable[EvalRecord], out_of_memory: Iterable[OutOfMemory]) -> list[EvalRecord]:
    """Select the records of methods that did not run out of memory."""
    left_out = {failure.cell for failure in out_of_memory}
    return [record for record in records if record.cell not in left_out]


def rows_of(records: Sequence[EvalRecord], info: RunInfo, facts: Facts) -> list[Row]:
    """Build the rows of a run from its `complete` records."""
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
