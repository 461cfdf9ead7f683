"""Ratios over the fastest plain decoding. `check.py` joins the rows of several processes, and imports no torch for that."""

from typing import Any

PLAIN, GENERATE = "plain", "transformers"
BASELINES = (PLAIN, GENERATE)


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add each row's `break_even` and `speedup` over the fastest plain decoding of the same batch size.

    Plain decoding in each form that was measured counts, and transformers' `generate`. Without any,
    both are None.
    """
    for row in rows:
        plain = [other for other in rows if other["batch"] == row["batch"] and other["method"] in BASELINES]
        row["break_even"] = row["milliseconds"] / min(other["milliseconds"] for other in plain) if plain else None
        row["speedup"] = row["tokens_per_second"] / max(other["tokens_per_second"] for other in plain) if plain else None
