"""Tables of a report's sections, computed from rows alone.

A section without figures in the rows has no table.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..records.labels import setting_words
from ..records.names import BASELINE, OOM
from ..results.notes import PACE_NOTE, problems, roofline_note, stages_notes, too_few
from ..results.rows import depends_on_clock, fault, is_broken, is_lossy, is_wrong, method_name, units
from .page_tables import Column, Line, Table, Value, column, number, table
from .runs import Entry, Group

PHASES = ("draft", "verify", "accept", "rest")
MAX_HISTOGRAM = 12
"""Number of accepted lengths shown separately; longer ones are summed in the last."""
SLOW = 10
"""Tokens per second below which a roofline is shown with decimal places."""
MAX_METHODS = 5
"""Number of methods that fit the page side by side."""
NO_MEMORY = Value(text=OOM, tone="bad")


def speedup(entry: Entry) -> Value:
    """Build the cell of a speedup over plain decoding, as in the evaluation's table.

    Where answers differ from the target's by mistake, the cell shows the fault instead. A lossy rule's
    speedup and a noisy one are marked. (Samples that can't be compared are lossless by their rule.)
    """
    row = entry.row
    if row["out_of_memory"]:
        return NO_MEMORY
    if is_broken(row):
        return Value(text=fault(row), note=row["lossless_label"], tone="bad")
    value = number(row["speedup"], ".2f", "x", row["speedup_ci95"])
    value = replace(value, mark="noisy" * row["noisy"], tone="bad" if row["noisy"] else "")
    return replace(value, note="not lossless", tone="bad") if is_lossy(row) else value


def median(entry: Entry) -> Value:
    """Build the cell of the median speedup and the number of prompts, or batches, that were faster."""
    row = entry.row
    if not (compared := row["num_compared"]):
        return Value(text="-")
    return replace(number(row["median_speedup"], unit="x"), note=f"faster on {row['num_faster']} of {compared}")


def processor_time(entry: Entry) -> Value:
    """Build the cell of the processor time per token, and its ratio to plain decoding's."""
    seconds, ratio = entry.row["processor_seconds_per_token"], entry.row["processor_speedup"]
    value = number(None if seconds is None else 1e3 * seconds)
    return value if ratio is None or entry.is_baseline else replace(value, note=f"speedup {ratio:.2f}x")


def results(group: Group) -> list[Table]:
    """Build tables of tokens per step and speedup by method and suite."""
    tables = _overviews(group)
    for caption, entries in group.settings():
        steps = [number(entry.row["tokens_per_step"], ci95=entry.row["tokens_per_step_ci95"]) for entry in entries]
        ratios = [speedup(entry) for entry in entries]
        speeds = [number(entry.row["tokens_per_second"], ".1f") for entry in entries]
        columns = [
            column("Tokens per step", "bar", steps, parity=1.0),
            column("Speedup", "bar", ratios, parity=1.0),
            column("Tokens/s", "bar", speeds),
        ]
        # Columns that only newer summaries fill.
        cells_of = {
            "Median": [median(entry) for entry in entries],
            "CPU ms/token": [processor_time(entry) for entry in entries],
        }
        filled = {name: values for name, values in cells_of.items() if any(value.text != "-" for value in values)}
        columns += [*(Column(name=name) for name in filled), Column(name="Identical")]
        labels = [Value(text=entry.row["lossless_label"]) for entry in entries]
        lines = [
            _line(entry, list(values))
            for entry, *values in zip(entries, steps, ratios, speeds, *filled.values(), labels, strict=True)
        ]
        tables.append(table(caption, "Method", columns, lines, _notes(entries)))
    return tables


def _notes(entries: Sequence[Entry]) -> list[str]:
    """Write the notes that explain the results."""
    notes = []
    if measured := [entry for entry in entries if not entry.row["out_of_memory"]]:
        first = measured[0].row
        notes.append(f"{first['num_prompts']} prompts, up to {first['max_new_tokens']} new tokens.{_interval_note(measured)}")
        if first["num_batches"]:
            notes.append(f"Median: of the speedups of single {units(first)}. CPU ms/token: processor time of all threads.")
    notes += problems([entry.row for entry in entries])
    notes += [PACE_NOTE] if any(depends_on_clock(entry.row) for entry in measured) else []
    notes += stages_notes([entry.row for entry in measured])
    if len({entry.run for entry in entries}) > 1:
        notes.append("From several folders: each speedup is over plain decoding in the same folder.")
    return notes


def _interval_note(entries: Sequence[Entry]) -> str:
    """Describe the units of a table's intervals, and warn if there are too few."""
    row = entries[0].row
    if all(entry.row["speedup_ci95"] is None and entry.row["tokens_per_step_ci95"] is None for entry in entries):
        return ""
    if row["batch_size"] == 1:
        return f" Intervals: over the prompts.{too_few(row)}"
    if row["num_batches"] == 1:
        return " Intervals: of tokens per step over the prompts; none for the speedup, which needs more than one batch."
    batches = f"{row['num_batches']} batches.{too_few(row)}"
    return f" Intervals: of tokens per step over the prompts, of the speedup over {batches}"


def _overviews(group: Group) -> list[Table]:
    """Build tables of methods by suites, for each temperature and batch size with several
    suites."""
    # 1. Group the tables by temperature and batch size.
    groups: dict[tuple[float, int], dict[str, list[Entry]]] = defaultdict(dict)
    for caption, entries in group.settings():
        row = entries[0].row
        groups[row["temperature"], row["batch_size"]][caption] = entries
    tables = []
    for by_caption in groups.values():
        if len(by_caption) < 2:
            continue

        # 2. The cell of each method and suite.
        methods: dict[tuple[str, str], dict[str, Value]] = defaultdict(dict)
        for caption, entries in by_caption.items():
            for entry in entries:
                value = speedup(entry)
                steps = number(entry.row["tokens_per_step"]).text
                methods[entry.label, entry.detail][caption] = Value(
                    text=value.text,
                    number=value.number,
                    note="" if entry.row["out_of_memory"] else f"{steps} a step",
                    mark=value.mark,
                    tone=value.tone,
                )

        # 3. The table.
        suites = [group.suite_name(entries[0]) for entries in by_caption.values()]
        shown = [value for values in methods.values() for value in values.values()]
        scale = column("", "heat", shown)
        columns = [Column(name=suite, kind="heat", top=scale.top) for suite in suites]
        absent = Value(text="-")
        lines = [
            Line(label=label, detail=detail, values=[values.get(caption, absent) for caption in by_caption])
            for (label, detail), values in methods.items()
        ]
        setting = next(iter(by_caption)).split(", ", 1)[1]
        tables.append(table(f"All suites, {setting}: speedup", "Method", columns, lines))
    return tables


def categories(group: Group) -> list[Table]:
    """Build tables of speedup and tokens per step by category.

    There is a line for each category, and a column for each method.
    """
    tables = []
    for caption, entries in group.settings():
        drafted = [entry for entry in entries if not entry.is_baseline]
        names = list(dict.fromkeys(name for entry in drafted for name in entry.row["by_category"]))
        if len(names) < 2:
            continue
        for start in range(0, len(drafted), MAX_METHODS):  # as many columns as fit the page
            shown = drafted[start : start + MAX_METHODS]
            part = f" ({start + 1} to {start + len(shown)} of {len(drafted)} methods)" if len(drafted) > MAX_METHODS else ""
            for quantity, value_of in (("speedup", _category_speedup), ("tokens per step", _category_steps)):
                lines = [
                    Line(
                        label=name,
                        detail=_counted_prompts(drafted, name),
                        values=[value_of(entry, entry.row["by_category"].get(name)) for entry in shown],
                    )
                    for name in names
                ]
                top = column("", "heat", [value for line in lines for value in line.values]).top
                columns = [Column(name=method_name(entry.row), kind="heat", top=top) for entry in shown]
                tables.append(table(f"{caption}: {quantity}{part}", "Category", columns, lines))
    return tables


def _counted_prompts(entries: Sequence[Entry], category: str) -> str:
    counts = [entry.row["by_category"][category]["num_prompts"] for entry in entries if category in entry.row["by_category"]]
    return f"{max(counts)} prompt{'s' if max(counts) > 1 else ''}"


def _category_speedup(entry: Entry, values: dict[str, Any] | None) -> Value:
    overall = speedup(entry)
    if values is None:
        return Value(text="-")
    if overall.number is None or is_lossy(entry.row):
        return Value(text="-", tone="bad")
    return replace(number(values["speedup"], ".2f", "x", values["speedup_ci95"]), tone=overall.tone)


def _category_steps(entry: Entry, values: dict[str, Any] | None) -> Value:
    return number(values["tokens_per_step"]) if values else Value(text="-")


def heat_maps(group: Group) -> list[Table]:
    """Build grids of tokens/s and tokens/s x batch over batch size x beam width."""
    # 1. Group the entries that differ only in batch size and beam width.
    families: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    plain: dict[tuple[Any, ...], dict[int, Entry]] = defaultdict(dict)
    for entry in group.entries:
        conditions = (group.suite_name(entry), entry.row["temperature"])
        if entry.is_baseline:
            plain[*conditions, entry.run][entry.row["batch_size"]] = entry
        elif "beam_width" in entry.options and entry.options.get("share_prefixes", True):
            rest = tuple(sorted((name, str(value)) for name, value in entry.options.items() if name != "beam_width"))
            families[*conditions, entry.label, entry.weights, rest].append(entry)

    # 2. Make two grids for each group; width 0 is plain decoding.
    tables = []
    for (suite, temperature, label, _, _), entries in families.items():
        widths = sorted({entry.options["beam_width"] for entry in entries})
        batches = sorted({entry.row["batch_size"] for entry in entries})
        if len(widths) < 2 and len(batches) < 2:
            continue
        cells = {(entry.row["batch_size"], entry.options["beam_width"]): entry for entry in entries}
        for entry in entries:
            for batch in batches:
                if (other := plain[suite, temperature, entry.run].get(batch)) is not None:
                    cells[batch, 0] = other
        subject = ", ".join(part for part in (label, _fixed_options(entries)) if part)
        start = f"{subject}; {suite}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"
        for name, speed_of in (("tokens/s of each answer", answer_speed), ("tokens/s x batch, of all answers", batch_speed)):
            tables.append(_heat_map(f"{start}: {name}", cells, batches, [0, *widths], speed_of))
    return tables


def answer_speed(entry: Entry) -> float | None:
    """Look up the tokens per second of one answer: its tokens over the time of its batch."""
    return entry.row["answer_tokens_per_second"]


def batch_speed(entry: Entry) -> float | None:
    """Look up the tokens per second of the batch.

    These are the tokens of all its answers over its time (see `Row`).
    """
    return entry.row["tokens_per_second"]


def _heat_map(
    caption: str,
    cells: dict[tuple[int, int], Entry],
    batches: list[int],
    widths: list[int],
    speed_of: Callable[[Entry], float | None],
) -> Table:
    lines = []
    for batch in batches:
        values = [_speed(cells.get((batch, width)), speed_of) for width in widths]
        best = max((value.number for value in values if value.number is not None and not value.tone), default=None)
        marked = [replace(value, tone=value.tone or ("best" if value.number == best else "")) for value in values]
        lines.append(Line(label=f"batch size {batch}", values=marked))
    top = column("", "heat", [value for line in lines for value in line.values]).top
    columns = [Column(name=f"width {width}" if width else "plain", kind="heat", top=top) for width in widths]
    return table(caption, "", columns, lines)


def _speed(entry: Entry | None, speed_of: Callable[[Entry], float | None]) -> Value:
    if entry is None:
        return Value(text="-")
    if entry.row["out_of_memory"]:
        return NO_MEMORY
    value = number(speed_of(entry), ".1f")
    # A wrong method's speed is still shown, but marked.
    return value if not is_wrong(entry.row) else replace(value, note=fault(entry.row), tone="bad")


def _fixed_options(entries: Sequence[Entry]) -> str:
    options = {name: entries[0].options.get(name) for name in ("beam_length", "tree_nodes")}
    return setting_words("redrafter", options, {})


def accepted_lengths(group: Group) -> list[Table]:
    """Build tables of the number of draft tokens that each verify step accepted."""
    tables = []
    for caption, entries in group.settings():
        drafted = [entry for entry in entries if not entry.is_baseline and any(entry.row["accepted_histogram"])]
        if not drafted:
            continue
        longest = min(MAX_HISTOGRAM, max(len(entry.row["accepted_histogram"]) for entry in drafted))
        names = [str(length) for length in range(longest)]
        if any(len(entry.row["accepted_histogram"]) > longest for entry in drafted):
            names[-1] += "+"
        lines = []
        for entry in drafted:
            counts = entry.row["accepted_histogram"]
            num_steps = sum(counts)
            tail: int = sum(counts[longest - 1 :])
            shown = [*counts[: longest - 1], tail] + [0] * (longest - len(counts))
            shares = [number(count / num_steps, ".0%") for count in shown[:longest]]
            mean = Value(text=f"{entry.row['mean_accepted']:.2f}")
            lines.append(_line(entry, [*shares, mean, Value(text=f"{num_steps:,}")]))
        top = column("", "heat", [value for line in lines for value in line.values]).top
        columns = [*(Column(name=name, kind="heat", top=top) for name in names), Column(name="Mean"), Column(name="Steps")]
        tables.append(table(f"{caption}: steps by accepted length", "Method", columns, lines))
    return tables


def time_split(group: Group) -> list[Table]:
    """Build tables of the phases' shares of the decode time."""
    tables = []
    for caption, entries in group.settings():
        lines = []
        for entry in entries:
            if (split := entry.row["time_split"]) is None:
                continue
            shares = [number(max(0.0, split[phase]), ".0%") for phase in PHASES]
            seconds = entry.row["draft_seconds_per_step"]
            lines.append(_line(entry, [*shares, Value(text="-" if seconds is None else f"{1e3 * seconds:.2f}")]))
        if lines:
            columns = [*(Column(name=phase, kind="heat") for phase in PHASES), Column(name="Draft ms/step")]
            tables.append(table(f"{caption}: share of decode time", "Method", columns, lines))
    return tables


def roofline(group: Group) -> list[Table]:
    """Build tables of decode speed beside plain decoding's bound from reading the weights."""
    tables = []
    for caption, entries in group.settings():
        entries = [entry for entry in entries if entry.row["roofline_fraction"]]
        if not any(entry.row["method"] == BASELINE for entry in entries):
            continue
        spec = ".3g" if any(entry.row["budget"] for entry in entries) else ".1f"
        speeds = [number(entry.row["decode_tokens_per_second"], spec) for entry in entries]
        bounds = [_bound(entry) for entry in entries]
        texts = [f"{bound:.3g}" if bound < SLOW else f"{bound:.0f}" for bound in bounds]
        scale = column("Decoded tokens/s", "bar", [*speeds, *(number(bound) for bound in bounds)])
        columns = [scale, Column(name="Roofline"), Column(name="Of roofline")]
        lines = [
            _line(entry, [speed, Value(text=text), Value(text=f"{entry.row['roofline_fraction']:.0%}")])
            for entry, speed, text in zip(entries, speeds, texts, strict=True)
        ]
        tables.append(table(caption, "Method", columns, lines, _roofline_notes(entries)))
    return tables


def _bound(entry: Entry) -> float:
    """Compute the roofline's tokens per second, for as many answers as a step decodes."""
    decoded, fraction = entry.row["decode_tokens_per_second"], entry.row["roofline_fraction"]
    assert decoded is not None
    assert fraction is not None  # `roofline` skips entries without it
    return decoded / fraction


def _roofline_notes(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(roofline_note(entry.row) for entry in entries))


def _line(entry: Entry, values: list[Value]) -> Line:
    return Line(label=entry.label, detail=entry.detail, values=values)
