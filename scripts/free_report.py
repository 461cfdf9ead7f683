"""Tables, notes and plots of the study of free drafts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from free_cells import BATCH, DEMO, GROWN, KINDS, PACE, SAMPLED
from free_figures import Pair, StudyRow, has_speed
from free_marks import case_of, is_expected
from transformers_methods import PLAIN

from outrider.eval.results import marks
from outrider.eval.results.attempts import MAX_RATIO
from outrider.eval.results.plots import PARITY_LINE, drawing

COLORS = dict(zip(("plain", "transformers", *KINDS), ("0.75", "0.5", "C0", "C1", "C2"), strict=True))
COLUMNS = ("tokens per step", "nodes per step", "tokens/s", "speedup [95 %]", "processor time", "identical")
DEMO_COLUMNS = ("slowest prompt", "least repeating third")


def tables(rows: Sequence[StudyRow], pairs: Sequence[Pair]) -> str:
    """Format a table for each cell, one that compares paces, and one of sources."""
    parts = []
    for part in (DEMO, SAMPLED, BATCH, GROWN):
        cases = dict.fromkeys(case_of(row) for row in rows if row["part"] == part)
        for case in cases:
            of_case = [row for row in rows if row["part"] == part and case_of(row) == case]
            parts.append(cell_table(f"{part}: {case}", of_case, is_demo=part == DEMO))
    if any(pair["part"] in (PACE, GROWN) for pair in pairs):
        parts.append(pace_table(pairs))
    if any(is_expected(row) for row in rows):
        parts.append(sources_table(rows))
    return "\n".join(parts)


def cell_table(title: str, rows: Sequence[StudyRow], *, is_demo: bool) -> str:
    """Format the methods of a cell."""
    columns = [title, *COLUMNS, *(DEMO_COLUMNS if is_demo else ())]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for row in rows:
        cells = [row["method"], number(row["tokens_per_step"]), number(row["draft_tokens_per_step"], 1)]
        cells += [number(row["tokens_per_second"], 0), speed_text(row), number(row.get("processor_speedup"), 2, "x")]
        cells.append(f"{row['num_identical']} of {row['num_prompts']}")
        if is_demo:
            slowest = min((prompt["speedup"] for prompt in row["by_prompt"].values()), default=None)
            cells += [number(slowest, 2, "x"), speed_text({**row, **(row["least_repeating"] or {})})]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pace_table(pairs: Sequence[Pair]) -> str:
    """Format how the merged tree by expected gain compares with fixed ones, by case."""
    lines = ["| pace: expected against | best fixed | which | default fixed |", "|---|---:|---|---:|"]
    of_pace = [pair for pair in pairs if pair["part"] in (PACE, GROWN)]
    for case in dict.fromkeys(case_of(pair) for pair in of_pace):
        found = {pair["against"]: pair for pair in of_pace if case_of(pair) == case}
        best, default = found.get("best fixed"), found.get("default fixed")
        if best is not None and default is not None:
            lines.append(f"| {case} | {speed_text(best)} | {best['other']} | {speed_text(default)} |")
    return "\n".join(lines) + "\n"


def sources_table(rows: Sequence[StudyRow]) -> str:
    """Format which source's drafts were accepted in the merged tree, by case."""
    lines = ["| sources of the tokens of merged, expected | |", "|---|---|"]
    shares = {f"{row['part']}: {case_of(row)}": row["sources"] for row in rows if is_expected(row) and row["batch_size"] == 1}
    return "\n".join([*lines, *(f"| {case} | {text} |" for case, text in shares.items())]) + "\n"


def speed_text(row: Mapping[str, Any]) -> str:
    """Format a speedup with its interval and its marks; a fault or an error has no speed."""
    if row.get("speedup") is None:
        return row.get("fault") or "-"
    if marks.is_error(row):
        return "error"
    interval = "" if row["speedup_ci95"] is None else " [{:.2f}, {:.2f}]".format(*row["speedup_ci95"])
    return ", ".join([f"{row['speedup']:.2f}x{interval}", *marks.marks(row)])


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{suffix}"


def notes(rows: Sequence[StudyRow]) -> list[str]:
    """List the notes below the tables: what speedup means, and doubts."""
    lines = ["Speedup is over the faster plain decoding: ours, or transformers' `generate` where it was measured."]
    if any(row["temperature"] or row["batch_size"] > 1 for row in rows):
        lines.append("At temperature 1 and in batches, only our own plain decoding was measured.")
    if any(row["part"] == DEMO for row in rows):
        lines.append("The least repeating third: the prompts whose answers have the largest share of distinct 4-grams.")
    if repeated := sum(row["num_repeated"] for row in rows if row["method"] != PLAIN):
        lines.append(f"{repeated} answers were decoded again beside plain decoding's, since one of each pair was disturbed.")
    if any(marks.is_disturbed(row) for row in rows):
        rule = f"Disturbed: an answer, or plain decoding's beside it, took over {MAX_RATIO:g} times its usual time"
        lines.append(f"{rule}. The same command measures only these answers again.")
    lines += [f"No speedup for {row['method']} ({case_of(row)}): it is {row['fault']}." for row in rows if row["fault"]]
    if any(row["num_identical"] < row["num_prompts"] and not row["fault"] for row in rows):
        lines.append("Answers in 16 bits that aren't identical were audited: they differ within the noise of the arithmetic.")
    return lines


def plot_all(rows: Sequence[StudyRow], pairs: Sequence[Pair], output: Path) -> list[str]:
    """Draw what was measured; return the names of the files."""
    names = []
    demo = [row for row in rows if row["part"] == DEMO]
    if demo:
        plot_speeds(demo, output / "speedup.png")
        names.append("speedup.png")
    if any(is_expected(row) and row["by_prompt"] for row in demo):
        plot_prompts(next(row for row in demo if is_expected(row)), output / "prompts.png")
        names.append("prompts.png")
    if any(pair["part"] in (PACE, GROWN) and pair["against"] == "best fixed" for pair in pairs):
        plot_pace(pairs, output / "pace.png")
        names.append("pace.png")
    return names


def plot_speeds(rows: Sequence[StudyRow], path: Path) -> None:
    """Draw tokens per step and speedup of each method of the demo."""
    with drawing(path, 9.0, 0.34 * len(rows) + 1.4) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        places = range(len(rows))
        colors = [COLORS[row["kind"]] for row in rows]
        left.barh(places, [row["tokens_per_step"] or 0.0 for row in rows], color=colors)
        right.barh(places, [row["speedup"] if has_speed(row) else 0.0 for row in rows], color=colors)
        for place, row in enumerate(rows):
            if has_speed(row) and row["speedup_ci95"]:
                right.plot(row["speedup_ci95"], [place, place], color="0.2", linewidth=1)
            right.annotate(
                speed_text({**row, "speedup_ci95": None}),
                (0, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
            left.annotate(
                number(row["tokens_per_step"]), (0, place), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
        right.axvline(1.0, **PARITY_LINE)
        left.set_yticks(places, [row["method"] for row in rows])
        left.invert_yaxis()
        left.set_title("Tokens per step", loc="left")
        right.set_title("Speedup over the faster plain decoding", loc="left")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)


def plot_prompts(row: StudyRow, path: Path) -> None:
    """Draw the speedup of each prompt over how much its answer repeats itself."""
    with drawing(path, 5.6, 3.6) as figure:
        axes = figure.subplots()
        points = list(row["by_prompt"].values())
        axes.scatter(
            [point["distinct"] for point in points], [point["speedup"] for point in points], s=18, color=COLORS[row["kind"]]
        )
        axes.axhline(1.0, **PARITY_LINE)
        axes.set_xlabel("distinct 4-grams in the answer, as a share of all")
        axes.set_ylabel("speedup")
        axes.set_title(f"{row['method']}: each prompt", loc="left")
        axes.spines[["top", "right"]].set_visible(False)


def plot_pace(pairs: Sequence[Pair], path: Path) -> None:
    """Draw the speed of the expected pace over the best and the default fixed one, by case."""
    of_pace = [pair for pair in pairs if pair["part"] in (PACE, GROWN)]
    cases = list(dict.fromkeys(case_of(pair) for pair in of_pace))
    with drawing(path, 7.6, 0.3 * len(cases) + 1.5) as figure:
        axes = figure.subplots()
        for against, color in (("best fixed", "C0"), ("default fixed", "C1")):
            found = [pair for pair in of_pace if pair["against"] == against]
            places = [cases.index(case_of(pair)) for pair in found]
            axes.scatter([pair["speedup"] for pair in found], places, label=against, color=color, s=18)
            for pair, place in zip(found, places, strict=True):
                if pair["speedup_ci95"]:
                    axes.plot(pair["speedup_ci95"], [place, place], color=color, linewidth=1)
        axes.axvline(1.0, **PARITY_LINE)
        axes.set_yticks(range(len(cases)), cases)
        axes.invert_yaxis()
        axes.set_xlabel("speed of the expected pace over the other")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
