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
"""Words for the reason why a setting has no valid speed: for one setting, and for several."""


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
    where = groups[0] if len(groups) == 1 else f"{len(groups)} groups"
    if not complete:
        return f"No setting has a valid speedup ({where}).{_without_speed(rows)}"
    # 2. A line about the fastest of them.
    name, best = max(complete.items(), key=lambda item: _mean_speedup(item[1]))
    steps = f"{_range([row['tokens_per_step'] for row in best])} tokens per step"
    facts = [_verdict(best, name), *_by_unit(best), steps, _answers(best)]
    disturbed = " DISTURBED: measure again." if any(map(is_disturbed, best)) else ""
    return f"{'; '.join(facts)} ({where}).{disturbed}{_without_speed(rows)}"


def group_name(row: Row) -> str:
    """Name the group of a row: its suite, temperature and batch size."""
    return f"{row['suite']}, {decoding_name(row)}"


def includes_one(row: Row) -> bool:
    """Check whether the interval of a row's speedup includes 1, as printed."""
    low, high = row["speedup_ci95"] or (None, None)
    return low is not None and high is not None and round(low, 2) <= 1 <= round(high, 2)


def _reason(row: Row) -> str | None:
    """Return the reason why a row has no valid speedup; None if it has one."""
    if row["out_of_memory"]:
        return "out of memory"
    if is_broken(row):
        return fault(row)
    if is_lossy(row):
        return "not lossless"
    return "error" if is_error(row) else None


def _without_speed(rows: Sequence[Row]) -> str:
    """Count the settings without a valid speed, by reason; a setting's first reason counts."""
    reasons: dict[str, str] = {}
    for row in rows:
        if row["method"] != BASELINE and (reason := _reason(row)) is not None:
            reasons.setdefault(method_name(row), reason)
    if not reasons:
        return ""
    counts = Counter(reasons.values())
    words = {text[counts[reason] > 1]: counts[reason] for reason, text in REASONS.items() if counts[reason]}
    listing = ", ".join(words if len(words) == 1 else (f"{number} {text}" for text, number in words.items()))
    return f" Without a valid speed: {len(reasons)} setting{'s' if len(reasons) > 1 else ''} ({listing})."


def _mean_speedup(rows: Sequence[Row]) -> float:
    return geometric_mean([row["speedup"] or 0.0 for row in rows])


def _verdict(rows: Sequence[Row], name: str) -> str:
    """Describe the speedups with their intervals, and the setting that has them."""
    # 1. The setting in brackets, unless the name has some already.
    drafter, separator, setting = name.partition(", ")
    setting_name = f"{drafter} ({setting})" if separator and "(" not in name else name
    # 2. The speedups, and whether they differ from plain decoding's.
    unclear = sum(map(includes_one, rows))
    doubt = f", {NOT_DISTINGUISHABLE}" if unclear else ""
    if len(rows) == 1:
        (row,) = rows
        interval = "without interval" if row["speedup_ci95"] is None else "[{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
        speed = f"{row['speedup']:.2f}x {interval}"
    else:
        speed = _range([row["speedup"] for row in rows], "x")
        doubt += f" in {unclear} of {len(rows)} groups" if unclear else ""
    if _mean_speedup(rows) > 1:
        return f"Fastest: {speed} by {setting_name}{doubt}"
    return f"Not faster than plain decoding: {speed} by {setting_name} at best{doubt}"


def _by_unit(rows: Sequence[Row]) -> list[str]:
    """Describe the median and the number of prompts, or batches, in which the method is faster.

    Summaries of older versions lack both.
    """
    if any(row.get("median_speedup") is None for row in rows):
        return []
    medians = [row.get("median_speedup") for row in rows]
    shares = []
    for unit in dict.fromkeys(map(units, rows)):
        members = [row for row in rows if units(row) == unit]
        faster, compared = sum(row.get("num_faster", 0) for row in members), sum(row.get("num_compared", 0) for row in members)
        shares.append(f"{faster} of {compared} {unit}")
    return [f"{'median' if len(rows) == 1 else 'medians'} {_range(medians, 'x')}, faster on {' and '.join(shares)}"]


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
