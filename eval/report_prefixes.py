"""What reading a shared prefix once saves, in tokens and in time (the ReDrafter paper's figure 6)."""

from collections import defaultdict
from typing import Any

from .report_runs import Entry, Group, decoding
from .report_tables import Column, Line, Section, Table, Value, column, number, table


def prefixes(group: Group) -> Section | None:
    """Draft tokens before and after shared prefixes are merged, and the speed with and without, over batch sizes."""
    tables = [*_sizes(group), *_speeds(group)]
    if not tables:
        return None
    return Section(
        id="prefixes",
        title="Shared prefixes",
        intro="Draft tokens that the target reads a step, were every path of the tree (every beam) read by itself, and as a "
        "tree that has each shared prefix once; the line goes from the 1st to the 99th percentile of the steps, the bar to the "
        "50th. With tree attention and without it are two settings of one drafter (share_prefixes). The paper's figure 6.",
        tables=tables,
    )


def _sizes(group: Group) -> list[Table]:
    tables = []
    for caption, entries in group.settings():
        counted = [(entry, entry.row["tree_tokens"]) for entry in entries]
        sides = {
            name: [_percentiles(counts[name]) if counts else None for _, counts in counted] for name in ("separate", "shared")
        }
        lines = []
        for (entry, counts), separate, shared in zip(counted, sides["separate"], sides["shared"], strict=True):
            if counts is None or separate is None or shared is None:
                continue
            saved = 1 - counts["shared"][1] / counts["separate"][1]
            values = [separate, shared, Value(text=f"{saved:.0%}")]
            lines.append(Line(label=entry.label, detail=entry.detail, values=values))
        if lines:
            shown = [value for side in sides.values() for value in side if value is not None]
            top = column("", "bar", shown).top
            columns = [
                Column(name="Tokens before merging", kind="bar", top=top),
                Column(name="Tokens after", kind="bar", top=top),
                Column(name="Saved (median)"),
            ]
            tables.append(table(f"{caption}: draft tokens a step", "Method", columns, lines))
    return tables


def _percentiles(values: list[float]) -> Value:
    low, middle, high = values  # stats.TREE_PERCENTILES
    note = f"{low:.0f} to {high:.0f}"
    return Value(text=f"{middle:.0f}", number=middle, low=low, high=high, note=note)


def _speeds(group: Group) -> list[Table]:
    """A table per drafter, suite and temperature that was measured both ways: a line per batch size and way."""
    pairs: dict[tuple[Any, ...], dict[tuple[int, bool], Entry]] = defaultdict(dict)
    for entry in group.entries:
        if entry.is_baseline or "beam_width" not in entry.options or entry.options.get("tree_nodes") is not None:
            continue
        rest = tuple(sorted((name, str(value)) for name, value in entry.options.items() if name != "share_prefixes"))
        key = (entry.label, entry.weights, rest, group.suite_name(entry), entry.row["temperature"])
        pairs[key][entry.row["batch_size"], entry.options.get("share_prefixes", True)] = entry
    tables = []
    for (label, _, rest, suite, temperature), by_batch in pairs.items():
        batches = sorted({batch for batch, _ in by_batch if {(batch, True), (batch, False)} <= by_batch.keys()})
        if not batches:
            continue
        lines, speeds = [], []
        for batch in batches:
            shared, separate = by_batch[batch, True], by_batch[batch, False]
            ratio = shared.row["tokens_per_second"] / separate.row["tokens_per_second"]
            for name, entry, gain in (("with", shared, f"{ratio:.2f}x"), ("without", separate, "")):
                note = "not lossless" if entry.row["lossless"] is False else ""
                speeds.append(number(entry.row["tokens_per_second"], ".1f"))
                lines.append(
                    Line(
                        label=f"{name} tree attention",
                        detail=f"batch size {batch}",
                        values=[speeds[-1], Value(text=gain, note=note)],
                    )
                )
        options = dict(rest)
        caption = (
            f"{label}, {options['beam_width']} beams of {options['beam_length']}; {suite}, {decoding(temperature)}: tokens/s"
        )
        columns = [column("Tokens/s of the batch", "bar", speeds), Column(name="With over without")]
        tables.append(table(caption, "", columns, lines))
    return tables
