"""The table of an evaluation, for the terminal and as Markdown."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..records.names import BASELINE, OOM
from .lossless import LOSSY
from .rows import Row, decoding_name, is_broken, is_unproven

RESULT_COLUMNS = ("Tok/step", "Tok/s", "Speedup [95 %]", "Ceiling*", "Lossless")
COST_COLUMNS = ("Params", "Trained s", "Draft ms", "Draft", "Verify", "Accept", "Rest", "Of roofline")
NUM_OUTLIERS_NAMED = 3
FEW_UNITS = 8
"""A bootstrap over fewer prompts, or batches, hardly knows how far they spread."""
METHOD_WIDTH = 14
"""Characters for the name of a method on the narrowest terminal."""
BUFFER = "that size, at most 1 GiB (4 GiB on an accelerator)"
"""What bandwidth is measured on (`roofline.measure_bandwidth`), in words."""
TOKENS_NOTE = (
    "Tok/step: tokens emitted per target step, bonus included, prefill excluded. Tok/s and speedup: whole generations, prefill "
    "included; the interval is a bootstrap over prompts."
)
BATCHES_NOTE = (
    "Batches: a step is a pass over all rows, and Tok/step what it emits for one of them. Tok/s is the whole batch's, and the "
    "speedup that over plain decoding in batches of the same prompts; its bootstrap draws batches. Draft ms is for all rows, "
    "and the roofline reads the weights once for a token of every row that is still being answered. A row's last digits "
    "depend on its neighbours, so that answers which differ are audited as in low precision."
)
CEILING_NOTE = (
    "* tau / (1 + rho), with rho the drafter's time over that of one plain step: the speedup if verifying a tree cost no more "
    "than a plain step. Computed, not measured. It, the time split and Draft ms, the drafter's time per step, come from a "
    "separate pass with phase timers on."
)
SAMPLING_NOTE = (
    "Answers at temperatures above 0 are sampled, by all methods with the same seeds: so drafts that aren't drawn at random "
    "must lead to the very tokens of plain decoding, and each answer is compared."
)
BY_RULE_NOTE = (
    "by rule: a method that draws its drafts at random gives another sample than plain decoding by design. That it is "
    "lossless is claimed by its acceptance rule, which the command outrider certify tests."
)

TYPICAL_NOTE = (
    "no, by rule: typical acceptance (arXiv 2401.10774, section 2.3.1) keeps what the target finds typical. Its answers "
    "are not samples of the target's distribution, so its speedup is not that of a lossless method."
)


def cells(row: Row) -> dict[str, str]:
    """A row's texts by column; "-" where there is no number."""
    interval, split, training = row["speedup_ci95"], row["time_split"] or {}, row["training"]
    draft_seconds = row["draft_seconds_per_step"]
    if row["out_of_memory"]:
        return {**dict.fromkeys((*RESULT_COLUMNS, *COST_COLUMNS), "-"), "Tok/s": OOM, "Speedup [95 %]": OOM}
    shown = {
        "Tok/step": _number(row["tokens_per_step"], ".2f"),
        "Tok/s": _number(row["tokens_per_second"], ".1f"),
        "Speedup [95 %]": _number(row["speedup"], ".2f", "x"),
        "Ceiling*": _number(row["ceiling"], ".2f", "x"),
        "Lossless": row["lossless_label"],
        "Params": "-" if row["parameters"] is None else _count(row["parameters"]),
        "Trained s": _number(training["seconds"] if training else None, ".0f"),
        "Draft ms": _number(None if draft_seconds is None else 1e3 * draft_seconds, ".2f"),
        **{phase.capitalize(): _number(split.get(phase), ".0%") for phase in ("draft", "verify", "accept", "rest")},
        "Of roofline": _number(row["roofline_fraction"], ".0%"),
    }
    if interval:
        shown["Speedup [95 %]"] += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return shown


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to judge the numbers, and what went wrong."""
    first = rows[0]
    notes = [
        TOKENS_NOTE,
        CEILING_NOTE,
        _roofline_note(first),
        f"Decoding in {first['dtype']}, batch size {_sizes(rows)}, up to {first['max_new_tokens']} new tokens.",
    ]
    left_out, rows = [row for row in rows if row["out_of_memory"]], [row for row in rows if not row["out_of_memory"]]
    notes += [_memory_note(left_out)] if left_out else []
    notes += [BATCHES_NOTE] if any(row["batch_size"] > 1 for row in rows) else []
    notes += [SAMPLING_NOTE] if any(row["temperature"] > 0 for row in rows) else []
    notes += [BY_RULE_NOTE] if any(row["lossless"] is None for row in rows) else []
    notes += [TYPICAL_NOTE] if any(row["lossless_label"] == LOSSY for row in rows) else []
    for group, (row, *_) in _groups(rows).items():
        num_answers = row["num_turns"] * row["num_repeats"]
        note = (
            f"{group} (prompts {_prompts(row)}): {row['num_prompts']} prompts, {row['num_turns']} turns, "
            f"each answered {row['num_repeats']} time(s){_in_batches(row)}{too_few(row['num_batches'] or row['num_prompts'])}; "
            f"{row['num_truncated']} of {num_answers} answers "
            "ended at the limit."
        )
        if row["num_skipped"]:
            note += f" {row['num_skipped']} turns were SKIPPED: too long for the target's context window, or a drafter's."
        notes.append(note)
    notes.extend(_mismatch_note(row) for row in rows if row["first_mismatch"])
    notes.extend(_outlier_note(row) for row in rows if row["outliers"])
    return notes


def escape_markdown(text: str) -> str:
    """The text as Markdown shows it, on one line. Underscores within a word are left: they mean nothing there."""
    text = re.sub(r"[\\`*|<>&$~]", r"\\\g<0>", " ".join(text.split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def texts(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the table as a reader sees it: of each row the texts by column, what it is about first."""
    return [
        {
            "Suite": row["suite"],
            "Temperature": f"{row['temperature']:g}",
            "Batch": str(row["batch_size"]),
            "Method": row["method"],
            **{column: cells(row)[column] for column in columns},
        }
        for row in rows
    ]


def markdown_table(lines: Sequence[Mapping[str, str]], left: Collection[str]) -> str:
    """Write texts by column as a table of Markdown; all columns but those of `left` are aligned to the right."""
    table: list[Iterable[str]] = [map(escape_markdown, lines[0]), ("---" if name in left else "---:" for name in lines[0])]
    table += [map(escape_markdown, line.values()) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def markdown(rows: Sequence[Row]) -> str:
    """The table and its notes as a Markdown page."""
    table = markdown_table(texts(rows, (*RESULT_COLUMNS, *COST_COLUMNS)), left=("Suite", "Method"))
    notes = "\n".join(f"- {escape_markdown(note)}" for note in footnotes(rows))
    return f"{table}\n\n{notes}\n"


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """The results, their costs and the notes on the terminal; a method that isn't lossless in red."""
    console = console or Console()
    for columns in (RESULT_COLUMNS, COST_COLUMNS):
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
        table.add_column("Method", min_width=METHOD_WIDTH)
        for column in columns:
            # The heads of costs are wider than what they stand over.
            head = column.replace(" ", "\n") if columns is COST_COLUMNS else column
            table.add_column(head, justify="right", no_wrap=True)
        for group, of_group in _groups(rows).items():
            table.add_row(Text(group), style="bold")
            for row in of_group:
                shown = (Text(text) for text in (row["method"], *(cells(row)[column] for column in columns)))
                table.add_row(*shown, style="red" if is_broken(row) else None)
            table.add_section()
        console.print(table)
    for note in footnotes(rows):
        console.print(Padding(Text(note), (0, 0, 0, 2)), style="dim")


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by suite, temperature and batch size, under the names that a reader sees."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['suite']}, {decoding_name(row)}", []).append(row)
    return groups


def _memory_note(rows: Sequence[Row]) -> str:
    """Where there are no figures, and for what reason."""
    named = "; ".join(f"{group}: {', '.join(row['method'] for row in of_group)}" for group, of_group in _groups(rows).items())
    note = f"{OOM}: memory ran out, so that there are no figures ({named})."
    if any(row["method"] == BASELINE for row in rows):
        note += f" Where {BASELINE} ran out of it, the others have nothing to be held against."
    return note


def _in_batches(row: Row) -> str:
    if row["batch_size"] == 1:
        return ""
    return f", in {row['num_batches']} batches"


def too_few(num_units: int) -> str:
    """What there is to say of an interval over so few prompts or batches."""
    return ", too few for an interval to say much" if num_units < FEW_UNITS else ""


def _prompts(row: Row) -> str:
    digest = row["prompt_set_revision"][:12]
    return digest if row["prompt_set_source"] is None else f"{digest} of {row['prompt_set_source']}"


def _sizes(rows: Sequence[Row]) -> str:
    return ", ".join(str(size) for size in dict.fromkeys(row["batch_size"] for row in rows))


def _count(number: int) -> str:
    """Three digits or so: 850, 1.4M, 12.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _roofline_note(row: Row) -> str:
    roofline = row["roofline"]
    source = "given" if roofline["given"] else f"measured on a buffer of {BUFFER}"
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
    where = f"{row['method']} on {row['suite']} ({decoding_name(row)})"
    place = f"prompt {first['prompt_id']}, turn {first['turn'] + 1}, token {first['position']}"
    if is_unproven(row) and not row["num_unaudited"]:
        return f"{where} is NOT PROVEN to be lossless, so it has no speedup: plain decoding is unproven there."
    if is_unproven(row):
        return (
            f"{where} is NOT PROVEN to be lossless, so it has no speedup: memory ran out in the audits of answers to "
            f"{row['num_unaudited']} prompts, the first to prompt {first['prompt_id']}, turn {first['turn'] + 1}. Run the "
            "evaluation's command again with more free memory, which audits them."
        )
    if is_broken(row):
        return (
            f"{where} is NOT LOSSLESS, so it has no speedup: {row['num_mismatched_prompts']} prompts "
            f"got other tokens than plain decoding gives, the first at {place} (counted from 0)."
        )
    return (
        f"{where}: {row['num_mismatched_prompts']} prompts differ from plain decoding, the first at "
        f"{place} (counted from 0); an audit of them found every token to be the target's choice within this precision's own "
        "noise."
    )


def _outlier_note(row: Row) -> str:
    outliers, num_named = row["outliers"], NUM_OUTLIERS_NAMED
    named = ", ".join(
        f"{'prompts' if len(outlier['prompt_ids']) > 1 else 'prompt'} {', '.join(outlier['prompt_ids'])} turn "
        f"{outlier['turn'] + 1} ({outlier['ratio']:.1f}x)"
        for outlier in outliers[:num_named]
    )
    more = f" and {len(outliers) - num_named} more, named in the summary" if len(outliers) > num_named else ""
    return (
        f"Outliers of {row['method']} on {row['suite']} ({decoding_name(row)}), by seconds per step over their median: "
        f"{named}{more}. They are in every figure: if the machine was busy, measure again, with repeats."
    )
