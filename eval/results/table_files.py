"""The table of an evaluation for other programs: CSV with the bare numbers, and LaTeX as papers have it."""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import Any

from ..records.names import OOM
from .rows import Row
from .tables import RESULT_COLUMNS, cells, footnotes

CSV_COLUMNS = (
    "suite",
    "temperature",
    "batch_size",
    "method",
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
    "rho",
    "ceiling",
    "draft_seconds_per_step",
    "parameters",
    "roofline_fraction",
    "lossless_label",
    "num_mismatched_prompts",
    "num_within_noise",
    "dtype",
    "max_new_tokens",
    "prompt_set_revision",
    "prompt_set_source",
)
"""Fields of a row, under their own names; after them those of `_spread`."""
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after a line's end it would begin an option
    "]": "{]}",
    **{character: f"\\{character}" for character in "{}$&#_%"},
}


def csv_table(rows: Sequence[Row]) -> str:
    """A line per row, numbers as they are in the summary; a number that doesn't exist is an empty cell."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        values: dict[str, Any] = {**row}
        lines.append({**{column: values[column] for column in CSV_COLUMNS}, **_spread(row)})
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def latex_table(rows: Sequence[Row]) -> str:
    r"""A tabular for the package booktabs, a rule between what isn't compared with each other; the notes follow as comments."""
    heads = ("Suite", "Temp.", "Batch", "Method", *(column.removesuffix("*") for column in RESULT_COLUMNS))
    lines = [
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{lrrl{'r' * len(RESULT_COLUMNS)}}}",
        r"\toprule",
        _latex_line(heads),
    ]
    above = None
    for row in rows:
        place = (row["suite"], f"{row['temperature']:g}", str(row["batch_size"]))
        if place != above:
            lines.append(r"\midrule")
        shown = place if place != above else ("", "", "")
        texts = cells(row)
        line = _latex_line((*shown, row["method"], *(texts[column] for column in RESULT_COLUMNS)))
        lines.append(line)
        above = place
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [f"% {' '.join(note.split())}" for note in footnotes(rows)]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """The text as LaTeX prints it, on one line."""
    return "".join(LATEX_SPECIAL.get(character, character) for character in " ".join(text.split()))


def _latex_line(texts: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, texts)) + r" \\"


def _spread(row: Row) -> dict[str, Any]:
    """What a row holds in groups, a column each."""
    low, high = row["speedup_ci95"] or (None, None)
    split, training = row["time_split"] or {}, row["training"] or {}
    return {
        "speedup_ci95_low": low,
        "speedup_ci95_high": high,
        **{f"time_{phase}": split.get(phase) for phase in ("draft", "verify", "accept", "rest")},
        "out_of_memory": OOM if row["out_of_memory"] else None,
        "training_seconds": training.get("seconds"),
        "num_outliers": len(row["outliers"]),
    }
