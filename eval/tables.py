"""The table of an evaluation, for the terminal and as Markdown."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .rows import Row, is_broken

RESULT_COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Ceiling*", "Lossless")
TIME_COLUMNS = ("Draft", "Verify", "Accept", "Rest", "Of roofline")
METHOD_WIDTH = 14
"""Characters for the name of a method on the narrowest terminal."""
TOKENS_NOTE = (
    "Tok/step: tokens emitted per target step, bonus included, prefill excluded. Tok/s and speedup: whole generations, prefill "
    "included; the interval is a bootstrap over prompts."
)
CEILING_NOTE = (
    "* tau / (1 + rho), with rho the drafter's time over that of one plain step: the speedup if verifying a tree cost no more "
    "than a plain step. Computed, not measured. It and the time split come from a separate pass with phase timers on."
)


def cells(row: Row) -> dict[str, str]:
    """A row's texts by column; "-" where there is no number."""
    interval, split = row["speedup_ci95"], row["time_split"] or {}
    texts = {
        "Tok/step": _number(row["tokens_per_step"], ".2f"),
        "Tok/s": _number(row["tokens_per_second"], ".1f"),
        "Speedup [95 %]": _number(row["speedup"], ".2f", "x"),
        "Ceiling*": _number(row["ceiling"], ".2f", "x"),
        "Lossless": row["lossless_label"],
        **{phase.capitalize(): _number(split.get(phase), ".0%") for phase in ("draft", "verify", "accept", "rest")},
        "Of roofline": _number(row["roofline_fraction"], ".0%"),
    }
    if interval:
        texts["Speedup [95 %]"] += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return texts


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to judge the numbers, and what went wrong."""
    first = rows[0]
    notes = [
        TOKENS_NOTE,
        CEILING_NOTE,
        _roofline_note(first),
        f"Greedy decoding in {first['dtype']}, batch size {first['batch_size']}, up to {first['max_new_tokens']} new tokens.",
    ]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        row = next(row for row in rows if row["suite"] == suite)
        num_answers = row["num_turns"] * row["num_repeats"]
        note = (
            f"{suite} (prompts {row['prompt_set_revision'][:12]}): {row['num_prompts']} prompts, {row['num_turns']} turns, "
            f"each answered {row['num_repeats']} time(s); {row['num_truncated']} of {num_answers} answers ended at the limit."
        )
        if row["num_skipped"]:
            note += f" {row['num_skipped']} turns were SKIPPED: too long for the target's context window."
        notes.append(note)
    notes.extend(_mismatch_note(row) for row in rows if row["first_mismatch"])
    return notes


def markdown(rows: Sequence[Row]) -> str:
    """The table and its notes as a Markdown page."""
    columns = (*RESULT_COLUMNS, *TIME_COLUMNS)
    lines = [("Suite", "Method", *columns), ("---", "---", *["---:"] * len(columns))]
    for row in rows:
        texts = cells(row)
        lines.append((row["suite"], row["method"], *(texts[column] for column in columns)))
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "\n".join(f"- {note}" for note in footnotes(rows))
    return f"{table}\n\n{notes}\n".replace("*", "\\*")


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """The results, the time split and the notes on the terminal; a method that isn't lossless in red."""
    console = console or Console()
    for columns in (RESULT_COLUMNS, TIME_COLUMNS):
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        table.add_column("Method", min_width=METHOD_WIDTH)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for suite in dict.fromkeys(row["suite"] for row in rows):
            table.add_row(suite, style="bold")
            for row in (row for row in rows if row["suite"] == suite):
                texts = cells(row)
                table.add_row(row["method"], *(texts[column] for column in columns), style="red" if is_broken(row) else None)
            table.add_section()
        console.print(table)
    for note in footnotes(rows):
        console.print(Padding(Text(note), (0, 0, 0, 2)), style="dim")


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _roofline_note(row: Row) -> str:
    roofline = row["roofline"]
    source = "given" if roofline["given"] else "measured on a buffer of that size"
    note = (
        f"Roofline of plain decoding: {roofline['weight_bytes'] / 1e6:.1f} MB of weights per token at "
        f"{roofline['bandwidth_gbs']:.1f} GB/s ({source}): {roofline['tokens_per_second']:.0f} tokens/s."
    )
    if roofline["fits_in_cache"]:
        note += (
            f" The weights fit into the cache ({roofline['cache_bytes'] / 1e6:.0f} MB), so main memory isn't what bounds "
            "this target, and neither roofline nor ceiling says much about large ones."
        )
    return note


def _mismatch_note(row: Row) -> str:
    first = row["first_mismatch"]
    assert first is not None
    place = f"prompt {first['prompt_id']}, turn {first['turn'] + 1}, token {first['position']}"
    if is_broken(row):
        return (
            f"{row['method']} on {row['suite']} is NOT LOSSLESS, so it has no speedup: {row['num_mismatched_prompts']} prompts "
            f"got other tokens than plain decoding gives, the first at {place} (counted from 0)."
        )
    return (
        f"{row['method']} on {row['suite']}: {row['num_mismatched_prompts']} prompts differ from plain decoding, the first at "
        f"{place} (counted from 0); an audit of them found every token to be the arg-max within this precision's own noise."
    )
