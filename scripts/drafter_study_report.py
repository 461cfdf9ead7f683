"""Figures of the study of drafter kinds: rows, tables, marks and the plot over labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drafter_cells import (
    ALL,
    CURVE,
    DPACE,
    FEW,
    MIXED_LOSS,
    MIXTURE,
    ON_POLICY,
    ON_POLICY_EVERY,
    RATE_VALUES,
    RATES,
    UNIFORM,
    VARIANTS,
    Cell,
    Size,
)
from free_marks import Mark, mark

from outrider.data.files import atomic_write_text, write_json
from outrider.eval.results.plots import COLORS, drawing
from outrider.eval.results.stats import bootstrap, ratio, ratio_of_ratios

RECORD_FILE, TABLE_FILE, PLOT_FILE = "drafter_study.json", "table.md", "label_curves.png"
REFERENCE, CHALLENGERS, RIVALS = "redrafter", ("block", "redrafter2"), ("eagle3", "draft_model")
"""The best challenger is judged against the reference and the rivals."""
GAIN, FEW_STEPS = 1.08, 2.33
"""A challenger's least ratio over the reference at ALL, and its least tokens per step at FEW."""
Figures = Mapping[Cell, Mapping[str, Any]]
StudyRow = dict[str, Any]
Group = tuple[str, Size, str]
"""A drafter, the size of its training, and its `Cell.change`."""


def write_report(figures: Figures, num_cells: int, facts: Mapping[str, Any], output: Path) -> list[str]:
    """Write record and table of finished cells, and the plot of their curves; return the files' names."""
    rows = rows_of({cell: values for cell, values in figures.items() if cell.part != RATES})
    rates = rate_rows({cell: values for cell, values in figures.items() if cell.part == RATES})
    lines = notes(figures, num_cells)
    marks = judge(rows)
    tables = "\n\n".join(filter(None, [size_tables(rows), changes_table(rows), curve_table(rows), rates_table(rates)]))
    lines += [mark["text"] for mark in marks]
    record = {**facts, "rows": rows, "rates": rates, "marks": marks, "tables": tables, "notes": lines}
    write_json(output / RECORD_FILE, record)
    text = tables + "\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    atomic_write_text(output / TABLE_FILE, text)
    names = [RECORD_FILE, TABLE_FILE]
    if curves := curves_of(rows):
        plot(curves, output / PLOT_FILE)
        names.append(PLOT_FILE)
    print(f"\n{text}\nWritten to {output}: {', '.join(names)}", flush=True)
    return names


def rows_of(figures: Figures) -> list[StudyRow]:
    """Return a row for each drafter, size and change of the training, over all its seeds.

    A ratio compares the sums over all prompts of the seeds that both sides have. Its interval is a
    bootstrap over prompts, with the same prompts on both sides; it doesn't include the spread over
    seeds, which `by_seed` shows.
    """
    # 1. Tokens and steps of each prompt, by group and seed.
    groups: dict[Group, dict[int, np.ndarray]] = {}
    for cell, values in figures.items():
        sums = np.array(values["sums"], dtype=np.float64)
        groups.setdefault((cell.variant, cell.size, cell.change), {})[cell.seed] = sums
    parameters = {cell.variant: values["parameters"] for cell, values in figures.items()}
    rates = {cell.variant: cell.rate for cell in figures}
    # 2. The figures of each group.
    rows = []
    for (name, size, change), by_seed in sorted(groups.items(), key=lambda item: (item[0][1], [*VARIANTS].index(item[0][0]))):
        point, interval = bootstrap(np.sum([*by_seed.values()], axis=0), ratio, seed=0)
        row: StudyRow = {"drafter": name, "title": VARIANTS[name].title, "parameters": parameters[name]}
        row["learning_rate"] = rates[name]
        row |= {"steps": size.steps, "positions": size.positions, "labels": size.labels, "change": change}
        row |= {"seeds": sorted(by_seed), "tokens_per_step": point, "interval": interval}
        row["by_seed"] = [tokens_per_step(by_seed[seed]) for seed in sorted(by_seed)]
        row["over_reference"] = compared(by_seed, groups.get((REFERENCE, size, UNIFORM)))
        if change == UNIFORM and name in CHALLENGERS:
            others = {rival: compared(by_seed, groups.get((rival, size, UNIFORM))) for rival in RIVALS}
            row["over_rivals"] = {rival: over for rival, over in others.items() if over is not None}
        row["over_uniform"] = compared(by_seed, groups.get((name, size, UNIFORM))) if change != UNIFORM else None
        rows.append(row)
    return rows


def rate_rows(figures: Figures) -> list[StudyRow]:
    """Return the tokens per step of each drafter and size by learning rate, over all seeds."""
    sums: dict[tuple[Size, str], dict[float, np.ndarray]] = {}
    for cell, values in figures.items():
        by_rate = sums.setdefault((cell.size, cell.variant), {})
        by_rate[cell.rate] = by_rate.get(cell.rate, 0) + np.array(values["sums"], dtype=np.float64)
    return [
        {"drafter": name, "title": VARIANTS[name].title, "labels": size.labels}
        | {"by_rate": {f"{rate:g}": tokens_per_step(by_rate[rate]) for rate in sorted(by_rate)}}
        for (size, name), by_rate in sorted(sums.items(), key=lambda item: (item[0][0], [*VARIANTS].index(item[0][1])))
    ]


def tokens_per_step(sums: np.ndarray) -> float:
    tokens, steps = sums.sum(0)
    return float(tokens / steps)


def compared(by_seed: Mapping[int, np.ndarray], others: Mapping[int, np.ndarray] | None) -> dict[str, Any] | None:
    """Return the ratio of both sides' tokens per step over the seeds that both have; None without any."""
    seeds = sorted(by_seed.keys() & (others or {}).keys())
    if others is None or not seeds:
        return None
    sums = np.stack([np.sum([side[seed] for seed in seeds], axis=0) for side in (by_seed, others)])
    point, interval = bootstrap(sums, ratio_of_ratios, seed=0)
    ratios = [tokens_per_step(by_seed[seed]) / tokens_per_step(others[seed]) for seed in seeds]
    return {"ratio": point, "interval": interval, "seeds": seeds, "by_seed": ratios}


def size_tables(rows: Sequence[StudyRow]) -> str:
    """Format the drafters at each size that has several seeds, and at the whole one."""
    tables, uniform = [], [row for row in rows if row["change"] == UNIFORM]
    for labels in dict.fromkeys(row["labels"] for row in uniform if len(row["seeds"]) > 1 or row["labels"] == ALL.labels):
        of_size = [row for row in uniform if row["labels"] == labels]
        head = f"{labels:,} labels"
        lines = [f"| {head} | tokens per step | by seed | of ReDrafter's |", "|---|---:|---:|---:|"]
        for row in sorted(of_size, key=lambda row: -row["tokens_per_step"]):
            over = None if row["drafter"] == REFERENCE else row["over_reference"]
            cells = [row["title"], with_interval(row["tokens_per_step"], row["interval"]), seeds_text(row["by_seed"])]
            lines.append(f"| {' | '.join([*cells, over_text(over)])} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def changes_table(rows: Sequence[StudyRow]) -> str:
    """Format what weights of the labels, positions on-policy and another loss change."""
    weighted = [row for row in rows if row["over_uniform"] is not None]
    lines = ["| changed training | labels | tokens per step | by seed | of uniform |", "|---|---:|---:|---:|---:|"]
    for row in weighted:
        cells = [f"{row['title']}, {row['change'].replace('_', '-')}", f"{row['labels']:,}", f"{row['tokens_per_step']:.2f}"]
        lines.append(f"| {' | '.join([*cells, seeds_text(row['by_seed']), over_text(row['over_uniform'])])} |")
    return "\n".join(lines) if weighted else ""


def curve_table(rows: Sequence[StudyRow]) -> str:
    """Format tokens per step over the labels of the training, with uniform labels."""
    curves = curves_of(rows)
    sizes = sorted({row["labels"] for curve in curves.values() for row in curve})
    lines = ["| tokens per step by labels | " + " | ".join(f"{labels / 1000:.0f}k" for labels in sizes) + " |"]
    lines.append("|---|" + "---:|" * len(sizes))
    for title, curve in curves.items():
        values = {row["labels"]: f"{row['tokens_per_step']:.2f}" for row in curve}
        lines.append(f"| {title} | " + " | ".join(values.get(labels, "-") for labels in sizes) + " |")
    return "\n".join(lines) if len(sizes) > 1 else ""


def rates_table(rows: Sequence[StudyRow]) -> str:
    """Format tokens per step over the learning rate."""
    lines = ["| tokens per step by rate | labels | " + " | ".join(f"{rate:g}" for rate in RATE_VALUES) + " |"]
    lines.append("|---|---:|" + "---:|" * len(RATE_VALUES))
    for row in rows:
        values = [row["by_rate"].get(f"{rate:g}") for rate in RATE_VALUES]
        cells = [row["title"], f"{row['labels']:,}", *("-" if value is None else f"{value:.2f}" for value in values)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if rows else ""


def curves_of(rows: Sequence[StudyRow]) -> dict[str, list[StudyRow]]:
    """Return the rows of each drafter that was measured at several sizes, from few labels to many."""
    curves: dict[str, list[StudyRow]] = {}
    for row in sorted(rows, key=lambda row: row["labels"]):
        if row["change"] == UNIFORM:
            curves.setdefault(row["title"], []).append(row)
    return {title: curve for title, curve in curves.items() if len(curve) > 1}


def with_interval(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.2f}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def seeds_text(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def over_text(over: Mapping[str, Any] | None) -> str:
    return "-" if over is None else with_interval(over["ratio"], over["interval"])


def judge(rows: Sequence[StudyRow]) -> list[Mark]:
    """Judge the marks whose figures were measured."""
    by_size = {
        size: {row["drafter"]: row for row in rows if row["labels"] == size.labels and row["change"] == UNIFORM}
        for size in (FEW, ALL)
    }
    marks = []
    for size, found in by_size.items():
        challengers = [found[name] for name in CHALLENGERS if name in found]
        if not challengers:
            continue
        best = max(challengers, key=lambda row: row["tokens_per_step"])
        steps, over, where = best["tokens_per_step"], best["over_reference"], f"with {size.labels:,} labels"
        if size == ALL and over is not None:
            rule = f"{best['title']} at least {GAIN} of ReDrafter's tokens per step {where}"
            marks.append(mark(rule, over["ratio"] >= GAIN, f"{over_text(over)}, by seed {seeds_text(over['by_seed'])}"))
        if size == FEW:
            marks.append(mark(f"{best['title']} at least {FEW_STEPS} {where}", steps >= FEW_STEPS, f"{steps:.2f}"))
        for name, over_rival in best["over_rivals"].items():
            rule = f"{best['title']} at least {found[name]['title']}'s tokens per step {where}"
            figures = f"{over_text(over_rival)}, by seed {seeds_text(over_rival['by_seed'])}"
            marks.append(mark(rule, over_rival["ratio"] >= 1, figures))
    return marks


def notes(figures: Figures, num_cells: int) -> list[str]:
    """List the notes below the tables: what the figures mean, and what is missing."""
    lines = [
        "Tokens per step: greedy, bonus token included, prefill excluded. Trees have the same number of nodes.",
        "Trees are 5 tokens deep; with Medusa, and with block drafters whose correction isn't rnn, 4.",
        "Labels: labelled positions that the training read. A position counts each time that it was read.",
        "Intervals (95 %) are bootstraps over prompts of the sums over all seeds. The seeds' own figures show their spread.",
        "Each drafter has the learning rate of its recipe, conf/drafter/KIND_demo.yaml, at all sizes.",
    ]
    if any(cell.part == RATES for cell in figures):
        lines.append("The rates were compared on the suite's other prompts, which no other figure here is of.")
    if len(figures) < num_cells:
        lines.append(f"{len(figures)} of {num_cells} cells were measured so far.")
    if any(cell.label_weights == DPACE for cell in figures):
        lines.append('dpace: `train.label_weights=dpace`; "of uniform" compares it with the same trainings with equal weights.')
    if any(cell.part == ON_POLICY for cell in figures):
        lines.append(f"on-policy: `train.on_policy_every={ON_POLICY_EVERY}`, with as many positions per step.")
    if any(cell.part == MIXTURE for cell in figures):
        lines.append(f"mixture: `train.loss='{MIXED_LOSS}'` in place of the recipe's cross-entropy.")
    if any(cell.part == CURVE for cell in figures):
        lines.append("Sizes that only the curves have were trained with one seed.")
    return lines


def plot(curves: Mapping[str, Sequence[StudyRow]], path: Path) -> None:
    """Draw tokens per step over the labels of the training; bands are from the least seed to the most."""
    with drawing(path, 7.0, 4.2) as figure:
        axes = figure.subplots()
        for index, (title, curve) in enumerate(curves.items()):
            labels, color = [row["labels"] for row in curve], COLORS[index % len(COLORS)]
            axes.plot(labels, [row["tokens_per_step"] for row in curve], color=color, marker="o", markersize=3, label=title)
            least, most = ([function(row["by_seed"]) for row in curve] for function in (min, max))
            axes.fill_between(labels, least, most, color=color, alpha=0.2, linewidth=0)
        ticks = sorted({row["labels"] for curve in curves.values() for row in curve})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{labels / 1000:.0f}k" for labels in ticks])
        axes.minorticks_off()
        axes.set_xlabel("labelled positions of the training")
        axes.set_title("Tokens per step on held-out prompts", loc="left")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
