"""The rows of `summary.json`: what each method achieved on each suite."""

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
    """What a method was measured on, and what it took to make."""

    method: str
    """Its key in the records, which never changes."""
    name: NotRequired[str]
    """What tables, plots and reports call it (`method_names`)."""
    suite: str
    prompt_set_revision: str
    """Digest of the prompts."""
    prompt_set_source: str | None
    """Data set of the Hub, ID@COMMIT."""
    dtype: str
    quantization: NotRequired[str]
    """Options that the target's weights were quantised by when they were loaded; empty without."""
    temperature: float
    batch_size: int
    """Prompts decoded together; the baseline's answers too."""
    max_new_tokens: int
    num_repeats: int
    parameters: int | None
    """The drafter's; those of the target are not counted."""
    training: dict[str, Any] | None
    """What the drafter's training took (TrainingFacts)."""
    roofline: dict[str, Any]


class Figures(TypedDict):
    """What was measured.

    None stands for a number that doesn't exist, or that must not be shown.
    """

    num_prompts: int
    num_turns: int
    """Answers per repeat."""
    num_batches: int
    """What the intervals are over: batches, or at batch size 1 prompts."""
    num_skipped: int
    """Turns left out because the target's context window is too small for them."""
    num_truncated: int
    """Answers (of all repeats) that the token limit ended."""
    num_loops: NotRequired[int]
    """Answers (of all repeats) that end in a repeated cycle of tokens (`ends_in_a_loop`)."""
    num_tokens: int
    tokens_per_step: float | None
    """Of one answer."""
    tokens_per_step_ci95: tuple[float, float] | None
    """Bootstrap over prompts; None for fewer than two."""
    mean_accepted: float | None
    accepted_histogram: list[int]
    draft_tokens_per_step: float | None
    tokens_per_second: float | None
    """Of the whole batch."""
    answer_tokens_per_second: float | None
    """Of one answer in its batch (`stats.answer_tokens_per_second`)."""
    decode_tokens_per_second: float | None
    speedup: float | None
    """None where a method that claims to be lossless isn't: a wrong answer has no speed."""
    speedup_ci95: tuple[float, float] | None
    rho: float | None
    ceiling: float | None
    """tau / (1 + rho): computed, not measured. None where there is no speedup."""
    draft_seconds_per_step: float | None
    time_split: dict[str, float] | None
    tree_tokens: dict[str, list[float]] | None
    """Draft tokens a step before and after shared prefixes are merged, and those read
    (`stats.tree_tokens`)."""
    roofline_fraction: float | None
    """Decode tokens per second over the roofline of plain decoding, which reads the weights once
    for a token of every row that is still being answered."""
    lossless: bool | None
    """Every answer is the baseline's, token for token; None where drafts drawn at random make it
    another sample by design."""
    lossless_label: str
    num_mismatched_prompts: int
    num_within_noise: int
    """Mismatched prompts that the audit, of low precision or of samples, explains by arithmetic
    noise."""
    num_unaudited: int
    """Mismatched prompts of which nothing is known to be wrong, but memory ran out in an audit."""
    first_mismatch: dict[str, Any] | None
    outliers: list[dict[str, Any]]
    """Answers that took far longer per step than the method's others (Outlier); they are in every
    figure."""
    by_category: dict[str, dict[str, Any]]
    out_of_memory: bool
    """Whether the method, or plain decoding, ran out of memory here: then there are no figures."""


class Row(Conditions, Figures):
    """A method on a suite at a temperature and a batch size."""


NO_FIGURES = cast(
    "Figures",
    {
        **{name: 0 if name.startswith("num_") else None for name in Figures.__annotations__},
        "accepted_histogram": [],
        "outliers": [],
        "by_category": {},
        "lossless_label": "-",
        "out_of_memory": True,
    },
)
"""Of a method that ran out of memory."""


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
    """Return one row per suite, temperature, batch size and method.

    Rows have the order of the records. In each group the baseline is first, and methods that ran
    out of memory are last. `drafters` is by method.
    """
    rows: list[Row] = []
    suites = dict.fromkeys([*(record.suite for record in records), *(missing.suite for missing in out_of_memory)])
    for group_key in product(suites, config.temperatures, config.batch_sizes):
        group = [record for record in records if record.group_key == group_key]
        names = dict.fromkeys(record.method for record in group)
        for method in sorted(names, key=lambda name: name != BASELINE):
            own = [record for record in group if record.method == method]
            plain = [record for record in group if record.method == BASELINE]
            keys = {record.key for record in own}
            wrong = [item for item in mismatches if item.record.key in keys]
            skipped = num_skipped.get(group_key, 0)
            conditions = _conditions(own[0], config, dtype, roofline, drafters.get(method))
            rows.append({**conditions, **_figures(plain, own, wrong, roofline, skipped, config.seed)})
        of_group = rows[-len(names) :] if names else []
        if any(is_broken(row) and row["method"] == BASELINE for row in of_group):
            cause = "is unproven" if any(is_unproven(row) and row["method"] == BASELINE for row in of_group) else "is wrong"
            for row in of_group:
                _withdraw(row, cause)
        empty = sorted(
            (missing for missing in out_of_memory if missing.group_key == group_key),
            key=lambda missing: missing.method != BASELINE,
        )
        rows += [{**_conditions(each, config, dtype, roofline, drafters.get(each.method)), **NO_FIGURES} for each in empty]
    return rows


def _withdraw(row: Row, cause: str) -> None:
    """Plain decoding was wrong, or is unproven.

    Nobody knows what the others, which were held against it, are worth.
    """
    row["speedup"], row["speedup_ci95"], row["ceiling"], row["lossless"] = None, None, None, False
    for values in row["by_category"].values():
        values.update(speedup=None, speedup_ci95=None)
    if row["method"] != BASELINE:
        verdict = "NO" if cause == "is wrong" else "unproven"
        row["lossless_label"] = f"{verdict}: plain decoding {cause} ({row['lossless_label']} against it)"


def method_name(row: Row) -> str:
    """Return what a reader calls the row's method."""
    return row["name"] if "name" in row else name_of_key(row["method"])


def decoding_name(row: Row) -> str:
    """Return how the row's answers were decoded, in a reader's words."""
    name = f"temperature {row['temperature']:g}" if row["temperature"] > 0 else "greedy"
    return name if row["batch_size"] == 1 else f"{name}, batch size {row['batch_size']}"


def is_broken(row: Row) -> bool:
    """Return whether a method that should be lossless gave an unexplained answer."""
    return row["speedup"] is None and not row["out_of_memory"]


def is_unproven(row: Row) -> bool:
    """Return whether such a row is broken for want of audits alone, in which memory ran out.

    Nothing is known to be wrong.
    """
    return is_broken(row) and row["lossless_label"].startswith("unproven")


def is_wrong(row: Mapping[str, Any]) -> bool:
    """Return whether a row's answers are not the target's own, by mistake or by a lossy rule.

    Where the arithmetic's noise explains all that differs, they are.
    """
    return row["lossless"] is False and row["num_within_noise"] < max(1, row["num_mismatched_prompts"])


def fault(row: Row) -> str:
    """Return what a reader is told of a wrong row in a word or two."""
    return "unproven" if is_unproven(row) else "not lossless"


def is_lossy(row: Row) -> bool:
    """Return whether they are not by a rule that doesn't claim to be lossless.

    Such a row has a speedup, which must be marked.
    """
    return is_wrong(row) and not is_broken(row)


def _conditions(
    of: EvalRecord | OutOfMemory, config: EvalConfig, dtype: str, roofline: Roofline, drafter: DrafterFacts | None
) -> Conditions:
    return {
        "method": of.method,
        "suite": of.suite,
        "prompt_set_revision": of.prompt_set_revision,
        "prompt_set_source": of.prompt_set_source,
        "dtype": dtype,
        "temperature": of.temperature,
        "batch_size": of.batch_size,
        "max_new_tokens": config.max_new_tokens,
        "num_repeats": config.repeats,
        "parameters": drafter.parameters if drafter else None,
        "training": drafter.training if drafter else None,
        "roofline": roofline.to_json(),
    }


def _figures(
    plain_records: Sequence[EvalRecord],
    own_records: Sequence[EvalRecord],
    mismatches: Sequence[Mismatch],
    roofline: Roofline,
    num_skipped: int,
    seed: int,
) -> Figures:
    # Timed answers make the speeds, profiled ones the time split and what follows from it.
    plain, own = ([record for record in records if not record.profiled] for records in (plain_records, own_records))
    profiled_plain, profiled = ([record for record in records if record.profiled] for records in (plain_records, own_records))
    is_baseline = own[0].method == BASELINE
    lossless = judge(own_records, mismatches)
    ratio, interval, categories = _speeds(plain, own, is_broken=lossless.broken, seed=seed)
    tau = stats.tokens_per_step(own)
    rho = None if is_baseline else stats.relative_draft_cost(profiled_plain, profiled)
    histogram = stats.accepted_histogram(own)
    return {
        "num_prompts": stats.num_prompts(own),
        "num_turns": len({(record.prompt_id, record.turn) for record in own}),
        "num_batches": len({record.unit for record in own}),
        "num_skipped": num_skipped,
        "num_truncated": sum(record.truncated for record in own),
        "num_loops": sum(map(_ends_in_a_loop, own)),
        "num_tokens": sum(len(record.token_ids) for record in own),
        "tokens_per_step": tau,
        "tokens_per_step_ci95": _steps_interval(own),
        "mean_accepted": stats.mean_accepted(histogram),
        "accepted_histogram": histogram,
        "draft_tokens_per_step": stats.draft_tokens_per_step(own),
        "tokens_per_second": stats.tokens_per_second(own),
        "answer_tokens_per_second": stats.answer_tokens_per_second(own),
        "decode_tokens_per_second": stats.decode_tokens_per_second(own),
        "speedup": ratio,
        "speedup_ci95": interval,
        "rho": rho,
        "ceiling": None if lossless.broken else stats.ceiling(tau, rho),
        "draft_seconds_per_step": None if is_baseline else stats.draft_seconds_per_step(profiled),
        "time_split": stats.time_split(profiled),
        "tree_tokens": stats.tree_tokens(profiled),
        "roofline_fraction": _roofline_fraction(own, roofline),
        "lossless": False if lossless.lossy else None if lossless.by_rule and not mismatches else not mismatches,
        "lossless_label": lossless.label,
        "num_mismatched_prompts": lossless.num_mismatched,
        "num_within_noise": lossless.num_within_noise,
        "num_unaudited": lossless.num_unaudited,
        "first_mismatch": lossless.first,
        "outliers": [asdict(outlier) for outlier in find_outliers(own)],
        "by_category": categories,
        "out_of_memory": False,
    }


def _ends_in_a_loop(record: EvalRecord) -> bool:
    """Return whether an answer ends in a repeated cycle; a final stop token is no part of it."""
    return ends_in_a_loop(record.token_ids if record.truncated else record.token_ids[:-1])


def loop_share(row: Row) -> float:
    """Return the share of a row's answers that end in a repeated cycle.

    0 for rows of older versions, which lack the count.
    """
    num_answers = row["num_turns"] * row["num_repeats"]
    return row.get("num_loops", 0) / num_answers if num_answers else 0.0


def _steps_interval(records: Sequence[EvalRecord]) -> tuple[float, float] | None:
    """95 % interval of tokens per step over prompts.

    None where the answers of a prompt took no step.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        total = sums[record.prompt_id]
        total[:] = total[0] + record.num_verify_tokens, total[1] + record.num_steps
    counts = np.array(list(sums.values()))
    return stats.bootstrap(counts, stats.ratio, seed=0)[1] if counts[:, 1].all() else None


def _speeds(
    plain: Sequence[EvalRecord], own: Sequence[EvalRecord], *, is_broken: bool, seed: int
) -> tuple[float | None, tuple[float, float] | None, dict[str, dict[str, Any]]]:
    """Speedup, its interval, and what each category achieved.

    A broken method has no speed anywhere.
    """
    categories = stats.by_category(plain, own, seed=seed)
    if is_broken:
        return None, None, {name: {**each, "speedup": None, "speedup_ci95": None} for name, each in categories.items()}
    if own[0].method == BASELINE:
        return 1.0, None, categories
    return *stats.speedup(plain, own, seed=seed), categories


def _roofline_fraction(records: Sequence[EvalRecord], roofline: Roofline) -> float | None:
    """Return what decoding reached of plain decoding's bound, of as many rows as it had.

    None without any step.
    """
    speed, num_rows = stats.decode_tokens_per_second(records), stats.rows_per_step(records)
    return None if speed is None or num_rows is None else speed / (num_rows * roofline.tokens_per_second)
