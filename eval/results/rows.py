"""Rows of `summary.json`: the results of each method on each suite."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NotRequired, cast

import numpy as np
from typing_extensions import TypedDict  # pydantic can't read typing's before Python 3.12

from ...data.loops import ends_in_a_loop
from ..config import EvalConfig
from ..records.method_names import name_of_key
from ..records.records import BASELINE, EvalRecord, GroupKey
from ..records.run_files import DrafterFacts, OutOfMemory, Roofline
from . import stats
from .lossless import Mismatch, judge
from .outliers import find_outliers


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
    max_new_tokens: int
    num_repeats: int
    parameters: int | None
    """Parameters of the drafter, without those of the target."""
    training: dict[str, Any] | None
    """Facts about the drafter's training (TrainingFacts)."""
    roofline: dict[str, Any]


class Figures(TypedDict):
    """Figures of a method.

    None stands for a number that doesn't exist, or that must not be shown.
    """

    num_prompts: int
    num_turns: int
    """Answers in each repeat."""
    num_batches: int
    """Units of the intervals: batches, or prompts at batch size 1."""
    num_skipped: int
    """Turns that were skipped because they exceed the target's context window."""
    num_truncated: int
    """Answers (of all repeats) that ended at the token limit."""
    num_loops: NotRequired[int]
    """Answers (of all repeats) that end in a repeated cycle of tokens (`ends_in_a_loop`)."""
    num_tokens: int
    tokens_per_step: float | None
    """Tokens per verify step of one answer."""
    tokens_per_step_ci95: tuple[float, float] | None
    """Bootstrap interval over prompts; None for fewer than two prompts."""
    mean_accepted: float | None
    accepted_histogram: list[int]
    draft_tokens_per_step: float | None
    tokens_per_second: float | None
    """Throughput of the whole batch."""
    answer_tokens_per_second: float | None
    """Throughput of one answer in its batch (`stats.answer_tokens_per_second`)."""
    decode_tokens_per_second: float | None
    speedup: float | None
    """Speedup over plain decoding. None where a method that claims to be lossless is not: a wrong
    answer has no speed."""
    speedup_ci95: tuple[float, float] | None
    rho: float | None
    ceiling: float | None
    """tau / (1 + rho): computed, not measured. None if there is no speedup."""
    draft_seconds_per_step: float | None
    time_split: dict[str, float] | None
    tree_tokens: dict[str, list[float]] | None
    """Draft tokens per step: before and after shared prefixes are merged, and as read
    (`stats.tree_tokens`)."""
    roofline_fraction: float | None
    """Decode tokens per second over the roofline of plain decoding. A plain step reads the weights
    once for a token of every row that is not finished."""
    lossless: bool | None
    """Whether every answer equals the baseline's, token for token. None where random drafts make it
    a different sample by design."""
    lossless_label: str
    num_mismatched_prompts: int
    num_within_noise: int
    """Mismatched prompts that the audit explains by arithmetic noise (in low precision or in
    samples)."""
    num_unaudited: int
    """Mismatched prompts without a known error whose audit ran out of memory."""
    first_mismatch: dict[str, Any] | None
    median_speedup: NotRequired[float | None]
    """Median of the speedups over the units of the interval. It and the next two fields are None
    and 0 for plain decoding, and for methods without a speedup."""
    num_faster: NotRequired[int]
    """Units in which the method was faster than plain decoding."""
    num_compared: NotRequired[int]
    """Units in which the method was compared with plain decoding."""
    processor_seconds_per_token: NotRequired[float | None]
    """Processor seconds of all threads per token of the answers, prefill included."""
    processor_speedup: NotRequired[float | None]
    """Plain decoding's processor seconds per token over the method's."""
    exceeds: NotRequired[str]
    """The bound that the speedup exceeds: "tokens per step" (an error of measurement), "ceiling",
    or an empty text."""
    num_repeated: NotRequired[int]
    """Answers (of all repeats) that were decoded again because a timing was disturbed."""
    disturbed: NotRequired[list[dict[str, Any]]]
    """Answers that are still disturbed in the attempt that counts: `prompt_ids` of the batch,
    `turn`, `repeat`, `side` ("method" or "baseline"), and `ratio` to the usual time (0 where the
    clock jumped, so that there is no positive time)."""
    outliers: NotRequired[list[dict[str, Any]]]
    """Slow answers in summaries of older versions, which have no `disturbed`."""
    by_category: dict[str, dict[str, Any]]
    out_of_memory: bool
    """Whether the method or plain decoding ran out of memory here, so that there are no figures."""


class Row(Conditions, Figures):
    """Results of a method on a suite at a temperature and a batch size."""


NO_FIGURES = cast(
    "Figures",
    {
        **{name: 0 if name.startswith("num_") else None for name in Figures.__annotations__ if name != "outliers"},
        "accepted_histogram": [],
        "exceeds": "",
        "disturbed": [],
        "by_category": {},
        "lossless_label": "-",
        "out_of_memory": True,
    },
)
"""Figures of a method that ran out of memory."""


def build_rows(
    records: Sequence[EvalRecord],
    mismatches: Sequence[Mismatch],
    *,
    config: EvalConfig,
    dtype: str,
    roofline: Roofline,
    num_skipped: Mapping[GroupKey, int],
    drafters: Mapping[str, DrafterFacts],
    out_of_memory: Sequence[OutOfMemory] = (),
) -> list[Row]:
    """Compute one row per suite, temperature, batch size and method.

    Rows have the order of the records. In each group the baseline comes first, and methods that ran
    out of memory come last. `drafters` is by method.
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
            rows.append({**conditions, **_figures(plain, of_method, wrong, roofline, skipped, config.seed)})
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


def _conditions(
    source: EvalRecord | OutOfMemory, config: EvalConfig, dtype: str, roofline: Roofline, drafter: DrafterFacts | None
) -> Conditions:
    return {
        "method": source.method,
        "suite": source.suite,
        "prompt_set_revision": source.prompt_set_revision,
        "prompt_set_source": source.prompt_set_source,
        "dtype": dtype,
        "temperature": source.temperature,
        "batch_size": source.batch_size,
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.repeats,
        "parameters": drafter.parameters if drafter else None,
        "training": drafter.training if drafter else None,
        "roofline": roofline.to_json(),
    }


def _figures(
    plain_records: Sequence[EvalRecord],
    method_records: Sequence[EvalRecord],
    mismatches: Sequence[Mismatch],
    roofline: Roofline,
    num_skipped: int,
    seed: int,
) -> Figures:
    # 1. Split the records: timed answers give the speeds, profiled ones the time split and what
    # follows from it.
    sides = (plain_records, method_records)
    plain, timed = ([record for record in records if not record.profiled] for records in sides)
    profiled_plain, profiled = ([record for record in records if record.profiled] for records in sides)

    # 2. Compare the method with plain decoding.
    is_baseline = timed[0].method == BASELINE
    lossless = judge(method_records, mismatches)
    ratio, interval, categories = _speeds(plain, timed, is_broken=lossless.broken, seed=seed)
    tau = stats.tokens_per_step(timed)
    rho = None if is_baseline else stats.relative_draft_cost(profiled_plain, profiled)
    histogram = stats.accepted_histogram(timed)

    # 3. The row.
    return {
        "num_prompts": stats.num_prompts(timed),
        "num_turns": len({(record.prompt_id, record.turn) for record in timed}),
        "num_batches": len({record.unit for record in timed}),
        "num_skipped": num_skipped,
        "num_truncated": sum(record.truncated for record in timed),
        "num_loops": sum(map(_ends_in_a_loop, timed)),
        "num_tokens": sum(len(record.token_ids) for record in timed),
        "tokens_per_step": tau,
        "tokens_per_step_ci95": _steps_interval(timed),
        "mean_accepted": stats.mean_accepted(histogram),
        "accepted_histogram": histogram,
        "draft_tokens_per_step": stats.draft_tokens_per_step(timed),
        "tokens_per_second": stats.tokens_per_second(timed),
        "answer_tokens_per_second": stats.answer_tokens_per_second(timed),
        "decode_tokens_per_second": stats.decode_tokens_per_second(timed),
        "speedup": ratio,
        "speedup_ci95": interval,
        "rho": rho,
        "ceiling": None if lossless.broken else stats.ceiling(tau, rho),
        "draft_seconds_per_step": None if is_baseline else stats.draft_seconds_per_step(profiled),
        "time_split": stats.time_split(profiled),
        "tree_tokens": stats.tree_tokens(profiled),
        "roofline_fraction": _roofline_fraction(timed, roofline),
        "lossless": False if lossless.lossy else None if lossless.by_rule and not mismatches else not mismatches,
        "lossless_label": lossless.label,
        "num_mismatched_prompts": lossless.num_mismatched,
        "num_within_noise": lossless.num_within_noise,
        "num_unaudited": lossless.num_unaudited,
        "first_mismatch": lossless.first,
        "median_speedup": None,
        "num_faster": 0,
        "num_compared": 0,
        "processor_seconds_per_token": None,
        "processor_speedup": None,
        "exceeds": "",
        "num_repeated": 0,
        "disturbed": [{"side": "method", **asdict(outlier)} for outlier in find_outliers(timed)],
        "by_category": categories,
        "out_of_memory": False,
    }


def _ends_in_a_loop(record: EvalRecord) -> bool:
    """Check whether an answer ends in a repeated cycle; a final stop token doesn't count."""
    return ends_in_a_loop(record.token_ids if record.truncated else record.token_ids[:-1])


def loop_share(row: Row) -> float:
    """Compute the share of a row's answers that end in a repeated cycle.

    It is 0 for rows of older versions, which lack the count.
    """
    num_answers = row["num_turns"] * row["num_repeats"]
    return row.get("num_loops", 0) / num_answers if num_answers else 0.0


def slow_answers(row: Row) -> list[dict[str, Any]]:
    """List the row's disturbed answers, or the outliers of a summary of an older version."""
    return row["disturbed"] if "disturbed" in row else row.get("outliers", [])


def _steps_interval(records: Sequence[EvalRecord]) -> tuple[float, float] | None:
    """Compute the 95 % interval of tokens per step over prompts.

    Returns None if a prompt's answers took no step.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        total = sums[record.prompt_id]
        total[:] = total[0] + record.num_verify_tokens, total[1] + record.num_steps
    counts = np.array(list(sums.values()))
    return stats.bootstrap(counts, stats.ratio, seed=0)[1] if counts[:, 1].all() else None


def _speeds(
    plain: Sequence[EvalRecord], timed: Sequence[EvalRecord], *, is_broken: bool, seed: int
) -> tuple[float | None, tuple[float, float] | None, dict[str, dict[str, Any]]]:
    """Compute the speedup, its interval, and the results of each category.

    A broken method has no speed anywhere.
    """
    categories = stats.by_category(plain, timed, seed=seed)
    if is_broken:
        no_speed = {"speedup": None, "speedup_ci95": None}
        return None, None, {name: {**figures, **no_speed} for name, figures in categories.items()}
    if timed[0].method == BASELINE:
        return 1.0, None, categories
    return *stats.speedup(plain, timed, seed=seed), categories


def _roofline_fraction(records: Sequence[EvalRecord], roofline: Roofline) -> float | None:
    """Compute decoding speed as a share of plain decoding's bound for the same number of rows.

    Returns None if there was no step.
    """
    speed, num_rows = stats.decode_tokens_per_second(records), stats.rows_per_step(records)
    return None if speed is None or num_rows is None else speed / (num_rows * roofline.tokens_per_second)
