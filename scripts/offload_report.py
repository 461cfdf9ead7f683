"""Tables, notes, marks and plot of `bench_offload`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from free_marks import Mark, mark
from offload_cells import (
    ABLATION,
    AS_IS,
    ASSISTED,
    CLOSE,
    CONFIDENCE,
    EXPECTED,
    FIXED,
    GROWN,
    MEANWHILE,
    MEMORY,
    PLAIN,
    RAW,
    SMALL,
    STANDARD,
    THROTTLED,
    TITLES,
)
from offload_figures import Row, find, over

from outrider.eval.results.plots import COLORS, drawing

MIB = 1 << 20
PASS_OVERHEAD, EXACT_BYTES, CACHED = 1.10, 0.02, 0.01
PLAIN_OVER_STANDARD = {AS_IS: 1.3, THROTTLED: 1.0}
CLOSE_SPEED, SMALL_SPEED, BEST_SPEED, STRETCH = 4.0, 2.9, 5.0, 6.0
OVERLAP_GAIN, OVERLAP_LOSS, OVERLAP_SHARE = 1.05, 0.98, 0.8
RULE_GAIN, RULE_LOSS = 1.10, 0.97
ABOUT_37, ABOVE = (25.0, 55.0), 200.0
"""Ratios of costs that count as about 37 draft passes, and the least one of the cheap drafter."""


def tables(rows: Sequence[Row], costs: Mapping[str, Any]) -> str:
    """Format a table for each cell, and the ablation."""
    cells = dict.fromkeys((row["disk"], row["share"]) for row in rows)
    parts = [cell_table([row for row in rows if (row["disk"], row["share"]) == cell]) for cell in cells]
    return "\n".join([*parts, *(ablation_table(rows, costs, disk) for disk in dict.fromkeys(row["disk"] for row in rows))])


def main_share(rows: Sequence[Row]) -> float:
    """Return the budget at which all methods were measured, as a share of the weights."""
    return float(rows[0]["share"])


def cell_table(rows: Sequence[Row]) -> str:
    """Format the methods of a cell."""
    first, standard = rows[0], next((row for row in rows if row["letter"] == STANDARD), None)
    columns = [f"{first['disk']}, budget {first['share']:.0%} of the weights", "s/token", "over (a) [95 %]", "tokens/pass"]
    columns += ["nodes/pass", "s/pass", "GB/pass", "GB/token", "faults/token", "left cached", "peak MB", "as (c)"]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for row in rows:
        peak = row["facts"].get("anonymous_bytes")
        cells = [row["title"], number(row.get("seconds_per_token"), 3)]
        cells += ["1" if row is standard else times(*over(row, standard)), number(row.get("tokens_per_step"))]
        cells += [number(row.get("draft_tokens_per_step"), 0), number(row["pass_seconds"], 3)]
        cells.append(number(row["bytes_per_pass"] / 1e9, 3))
        cells += [number(row.get("gb_per_token"), 3), number(row.get("faults_per_token"), 0), f"{row['cached_share']:.1%}"]
        cells.append("-" if peak is None else f"{peak / 1e6:.0f}")
        cells.append("-" if row.get("num_identical") is None else f"{row['num_identical']} of {row['num_prompts']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ablation_table(rows: Sequence[Row], costs: Mapping[str, Any], disk: str) -> str:
    """Format the rows of the paper's figure 15, for both drafters: each over the one before."""
    plain = find(rows, disk, PLAIN, share=main_share(rows))
    names = [name for name in (CLOSE, GROWN) if find(rows, disk, MEANWHILE, share=main_share(rows), drafter=name)]
    if plain is None or not names:
        return ""
    columns = [f"ablation, {disk}"]
    columns += [f"{name}: a pass costs {ratio_of_costs(plain, costs, name):.0f} drafts" for name in names]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * len(names)]
    for letter in ABLATION:
        cells = []
        for name in names:
            row = plain if letter == PLAIN else find(rows, disk, letter, share=main_share(rows), drafter=name)
            before = previous(rows, disk, letter, name)
            factor = "" if before is None else f" ({times(over(row, before)[0], None)} of {before['title'][:3]})"
            cells.append("-" if row is None else f"{row['seconds_per_token']:.3f} s{factor}")
        lines.append(f"| {TITLES[letter]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def previous(rows: Sequence[Row], disk: str, letter: str, drafter: str) -> Row | None:
    """Return the row that a row of the ablation adds to: (d) is the base of both rules."""
    base = {FIXED: PLAIN, CONFIDENCE: FIXED, EXPECTED: FIXED, MEANWHILE: EXPECTED}.get(letter)
    return None if base is None else find(rows, disk, base, share=main_share(rows), drafter="" if base == PLAIN else drafter)


def ratio_of_costs(plain: Row, costs: Mapping[str, Any], drafter: str) -> float:
    """Return how many draft passes a streamed pass costs."""
    return float(plain["pass_seconds"] / costs[drafter]["seconds"])


def judge(rows: Sequence[Row], faults: Sequence[Row], costs: Mapping[str, Any], allowance_bytes: int) -> list[Mark]:
    """Judge all marks of what was measured."""
    disks = list(dict.fromkeys(row["disk"] for row in rows))
    marks = []
    for disk in disks:
        marks += [*stream_marks(rows, disk), *text_marks(rows, disk), *overlap_marks(rows, costs, disk)]
    return [*marks, *rule_marks(rows, disks), *memory_marks(rows, faults, allowance_bytes), *speed_marks(rows)]


def stream_marks(rows: Sequence[Row], disk: str) -> list[Mark]:
    """Judge the plain streamed pass: its time, its bytes, and what it leaves in the page cache."""
    letters = (PLAIN, RAW, MEMORY, STANDARD)
    plain, raw, memory, standard = (find(rows, disk, letter, share=main_share(rows)) for letter in letters)
    marks = []
    if plain and raw and memory:
        least = max(raw["median_pass_seconds"], memory["median_pass_seconds"])
        ratio = plain["median_pass_seconds"] / least
        words = f"{plain['median_pass_seconds']:.3f} s over max({raw['median_pass_seconds']:.3f} read, "
        words += f"{memory['median_pass_seconds']:.3f} computed): {ratio:.2f}"
        rule = f"{disk}: a plain streamed pass at most {PASS_OVERHEAD}x of reading or computing"
        marks.append(mark(rule, ratio <= PASS_OVERHEAD, words))
    if plain and standard:
        (ratio, interval), least = over(plain, standard), PLAIN_OVER_STANDARD[disk]
        rule = f"{disk}: plain streaming at least {least}x of accelerate's"
        marks.append(mark(rule, ratio is not None and ratio >= least, times(ratio, interval)))
    if plain:
        planned = plain["facts"]["streamed_bytes"]
        off = abs(plain["bytes_per_pass"] / planned - 1) if planned else 0.0
        words = f"{plain['bytes_per_pass'] / 1e6:.1f} MB read, {planned / 1e6:.1f} MB planned"
        marks.append(mark(f"{disk}: bytes per pass within {EXACT_BYTES:.0%} of the plan", off <= EXACT_BYTES, words))
        words = f"{plain['cached_share']:.2%}" + (f"; accelerate's leaves {standard['cached_share']:.0%}" if standard else "")
        rule = f"{disk}: less than {CACHED:.0%} of the weights left in the page cache"
        marks.append(mark(rule, plain["cached_share"] < CACHED, words))
    return marks


def text_marks(rows: Sequence[Row], disk: str) -> list[Mark]:
    """Judge the answers: the same text by every method of ours."""
    ours = [row for row in rows if row["disk"] == disk and row["letter"] not in (RAW, STANDARD, ASSISTED)]
    ours = [row for row in ours if row["num_identical"] is not None]
    differing = [row for row in ours if row["num_identical"] < row["num_prompts"]]
    words = "; ".join(f"{row['title']} {row['num_identical']} of {row['num_prompts']}" for row in differing) or "all identical"
    return [mark(f"{disk}: our methods write the same text", not differing, words)] * bool(ours)


def rule_marks(rows: Sequence[Row], disks: Sequence[str]) -> list[Mark]:
    """Judge the rule by expected gain against LLMCad's, in real runs on all disks."""
    ratios = {}
    for disk in disks:
        for name in (CLOSE, GROWN):
            pair = (find(rows, disk, letter, share=main_share(rows), drafter=name) for letter in (EXPECTED, CONFIDENCE))
            if (ratio := over(*pair)[0]) is not None:
                ratios[f"{disk}, {name}"] = ratio
    if not ratios:
        return []
    words = ", ".join(f"{ratio:.2f}x ({case})" for case, ratio in ratios.items())
    rule = f"expected gain at least {RULE_GAIN}x of LLMCad's rule in one case, {RULE_LOSS}x in all"
    return [mark(rule, max(ratios.values()) >= RULE_GAIN and min(ratios.values()) >= RULE_LOSS, words)]


def overlap_marks(rows: Sequence[Row], costs: Mapping[str, Any], disk: str) -> list[Mark]:
    """Judge drafting during the pass, for each drafter."""
    marks, plain = [], find(rows, disk, PLAIN, share=main_share(rows))
    for name in (CLOSE, GROWN):
        fast, slow = (find(rows, disk, letter, share=main_share(rows), drafter=name) for letter in (MEANWHILE, EXPECTED))
        if fast is None or slow is None or plain is None:
            continue
        (ratio, interval), cost = over(fast, slow), ratio_of_costs(plain, costs, name)
        least = OVERLAP_GAIN if ABOUT_37[0] <= cost <= ABOUT_37[1] else OVERLAP_LOSS
        rule = f"{disk}, a pass of {cost:.0f} drafts: drafting during it at least {least}x of before it only"
        marks.append(mark(rule, ratio is not None and ratio >= least, times(ratio, interval)))
        all_seconds = fast["draft_seconds"] + fast["wait_draft_seconds"]
        share = fast["wait_draft_seconds"] / all_seconds if all_seconds else 0.0
        words = f"{share:.0%}, late by {fast['late_seconds']:.3f} s per pass"
        rule = f"{disk}, {name}: at least {OVERLAP_SHARE:.0%} of its draft seconds in waits"
        marks.append(mark(rule, share >= OVERLAP_SHARE, words))
        if disk == THROTTLED:
            wanted = cost >= ABOVE if name == CLOSE else ABOUT_37[0] <= cost <= ABOUT_37[1]
            rule = f"1/{ABOVE:.0f} of a pass or less" if name == CLOSE else "about 1/37 of a pass"
            marks.append(mark(f"{disk}: a draft of {name} costs {rule}", wanted, f"1/{cost:.0f}"))
    return marks


def memory_marks(rows: Sequence[Row], faults: Sequence[Row], allowance_bytes: int) -> list[Mark]:
    """Judge that streamed targets survive under their caps."""
    ours = [row for row in rows if row["letter"] in ABLATION and row["facts"].get("cap_bytes")]
    ended = [fault for fault in faults if fault["letter"] in ABLATION]
    marks = []
    for share in dict.fromkeys(row["share"] for row in [*ours, *ended]):
        of_share = [row for row in ours if row["share"] == share]
        words = [f"{fault['title']} ({fault['disk']}): {fault['fault']}" for fault in ended if fault["share"] == share]
        survives = not words
        words += [f"capped by {of_share[0]['facts']['means']}"] * bool(of_share)
        beyond = max((beyond_plan(row) for row in of_share if row["facts"].get("anonymous_bytes")), default=0)
        words += [f"at most {beyond / MIB:.0f} MiB beside baseline, drafter and plan"] * (beyond > 0)
        rule = f"a budget of {share:.0%} survives a cap of it and {allowance_bytes / MIB:.0f} MiB"
        marks.append(mark(rule, survives and beyond <= allowance_bytes, "; ".join(words)))
    return marks


def beyond_plan(row: Row) -> int:
    """Return the peak of anonymous memory beside baseline, drafter and budget: mostly activations."""
    facts = row["facts"]
    budget = sum(facts["parts"].values())
    return int(facts["anonymous_bytes"] - facts["baseline_bytes"] - facts["drafter_bytes"] - budget)


def speed_marks(rows: Sequence[Row]) -> list[Mark]:
    """Judge the speeds over accelerate's offload."""
    marks = []
    for drafter, least, words in ((CLOSE, CLOSE_SPEED, f" (stretch {STRETCH}x)"), (SMALL, SMALL_SPEED, "")):
        standard = find(rows, THROTTLED, STANDARD, share=main_share(rows))
        row = find(rows, THROTTLED, MEANWHILE, share=main_share(rows), drafter=drafter)
        if row and standard:
            ratio, interval = over(row, standard)
            rule = f"{THROTTLED}: {row['title']} at least {least}x of accelerate's{words}"
            marks.append(mark(rule, ratio is not None and ratio >= least, times(ratio, interval)))
    standard = find(rows, AS_IS, STANDARD, share=main_share(rows))
    drafting = [row for row in rows if row["drafter"] and row["letter"] != ASSISTED]
    drafting = [row for row in drafting if (row["disk"], row["share"]) == (AS_IS, main_share(rows))]
    if standard and drafting:
        best = max(drafting, key=lambda row: over(row, standard)[0] or 0.0)
        ratio, interval = over(best, standard)
        rule = f"{AS_IS}: the best drafter at least {BEST_SPEED}x of accelerate's"
        marks.append(mark(rule, ratio is not None and ratio >= BEST_SPEED, f"{best['title']} {times(ratio, interval)}"))
    return marks


def notes(rows: Sequence[Row], faults: Sequence[Row], costs: Mapping[str, Any], rate: str) -> list[str]:
    """List the notes below the tables."""
    lines = ["Seconds of decoding, without the prefill. GB are read from the disk, by the process's own count."]
    lines.append("Peak: anonymous memory. Left cached: of the weights, after an answer. As (c): answers with its text.")
    for row in rows:
        if row["letter"] == RAW:
            megabytes = row["facts"].get("streamed_bytes", row["bytes_per_pass"]) / row["median_pass_seconds"] / 1e6
            wanted = f", slowed to {rate}B/s" if row["disk"] == THROTTLED else ""
            lines.append(f"{row['disk']}: raw reads reach {megabytes:.0f} MB/s{wanted}.")
        elif row["letter"] == PLAIN:
            lines.append(f"{row['disk']}, {row['share']:.0%}: {row['facts']['plan']}")
    lines += [
        f"The drafter {name}: {cost['parameters'] / 1e6:.1f}M parameters, {1e3 * cost['seconds']:.1f} ms a draft pass."
        for name, cost in costs.items()
    ]
    return [*lines, *(f"{fault['title']} ({fault['disk']}, {fault['share']:.0%}): {fault['fault']}." for fault in faults)]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw seconds per token by method and budget, a panel for each disk."""
    disks = list(dict.fromkeys(row["disk"] for row in rows))
    titles = list(dict.fromkeys(row["title"] for row in rows if row["letter"] != RAW))
    with drawing(path, 5.2 + 3.2 * len(disks), 0.32 * len(titles) + 1.4) as figure:
        panels = figure.subplots(1, len(disks), sharey=True, squeeze=False)[0]
        for axes, disk in zip(panels, disks, strict=True):
            for color, share in zip(COLORS, dict.fromkeys(row["share"] for row in rows), strict=False):
                of_share = [row for row in rows if (row["disk"], row["share"]) == (disk, share) and row["letter"] != RAW]
                places = [titles.index(row["title"]) for row in of_share]
                seconds = [row["seconds_per_token"] for row in of_share]
                axes.scatter(seconds, places, color=color, s=22, label=f"budget {share:.0%}")
            axes.set_xscale("log")
            axes.set_yticks(range(len(titles)), titles)
            axes.set_xlabel("seconds per token")
            axes.set_title(disk, loc="left")
            axes.grid(axis="x", which="both", linewidth=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].invert_yaxis()
        panels[-1].legend(fontsize=7)


def times(ratio: float | None, interval: Sequence[float] | None) -> str:
    """Format a ratio with its interval."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
