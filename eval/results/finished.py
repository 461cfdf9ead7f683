"""A finished run's rows: made from its records, or taken from its summary where that is all that is left."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...data.files import read_json, read_sealed
from ..config import EvalConfig, SuiteConfig
from ..records.checks import check_records
from ..records.names import FACTS_FILE, RECORDS_FILE, RUN_FILE, SUMMARY_FILE
from ..records.records import EvalRecord, GroupKey, read_records
from ..records.run_files import Facts, OutOfMemory, RunInfo, read_info
from .lossless import judged
from .rows import Row, build_rows

ADDED_LATER = {
    "draft_seconds_per_step": None,
    "parameters": None,
    "training": None,
    "tree_tokens": None,
    "num_batches": None,
    "answer_tokens_per_second": None,
    "out_of_memory": False,
    "num_unaudited": 0,
}
"""Keys that the summaries of earlier versions lack, and what stands for them."""
NEEDED = {
    *("method", "suite", "prompt_set_revision", "dtype", "temperature", "batch_size", "max_new_tokens", "num_prompts"),
    "num_tokens",
    *("tokens_per_step", "accepted_histogram", "tokens_per_second", "decode_tokens_per_second", "speedup", "speedup_ci95"),
    *("time_split", "roofline", "roofline_fraction", "lossless", "lossless_label", "num_mismatched_prompts"),
    *("num_within_noise", "by_category"),
}
"""Keys of a row without which there is nothing to report."""
TOLERANCE = 1e-6
"""Between a figure and the same one made by another version of numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a run's folder tells."""

    rows: list[Row]
    records: list[EvalRecord]
    """Those that the rows are made of; empty where these are the summary's."""
    lacks: str
    """The file for want of which they are; empty where they are made of records."""


def complete(
    records: Iterable[EvalRecord], out_of_memory: Iterable[OutOfMemory], without_profile: Iterable[OutOfMemory] = ()
) -> list[EvalRecord]:
    """The records without those of methods that ran out of memory where they were made, and so lack answers; and without
    the profiled ones of methods that ran out of it in their profile."""
    left_out, unprofiled = ({missing.cell for missing in lost} for lost in (out_of_memory, without_profile))
    return [record for record in records if record.cell not in left_out and not (record.profiled and record.cell in unprofiled)]


def rows_of(records: Iterable[EvalRecord], info: RunInfo, facts: Facts) -> list[Row]:
    """The rows of a run, in its order of suites, temperatures and batch sizes.

    Raises ValueError where records are missing, and where answers weren't audited that must be.
    """
    config = info.config
    order = list(config["suites"])
    if missing := sorted(config["suites"].keys() - facts.num_turns.keys()):
        raise ValueError(f"the evaluation of {', '.join(missing)} isn't finished; finish it with the command that began it")
    records = complete(records, facts.out_of_memory, facts.without_profile)
    records.sort(key=lambda record: order.index(record.suite))
    names = ("max_new_tokens", "temperatures", "batch_sizes", "repeats", "seed")
    return build_rows(
        records,
        judged(records, info.dtype, facts.audits, facts.unaudited),
        config=EvalConfig(suites=[SuiteConfig(name=name) for name in order], **{name: config[name] for name in names}),
        dtype=info.dtype,
        roofline=info.roofline,
        num_skipped=_num_skipped(records, facts.num_turns),
        drafters=facts.drafters,
        out_of_memory=facts.out_of_memory,
    )


def _num_skipped(records: Iterable[EvalRecord], num_turns: Mapping[str, int]) -> dict[GroupKey, int]:
    """The turns of each suite that were left out as too long, by suite, temperature and batch size."""
    answered = Counter(record.group_key for record in records if record.is_reference)
    return {key: num_turns[key[0]] - count for key, count in answered.items()}


def read_finished(directory: Path) -> Finished:
    """What a finished run left. Raises ValueError where there is nothing, where its files are damaged, and where its summary
    isn't that of its records."""
    summary = directory / SUMMARY_FILE
    lacking = [name for name in (RECORDS_FILE, RUN_FILE, FACTS_FILE) if not (directory / name).is_file()]
    if lacking:
        return Finished(rows=_read_summary(summary), records=[], lacks=lacking[0])
    info, path = read_info(directory / RUN_FILE), directory / RECORDS_FILE
    facts = read_sealed(Facts, directory / FACTS_FILE)
    records = list(read_records(path).values())
    if not records:
        raise ValueError(f"{path} holds no record; finish the evaluation with the command that began it")
    check_records(records, info, path)
    try:
        rows = rows_of(records, info, facts)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    if summary.is_file():
        _check_summary(rows, _read_summary(summary), summary)
    return Finished(rows=rows, records=complete(records, facts.out_of_memory, facts.without_profile), lacks="")


def _read_summary(path: Path) -> list[Row]:
    if not path.is_file():
        raise ValueError(
            f"{path.parent} has no {path.name}: it is no finished evaluation. Give the `eval/` folder of a run, or finish it "
            "with the command that began it"
        )
    found = read_json(path)
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"{path} is no list of rows; restore it, or run the evaluation's command again")
    for number, row in enumerate(found, start=1):
        if missing := sorted(NEEDED - row.keys()):
            raise ValueError(f"{path}, row {number}: missing keys {', '.join(missing)}; run the evaluation's command again")
    return cast("list[Row]", [{**ADDED_LATER, **row} for row in found])


def _check_summary(rows: Sequence[Row], summary: Sequence[Row], path: Path) -> None:
    """Raise ValueError where a summary says something else than its records."""
    places = [
        [(row["suite"], row["temperature"], row["batch_size"], row["method"]) for row in each] for each in (rows, summary)
    ]
    remedy = (
        f"{path} and {RECORDS_FILE} contradict each other: {{}}. Run the evaluation's command again, which writes {path.name}"
    )
    if places[0] != places[1]:
        odd = next(iter({*places[0]} ^ {*places[1]}), "the order of their rows")
        raise ValueError(remedy.format(f"one of them lacks {odd}" if isinstance(odd, tuple) else f"they differ in {odd}"))
    for row, told in zip(rows, summary, strict=True):
        for name, value in row.items():
            if not _agree(value, cast("dict[str, Any]", told).get(name)):
                at = f"{row['method']} on {row['suite']}, temperature {row['temperature']:g}, batch size {row['batch_size']}"
                raise ValueError(remedy.format(f"{name} of {at} is {value} by the records and {told.get(name)} in the summary"))


def _agree(value: Any, told: Any) -> bool:
    """Whether JSON tells the value, but for rounding."""
    if isinstance(value, dict):
        return isinstance(told, dict) and value.keys() == told.keys() and all(_agree(value[key], told[key]) for key in value)
    if isinstance(value, list | tuple):
        return isinstance(told, list) and len(value) == len(told) and all(map(_agree, value, told))
    if isinstance(value, float) and isinstance(told, float | int):
        return math.isclose(value, told, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(value == told)
