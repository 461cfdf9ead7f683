"""The result of an evaluation in one line."""

from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean

from ..records.names import BASELINE
from .marks import is_disturbed, is_error, units
from .rows import Row, decoding_name, fault, is_broken, is_lossy, method_name

NOT_DISTINGUISHABLE = "not distinguishable from plain decoding"
REASONS = {
    "out of memory": ("out of memory", "out of memory"),
    "unproven": ("unproven", "unproven"),
    "not lossless": ("not lossless", "not lossless"),
    "error": ("error of measurement", "errors of measurement"),
}
"""Words for the reason why rows aren't counted: for one row, and for several."""


def headline(rows: Sequence[Row]) -> str:
    """Summarize the result in one line.

    It names the setting with the highest speedup, as the geometric mean over the groups of suite,
    temperature and batch size. A row without a speed that can be trusted is not counted.
    """
    # 1. The settings that have a valid speedup in every group.
    groups = list(dict.fromkeys(map(group_name, rows)))
    valid: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] != BASELINE and _reason(row) is None:
            valid.setdefault(method_name(row), []).append(row)
    complete = {name: of_method for name, of_method in valid.items() if len(of_method) == len(groups)}
    where = groups[0] if len(groups) == 1 else f"all {len(groups)} groups"
    if not complete:
        return f"No setting has a valid speedup on {where}.{_not_counted(rows)}"
    # 2. A line about the fastest of them.
    name, best = max(complete.items(), key=lambda item: _mean_speedup(item[1]))
    facts = [
        _speed(best),
        *_by_unit(best),
        f"{_range([row['tokens_per_step'] for row in best])} tokens per step",
        _answers(best),
    ]
    if any(map(is_disturbed, best)):
        facts.append("DISTURBED: measure again")
    return f"{_verdict(best, where)}: {name}: {', '.join(facts)}.{_not_counted(rows)}"


def group_name(row: Row) -> str:
    """Name the group of a row: its suite, temperature and batch size."""
    return f"{row['suite']}, {decoding_name(row)}"


def includes_one(row: Row) -> bool:
    """Check whether the interval of a row's speedup includes 1, at the two decimals that are printed."""
    low, high = row["speedup_ci95"] or (None, None)
    return low is not None and high is not None and round(low, 2) <= 1 <= round(high, 2)


def _reason(row: Row) -> str | None:
    """Return the reason why a row isn't counted; None for a valid speedup."""
    if row["out_of_memory"]:
        return "out of memory"
    if is_broken(row):
        return fault(row)
    if is_lossy(row):
        return "not lossless"
    return "error" if is_error(row) else None


def _not_counted(rows: Sequence[Row]) -> str:
    """Count the rows that aren't counted, by reason."""
    reasons = (_reason(row) for row in rows if row["method"] != BASELINE)
    counts = Counter(reason for reason in reasons if reason is not None)
    words = [f"{counts[reason]} {text[counts[reason] > 1]}" for reason, text in REASONS.items() if counts[reason]]
    return f" Not counted: {', '.join(words)}." if words else ""


def _mean_speedup(rows: Sequence[Row]) -> float:
    return geometric_mean([row["speedup"] or 0.0 for row in rows])


def _verdict(rows: Sequence[Row], where: str) -> str:
    if _mean_speedup(rows) > 1:
        return f"Fastest on {where}"
    return f"No setting is faster than plain decoding on {where}; the best"


def _speed(rows: Sequence[Row]) -> str:
    """Describe the speedups with their intervals."""
    unclear = sum(map(includes_one, rows))
    if len(rows) == 1:
        (row,) = rows
        interval = "without interval" if row["speedup_ci95"] is None else "[{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
        return f"{row['speedup']:.2f}x {interval}, {NOT_DISTINGUISHABLE}" if unclear else f"{row['speedup']:.2f}x {interval}"
    doubt = f", {NOT_DISTINGUISHABLE} in {unclear} of {len(rows)}" if unclear else ""
    return f"{_range([row['speedup'] for row in rows], 'x')}{doubt}"


def _by_unit(rows: Sequence[Row]) -> list[str]:
    """Describe the median and the number of units in which the method is faster.

    Summaries of older versions lack both.
    """
    if any(row.get("median_speedup") is None for row in rows):
        return []
    faster, compared = sum(row.get("num_faster", 0) for row in rows), sum(row.get("num_compared", 0) for row in rows)
    medians = _range([row.get("median_speedup") for row in rows], "x")
    return [f"median over {'/'.join(dict.fromkeys(map(units, rows)))} {medians}", f"faster on {faster} of {compared}"]


def _answers(rows: Sequence[Row]) -> str:
    """Describe how the answers compare with plain decoding's."""
    if differing := sum(row["num_mismatched_prompts"] for row in rows):
        return f"answers to {differing} prompts differ within rounding noise"
    by_rule = [row for row in rows if row["lossless"] is None]
    if by_rule:
        return "lossless by its rule" if len(by_rule) == len(rows) else "all comparable answers identical"
    return "all answers identical"


def _range(values: Sequence[float | None], unit: str = "") -> str:
    shown = [f"{value:.2f}{unit}" for value in sorted(value for value in values if value is not None)]
    return " to ".join(dict.fromkeys((shown[0], shown[-1]))) if shown else "-"
