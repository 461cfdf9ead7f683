"""The result of an evaluation in one line."""

from collections import Counter
from collections.abc import Sequence

from ..records.names import BASELINE
from .rows import Row, fault, group_name, is_broken, is_lossy, units

NOT_DISTINGUISHABLE = "not distinguishable from plain decoding"


def headline(rows: Sequence[Row]) -> str:
    """Name the row with the highest speedup of a lossless method; count the rows without a valid one."""
    drafted = [row for row in rows if row["method"] != BASELINE]
    valid = [row for row in drafted if row["speedup"] is not None and not is_lossy(row)]
    if not valid:
        return f"No setting has a valid speedup.{_without_speed(drafted)}"
    best = max(valid, key=lambda row: row["speedup"] or 0.0)
    facts = [_verdict(best), _by_unit(best), f"{_number(best['tokens_per_step'])} tokens per step", _answers(best)]
    return f"{'; '.join(facts)} ({group_name(best)}).{_without_speed(drafted)}"


def includes_one(row: Row) -> bool:
    """Check whether the interval of a row's speedup includes 1, as printed."""
    low, high = row["speedup_ci95"] or (None, None)
    return low is not None and high is not None and round(low, 2) <= 1 <= round(high, 2)


def _verdict(row: Row) -> str:
    """Describe the speedup with its interval, and the setting that has it."""
    # 1. The setting in brackets, unless the label has some already.
    drafter, separator, setting = row["label"].partition(", ")
    name = f"{drafter} ({setting})" if separator and "(" not in row["label"] else row["label"]
    # 2. The speedup, and whether it differs from plain decoding's.
    interval = "without interval" if row["speedup_ci95"] is None else "[{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
    speed = f"{row['speedup']:.2f}x {interval}" + ", noisy" * row["noisy"]
    doubt = f", {NOT_DISTINGUISHABLE}" if includes_one(row) else ""
    if (row["speedup"] or 0.0) > 1:
        return f"Fastest: {speed} by {name}{doubt}"
    return f"Not faster than plain decoding: {speed} by {name} at best{doubt}"


def _by_unit(row: Row) -> str:
    """Describe the median and the number of prompts, or batches, in which the method is faster."""
    return f"median {_number(row['median_speedup'])}x, faster on {row['num_faster']} of {row['num_compared']} {units(row)}"


def _answers(row: Row) -> str:
    """Describe how the answers compare with plain decoding's."""
    if differing := row["num_mismatched_prompts"]:
        return f"answers to {differing} prompts differ within rounding noise"
    return "lossless by its rule" if row["lossless"] is None else "all answers identical"


def _without_speed(rows: Sequence[Row]) -> str:
    """Count the rows without a valid speed, by reason."""
    reasons = Counter(reason for row in rows if (reason := _reason(row)) is not None)
    if not reasons:
        return ""
    number = sum(reasons.values())
    listing = ", ".join(reasons if len(reasons) == 1 else (f"{count} {reason}" for reason, count in reasons.items()))
    return f" Without a valid speed: {number} row{'s' if number > 1 else ''} ({listing})."


def _reason(row: Row) -> str | None:
    """Return the reason why a row has no valid speedup; None if it has one."""
    if row["out_of_memory"]:
        return "out of memory"
    return fault(row) if is_broken(row) else "not lossless" if is_lossy(row) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
