"""Table of an evaluation as Markdown, and its notes."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..records.names import BASELINE, OOM
from .headline import group_name, headline
from .lossless import LOSSY
from .markdown import Markdown, escape_markdown
from .marks import (
    MEASURE_ANEW,
    disturbed_answers,
    error_text,
    is_above_ceiling,
    is_disturbed,
    is_error,
    marks,
    measure_again,
    num_repeated,
    units,
)
from .rows import Row, decoding_name, is_broken, is_timeless, is_unproven, loop_share, method_name
from .sources import PACE_NOTE, SOURCES_NOTE, depends_on_clock, merged_rows, shares_text
from .stages import PIPELINED_NOTE, pipelined_rows, runs_note, stages_note

RESULT_COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Ceiling", "Identical")
READ_COLUMN = "GB/tok"
"""Column of tables with a memory budget: gigabytes of weights read from files per token."""
UNIT_COLUMNS = ("Median", "Faster on", "CPU ms/tok", "CPU speedup")
"""Columns on the speed by prompt (or by batch of prompts), and on processor time."""
COST_COLUMNS = ("Params", "Trained s", "Draft ms", "Draft", "Verify", "Accept", "Rest", "Of roofline")
FEW_UNITS = 8
"""Number of prompts or batches below which a bootstrap interval means little."""
NUM_ANSWERS_NAMED = 3
"""Number of disturbed answers that a note names."""
LOOP_SHARE = 0.1
"""Smallest share of answers with loops at which a note warns about them."""
BUFFER = "that size, at most 1 GiB (4 GiB on an accelerator)"
"""Description of the buffer that bandwidth is measured on (`roofline.measure_bandwidth`)."""
BY_RULE_NOTE = (
    "by rule: the method samples its draft tokens at random, so its answers differ from those of plain decoding. Its "
    "acceptance rule preserves the target's distribution. The command outrider certify tests this."
)


def cells(row: Row) -> dict[str, str]:
    """Format a row's cells by column; "-" where there is no number."""
    interval, split, training = row["speedup_ci95"], row["time_split"] or {}, row["training"]
    draft_seconds = row["draft_seconds_per_step"]
    if row["out_of_memory"]:
        columns = (*RESULT_COLUMNS, READ_COLUMN, *UNIT_COLUMNS, *COST_COLUMNS)
        return {**dict.fromkeys(columns, "-"), "Tok/s": OOM, "Speedup [95 %]": OOM}
    shown = {
        "Tok/step": _number(row["tokens_per_step"], ".2f"),
        "Tok/s": _number(row["tokens_per_second"], ".3g" if row.get("budget") else ".1f"),
        "Speedup [95 %]": _number(row["speedup"], ".2f", "x"),
        "Ceiling": _number(row["ceiling"], ".2f", "x"),
        "Identical": row["lossless_label"],
        READ_COLUMN: _number(row.get("read_gb_per_token"), ".3g"),
        **_by_unit(row),
        "Params": "-" if row["parameters"] is None else _count(row["parameters"]),
        "Trained s": _number(training["seconds"] if training else None, ".0f"),
        "Draft ms": _number(None if draft_seconds is None else 1e3 * draft_seconds, ".2f"),
        **{phase.capitalize(): _number(split.get(phase), ".0%") for phase in ("draft", "verify", "accept", "rest")},
        "Of roofline": _number(row["roofline_fraction"], ".0%"),
    }
    if interval:
        shown["Speedup [95 %]"] += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    shown["Speedup [95 %]"] = error_text(row) if is_error(row) else ", ".join([shown["Speedup [95 %]"], *marks(row)])
    return shown


def _by_unit(row: Row) -> dict[str, str]:
    """Format the cells of UNIT_COLUMNS; an error of measurement has no comparison."""
    seconds, compared = row.get("processor_seconds_per_token"), 0 if is_error(row) else row.get("num_compared", 0)
    return {
        "Median": _number(row.get("median_speedup") if compared else None, ".2f", "x"),
        "Faster on": f"{row.get('num_faster', 0)} of {compared}" if compared else "-",
        "CPU ms/tok": _number(None if seconds is None else 1e3 * seconds, ".2f"),
        "CPU speedup": _number(row.get("processor_speedup"), ".2f", "x"),
    }


def result_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns of results; the bytes read only where weights are read from files."""
    return (*RESULT_COLUMNS, READ_COLUMN) if any(row.get("budget") for row in rows) else RESULT_COLUMNS


def budget_note(row: Row) -> str:
    """Describe the target's memory budget: its plan, the measured rate, and the peak of memory."""
    budget = row.get("budget")
    if not budget:
        return ""
    peak = budget["peak_bytes"]
    memory = "" if peak is None else f" Peak memory, with Python, torch and the drafters: {peak / 2**30:.2f} GiB."
    return f"Memory budget: {budget['plan']}. Weights were read at {budget['read_gbs']:.2f} GB/s.{memory}"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Render the notes that explain the table.

    They are the lines of `templates/footnotes.jinja`.
    """
    loader = PackageLoader("outrider.eval", "templates")
    # 1. The template. `finalize` keeps each note on one line, even if a name contains a line break.
    environment = Environment(loader=loader, undefined=StrictUndefined, finalize=lambda value: " ".join(str(value).split()))

    # 2. Its values: rows, thresholds and texts, and checks of a row.
    measured = [row for row in rows if not row["out_of_memory"]]
    text = environment.get_template("footnotes.jinja").render(
        first=rows[0],
        units="/".join(dict.fromkeys(map(units, rows))),
        rows=measured,
        groups=by_group(measured),
        left_out=by_group([row for row in rows if row["out_of_memory"]]),
        num_named=NUM_ANSWERS_NAMED,
        disturbed=disturbed_answers(measured),
        unjudged=[row for row in measured if not row.get("stalls_judged", True)],
        num_repeated=num_repeated(measured),
        measure_again=measure_again(measured),
        measure_anew=MEASURE_ANEW,
        looping=max((row for row in measured if loop_share(row) >= LOOP_SHARE), key=loop_share, default=None),
        baseline=BASELINE,
        oom=OOM,
        lossy=LOSSY,
        by_rule=BY_RULE_NOTE,
        loop_note=loop_note,
        budget_note=budget_note(rows[0]),
        stages_note=stages_note(rows[0]),
        pipelined=pipelined_rows(measured),
        pipelined_note=PIPELINED_NOTE,
        runs_note=runs_note,
        late=[row for row in measured if row.get("late_draft_seconds")],
        buffer=BUFFER,
        too_few=too_few,
        merged=merged_rows(measured),
        sources_note=SOURCES_NOTE,
        shares_text=shares_text,
        pace_note=PACE_NOTE if any(map(depends_on_clock, measured)) else "",
        method_name=method_name,
        decoding_name=decoding_name,
        is_broken=is_broken,
        is_unproven=is_unproven,
        is_error=is_error,
        is_timeless=is_timeless,
        is_disturbed=is_disturbed,
        is_above_ceiling=is_above_ceiling,
    )
    return [line for line in text.splitlines() if line]


def loop_note(row: Row) -> str:
    """Describe the row's answers that end in a loop, and how they distort the figures."""
    return (
        f"Loops: {row.get('num_loops', 0)} of {row['num_turns'] * row['num_repeats']} answers of {method_name(row)} on "
        f"{row['suite']} ({decoding_name(row)}) end in a short cycle of tokens ({loop_share(row):.0%}). Loops are "
        "easy to draft, so tokens per step and speedup mean little for such answers."
    )


def texts(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, str]]:
    """Format the table's lines: for each row its suite, setting, method and cells, by column."""
    return [
        {
            "Suite": row["suite"],
            "Temperature": f"{row['temperature']:g}",
            "Batch": str(row["batch_size"]),
            "Method": method_name(row),
            **{column: cells(row)[column] for column in columns},
        }
        for row in rows
    ]


def markdown_table(lines: Sequence[Mapping[str, str]], left: Collection[str]) -> Markdown:
    """Format lines of texts by column as a Markdown table.

    All columns except those of `left` are aligned to the right.
    """
    table: list[Iterable[str]] = [map(escape_markdown, lines[0]), ("---" if name in left else "---:" for name in lines[0])]
    table += [map(escape_markdown, line.values()) for line in lines]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in table))


def markdown(rows: Sequence[Row]) -> str:
    """Format the headline, the table and its notes as a Markdown page."""
    table = markdown_table(texts(rows, (*result_columns(rows), *UNIT_COLUMNS, *COST_COLUMNS)), left=("Suite", "Method"))
    again = measure_again(rows)
    notes = "\n".join(f"- {escape_markdown(note)}" for note in footnotes(rows))
    notes = notes.replace(escape_markdown(again), again)  # a command is code, which has no escapes
    return f"**{escape_markdown(headline(rows))}**\n\n{table}\n\n{notes}\n"


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows by suite, temperature and batch size, under displayed names."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_name(row), []).append(row)
    return groups


def num_units(row: Row) -> int:
    """Return the number of prompts, or batches of prompts, that the row's intervals are over."""
    return row["num_batches"] or row["num_prompts"]


def too_few(row: Row) -> str:
    """Format a warning about intervals over few prompts or batches; empty for enough of them."""
    return f" Too few {units(row)} for a reliable interval: {num_units(row)}." if num_units(row) < FEW_UNITS else ""


def _count(number: int) -> str:
    """Shorten a number to about three digits: 850, 1.4M, 12.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
