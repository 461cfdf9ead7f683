"""Table of an evaluation for other programs.

CSV has the raw numbers, LaTeX has the layout of papers.
"""

from collections.abc import Sequence
from typing import Any

from ..records.names import OOM
from .marks import is_error
from .rows import Row, method_name
from .tables import footnotes, result_columns, texts

CSV_COLUMNS = (
    "suite",
    "temperature",
    "batch_size",
    "method",
    "name",
    "num_prompts",
    "num_turns",
    "num_repeats",
    "num_batches",
    "num_skipped",
    "num_truncated",
    "num_tokens",
    "tokens_per_step",
    "mean_accepted",
    "draft_tokens_per_step",
    "tokens_per_second",
    "decode_tokens_per_second",
    "speedup",
    "median_speedup",
    "num_faster",
    "num_compared",
    "exceeds",
    "num_repeated",
    "processor_seconds_per_token",
    "processor_speedup",
    "rho",
    "ceiling",
    "draft_seconds_per_step",
    "read_gb_per_token",
    "parameters",
    "roofline_fraction",
    "lossless_label",
    "num_mismatched_prompts",
    "num_within_noise",
    "dtype",
    "max_new_tokens",
    "pace",
    "pipelined",
    "prompt_set_revision",
    "prompt_set_source",
)
"""Fields of a row under their names; the fields of `_spread` follow them, then those of `_by_source`."""
RUN_COLUMNS = ("num_runs", "num_entries", "num_cancelled", "num_cancelled_entries")
"""Counts of the passes of a target in stages."""
LATEX_NEEDS = r"% needs \usepackage{booktabs} and, for < > | in names, \usepackage[T1]{fontenc}"


def csv_table(rows: Sequence[Row]) -> str:
    """Format a line for each row, with the numbers of the summary.

    A number that doesn't exist is an empty cell, and so is a speedup that is an error of measurement.
    """
    import pandas as pd  # slow to import

    lines = [{**row, "name": method_name(row), **_spread(row), **_by_source(row), **_hidden(row)} for row in rows]
    by_source = dict.fromkeys(name for row in rows for name in _by_source(row))
    columns = [*CSV_COLUMNS, *_spread(rows[0]), *by_source]
    # As objects, integers beside empty cells stay integers.
    return str(pd.DataFrame(lines, columns=columns, dtype=object).to_csv(index=False, lineterminator="\n"))


def latex_table(rows: Sequence[Row]) -> str:
    r"""Format a tabular for the package booktabs; the notes follow as comments."""
    import pandas as pd  # slow to import

    columns = result_columns(rows)
    lines = [{name: " ".join(text.split()) for name, text in line.items()} for line in texts(rows, columns)]
    frame = pd.DataFrame(lines).rename(columns={"Temperature": "Temp."})
    tabular = frame.to_latex(index=False, escape=True, column_format=f"lrrl{'r' * len(columns)}")
    notes = "".join(f"% {note}\n" for note in footnotes(rows))
    return f"{LATEX_NEEDS}\n{tabular}{notes}"


def _spread(row: Row) -> dict[str, Any]:
    """Split a row's grouped values into one column each."""
    low, high = row["speedup_ci95"] or (None, None)
    split, training = row["time_split"] or {}, row["training"] or {}
    return {
        "speedup_ci95_low": low,
        "speedup_ci95_high": high,
        **{f"time_{phase}": split.get(phase) for phase in ("draft", "verify", "accept", "rest")},
        "out_of_memory": OOM if row["out_of_memory"] else None,
        "training_seconds": training.get("seconds"),
        "num_disturbed": len(row.get("disturbed", [])),
        **{name: (row.get("runs") or {}).get(name) for name in RUN_COLUMNS},
    }


def _by_source(row: Row) -> dict[str, int]:
    """Split the accepted draft tokens of a merged drafter into one column for each source."""
    return {f"accepted_by_{name}": count for name, count in (row.get("accepted_by") or {}).items()}


def _hidden(row: Row) -> dict[str, None]:
    """Return empty cells in place of a speedup that is an error of measurement."""
    names = ("speedup", "speedup_ci95_low", "speedup_ci95_high", "median_speedup", "num_faster", "num_compared")
    return dict.fromkeys(names) if is_error(row) else {}
