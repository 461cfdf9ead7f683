"""Marks of a row's speed, where the measurement of it is wrong or disturbed.

Table, plots, report and model card show the same marks.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.method_names import PLAIN_DECODING
from ..records.names import BASELINE
from .markdown import Markdown, code_span
from .rows import Row, is_timeless, method_name

ERROR = "error: above its tokens per step"
"""Text in place of a speedup that can't be right.

A step of the target costs at least as much as a step of plain decoding.
"""
NO_TIME = "error: no positive time"
"""Text in place of a speedup without a positive time to compute it from."""
DISTURBED, ABOVE_CEILING = "disturbed", "above its ceiling"
MEASURE_AGAIN = "The evaluation's command measures only these answers again."
LOCAL_PATH = re.compile(r"(?:^|[\s=:,'\"({\[])[/~]")
"""Absolute path in a command."""
MEASURE_ANEW = "Measure again into another folder, while the machine is quiet."


def is_error(row: Mapping[str, Any]) -> bool:
    """Check whether a row's speedup is wrong, or can't be computed, by an error of measurement."""
    return row.get("exceeds") == "tokens per step" or is_timeless(row)


def error_text(row: Mapping[str, Any]) -> str:
    """Describe the error of measurement of a row."""
    return NO_TIME if is_timeless(row) else ERROR


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Check whether answers of the row, or plain decoding's beside them, stayed disturbed."""
    return bool(row.get("disturbed"))


def is_above_ceiling(row: Mapping[str, Any]) -> bool:
    """Check whether a row's speedup exceeds its ceiling, which the profile gives, but no more."""
    return row.get("exceeds") == "ceiling"


def marks(row: Mapping[str, Any]) -> list[str]:
    """List the marks of a row's speedup; none for a speedup that can be trusted."""
    return [DISTURBED] * is_disturbed(row) + [ABOVE_CEILING] * is_above_ceiling(row)


def disturbed_answers(rows: Sequence[Row]) -> list[tuple[str, dict[str, Any]]]:
    """List the disturbed answers with the names of their methods, the worst first.

    An answer of plain decoding disturbs the rows of all methods, and is listed once.
    """
    answers: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for row in rows:
        for answer in row.get("disturbed", []):
            name = PLAIN_DECODING if answer["side"] == "baseline" else method_name(row)
            key = row["suite"], row["temperature"], row["batch_size"], name, *map(str, answer["prompt_ids"])
            answers[*key, answer["turn"], answer["repeat"]] = (name, answer)
    return sorted(answers.values(), key=lambda item: -(item[1]["ratio"] or math.inf))  # 0: the clock jumped


def num_repeated(rows: Sequence[Row]) -> int:
    """Count the drafters' answers that were decoded again, as pairs with plain decoding's."""
    return sum(row.get("num_repeated", 0) for row in rows if row["method"] != BASELINE)


def commands(rows: Sequence[Row]) -> list[str]:
    """List the commands that measure the rows' disturbed answers again, as far as they are known."""
    return list(dict.fromkeys(command for row in rows if (command := row.get("command", ""))))


def measure_again(rows: Sequence[Row]) -> Markdown:
    """Describe in Markdown how to measure the rows' disturbed answers again."""
    known = " and ".join(map(code_span, commands(rows)))
    return Markdown(f"To measure only these answers again: {known}." if known else MEASURE_AGAIN)


def measure_again_in_public(rows: Sequence[Row]) -> Markdown:
    """Describe the same for a published page, without the user's folders."""
    return Markdown(MEASURE_AGAIN) if any(map(LOCAL_PATH.search, commands(rows))) else measure_again(rows)


def units(row: Row) -> str:
    """Name the units of the row's intervals: prompts, or batches of prompts."""
    return "prompts" if row["batch_size"] == 1 else "batches"
