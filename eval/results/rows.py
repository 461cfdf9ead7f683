"""Rows of `summary.json`: the results of each method on each suite."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic can't read typing's before Python 3.12

from ..config import EvalConfig
from ..records.method_names import name_of_key
from ..records.records import BASELINE, EvalRecord, GroupKey
from ..records.run_files import DrafterFacts, OutOfMemory, Roofline
from .figures import NO_FIGURES, Figures, compute_figures
from .lossless import Mismatch


class Conditions(TypedDict):
    """Conditions of a measurement: method, prompts, settings and the drafter's training."""

    method: str
    """Key of the method in the records, which never changes."""
    name: NotRequired[str]
    """Name of the method in tables, plots and reports (`method_names`)."""
    suite: str
    prompt_set_revision: str
    """Digest of the prompts."""
    prompt_set_source: str | None
    """Data set of the Hub, as ID@COMMIT."""
    dtype: str
    quantization: NotRequired[str]
    """Options that quantised the target's weights when they were loaded; empty for unquantised
    weights."""
    temperature: float
    batch_size: int
    """Prompts decoded together, by the method and by the baseline."""
    pace: NotRequired[str | None]
    """Pace of a merged drafter (`EvalRecord.pace`)."""
    max_new_tokens: int
    num_repeats: int
    parameters: int | None
    """Parameters of the drafter, without those of the target."""
    training: dict[str, Any] | None
    """Facts about the drafter's training (TrainingFacts)."""
    command: NotRequired[str]
    """Command that measures the disturbed answers again. Only disturbed rows have it, if it is
    known."""
    roofline: dict[str, Any] | None
    """None for a target in stages."""
    budget: NotRequired[dict[str, Any] | None]
    """Facts about the target's memory budget (`BudgetFacts`); None without one."""
    stage_layers: NotRequired[list[int] | None]
    """Number of layers of each of the target's stages; None for a target in one process."""
    pipelined: NotRequired[bool]
    """Whether the drafter drafts while the stages of the target read."""


class Row(Conditions, Figures):
    """Results of a method on a suite at a temperature and a batch size."""


def build_rows(
    records: Sequence[EvalRecord],
    mismatches: Sequence[Mismatch],
    *,
    config: EvalConfig,
    dtype: str,
    roofline: Roofline | None,
    num_skipped: Mapping[GroupKey, int],
    drafters: Mapping[str, DrafterFacts],
    out_of_memory: Sequence[OutOfMemory] = (),
    on_cpu: bool = False,
) -> list[Row]:
    """Compute one row per suite, temperature, batch size and method.

    Rows have the order of the records. In each group the baseline comes first, and methods that ran
    out of memory come last. `drafters` is by method. `on_cpu` decides how few answers
    can be judged (`attempts.ratios`).
    """
    # 1. Go through the groups of suite, temperature and batch size.
    rows: list[Row] = []
    suites = dict.fromkeys([*(record.suite for record in records), *(missing.suite for missing in out_of_memory)])
    for group_key in product(suites, config.temperatures, config.batch_sizes):
        group = [record for record in records if record.group_key == group_key]
        # 2. A row for each method with records, the baseline first.
        names = dict.fromkeys(record.method for record in group)
        for method in sorted(names, key=lambda name: name != BASELINE):
            of_method = [record for record in group if record.method == method]
            plain = [record for record in group if record.method == BASELINE]
            keys = {record.key for record in of_method}
            wrong = [item for item in mismatches if item.record.key in keys]
            skipped = num_skipped.get(group_key, 0)
            conditions = _conditions(of_method[0], config, dtype, roofline, drafters.get(method))
            figures = compute_figures(plain, of_method, wrong, roofline, skipped, config.seed, on_cpu=on_cpu)
            rows.append({**conditions, **figures})
        # 3. If the baseline is broken, no method of the group has a speedup.
        of_group = rows[-len(names) :] if names else []
        if any(is_broken(row) and row["method"] == BASELINE for row in of_group):
            cause = "is unproven" if any(is_unproven(row) and row["method"] == BASELINE for row in of_group) else "is wrong"
            for row in of_group:
                _withdraw(row, cause)
        # 4. Rows without figures, for methods that ran out of memory.
        failures = sorted(
            (failure for failure in out_of_memory if failure.group_key == group_key),
            key=lambda failure: failure.method != BASELINE,
        )
        for failure in failures:
            conditions = _conditions(failure, config, dtype, roofline, drafters.get(failure.method))
            rows.append({**conditions, **NO_FIGURES})
    return rows


def _withdraw(row: Row, cause: str) -> None:
    """Remove a row's speedup because plain decoding was wrong or is unproven.

    Without a correct baseline no comparison in the group is valid.
    """
    row["speedup"], row["speedup_ci95"], row["ceiling"], row["lossless"] = None, None, None, False
    row["median_speedup"], row["num_faster"], row["num_compared"] = None, 0, 0
    row["exceeds"], row["processor_speedup"], row["timeless"] = "", None, False
    for values in row["by_category"].values():
        values.update(speedup=None, speedup_ci95=None)
    if row["method"] != BASELINE:
        verdict = "NO" if cause == "is wrong" else "unproven"
        row["lossless_label"] = f"{verdict}: plain decoding {cause} ({row['lossless_label']} against it)"


def method_name(row: Row) -> str:
    """Look up the name of the row's method in tables and plots."""
    return row["name"] if "name" in row else name_of_key(row["method"])


def decoding_name(row: Row) -> str:
    """Describe how the row's answers were decoded: temperature and batch size."""
    name = f"temperature {row['temperature']:g}" if row["temperature"] > 0 else "greedy"
    return name if row["batch_size"] == 1 else f"{name}, batch size {row['batch_size']}"


def is_broken(row: Row) -> bool:
    """Check whether a method that should be lossless gave an unexplained answer."""
    return row["speedup"] is None and not row["out_of_memory"] and not is_timeless(row)


def is_timeless(row: Mapping[str, Any]) -> bool:
    """Check whether a row has no speeds only because the clock jumped in all of its answers."""
    return bool(row.get("timeless"))


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


def _conditions(
    source: EvalRecord | OutOfMemory, config: EvalConfig, dtype: str, roofline: Roofline | None, drafter: DrafterFacts | None
) -> Conditions:
    return {
        "method": source.method,
        "suite": source.suite,
        "prompt_set_revision": source.prompt_set_revision,
        "prompt_set_source": source.prompt_set_source,
        "dtype": dtype,
        "temperature": source.temperature,
        "batch_size": source.batch_size,
        "pace": source.pace if isinstance(source, EvalRecord) else None,
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.repeats,
        "parameters": drafter.parameters if drafter else None,
        "training": drafter.training if drafter else None,
        "roofline": None if roofline is None else roofline.to_json(),
    }


def loop_share(row: Row) -> float:
    """Compute the share of a row's answers that end in a repeated cycle.

    It is 0 for rows of older versions, which lack the count.
    """
    num_answers = row["num_turns"] * row["num_repeats"]
    return row.get("num_loops", 0) / num_answers if num_answers else 0.0
