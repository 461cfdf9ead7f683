"""Effect of distillation.

The tables compare two drafters that differ only in their labels (the ReDrafter paper's table 4).
"""

import json
from collections import defaultdict
from collections.abc import Sequence

from ...data.choices import LABELS
from ..records.labels import title_of
from ..results.rows import method_name
from .page_tables import Line, Table, column, number, table
from .runs import Entry, Group
from .sections import speedup


def distillation(group: Group) -> list[Table]:
    """Compare drafters trained on the target's labels with ones trained on the texts, within a
    run."""
    tables = []
    for caption, entries in group.settings():
        # 1. Find the pairs of drafters to compare.
        pairs, notes = _pairs(entries)
        if not pairs:
            continue

        # 2. Two lines for each pair.
        runs = {distilled.run for distilled, _ in pairs}
        lines, steps, ratios = [], [], []
        for pair in sorted(pairs, key=lambda pair: pair[0].options.get("beam_width") or 0):
            kind = pair[0].row["method"].split(" ")[0]
            name = ", ".join(filter(None, (title_of(kind), pair[0].detail)))
            name += f" [{pair[0].run}]" if len(runs) > 1 else ""
            for entry, label in zip(pair, ("distilled", "not distilled"), strict=True):
                steps.append(number(entry.row["tokens_per_step"], ci95=entry.row["tokens_per_step_ci95"]))
                ratios.append(speedup(entry))
                lines.append(Line(label=label, detail=name, values=[steps[-1], ratios[-1]]))
        columns = [
            column("Tokens per step", "bar", steps, parity=1.0),
            column("Speedup", "bar", ratios, parity=1.0),
        ]
        tables.append(table(caption, "Training", columns, lines, notes))
    return tables


def _pairs(entries: Sequence[Entry]) -> tuple[list[tuple[Entry, Entry]], list[str]]:
    """Find pairs of drafters that differ only in their labels, and write notes on the others.

    Both drafters of a pair come from one run. A note lists drafters that have several partners.
    """
    alike: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if (labels := _labels(entry)) is not None:
            kind = entry.row["method"].split(" ")[0]
            alike[json.dumps([entry.run, kind, entry.detail, entry.options], sort_keys=True)][labels].append(entry)
    pairs, notes = [], []
    for by_labels in alike.values():
        distilled, text = (by_labels[labels] for labels in LABELS)
        if len(distilled) == len(text) == 1:
            pairs.append((distilled[0], text[0]))
        elif distilled and text:
            names = "; ".join(method_name(entry.row) for entry in [*distilled, *text])
            notes.append(f"Left out, because several drafters of one run differ only in their labels: {names}.")
    return pairs, notes


def _labels(entry: Entry) -> str | None:
    """Look up the labels that the drafter was trained on; None if its training didn't record
    them."""
    return entry.row["training"]["labels"] if entry.row["training"] else None
