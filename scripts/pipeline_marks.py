"""Marks of the pipeline bench: each is judged by the figures, reached or not."""

from collections.abc import Mapping, Sequence
from typing import Any

from free_marks import Mark, mark
from pipeline_methods import ABLATIONS, NO_PRESSURE, PIPELINED, PLAIN, USUAL_LENGTH, best_synchronous, synchronous
from pipeline_report import Cells, Rows, clock_of, percent, ratio, text

LEAST = {0.8: (1.5, 1.5), 0.5: (1.35, 1.2)}
"""Least speed over K = 4 and over the best K, for each acceptance."""
LEAST_OVER_PLAIN, LEAST_USELESS, MOST_FIRST = 3.0, 0.95, 1.05
LEAST_MEASURED = 2.15
MOST_HEAD_SECONDS = 1e-3
CLOSE, LEAST_POINTS = 0.10, 9
LEAST_UNEQUAL = 0.9
HARMLESS = 1.01
"""An ablation isn't faster than the whole by more than this."""


def speed_marks(cells: Cells) -> list[Mark]:
    """Judge the speeds of conditions of one clock."""
    if not cells:
        return []
    clock, marks = clock_of(cells), []
    for acceptance, (least_fixed, least_best) in LEAST.items():
        if rows := cells.get(f"acceptance {acceptance:g}"):
            fixed, best, ours = rows[synchronous(USUAL_LENGTH)], best_synchronous(rows), rows[PIPELINED]
            case = f"{clock}, acceptance {acceptance:g}"
            marks.append(
                mark(
                    f"{case}: at least {least_fixed}x of K = {USUAL_LENGTH}",
                    ratio(ours, fixed) >= least_fixed,
                    text(ours, fixed),
                )
            )
            words = f"{text(ours, best)}, K = {best['num_drafts']}"
            marks.append(mark(f"{case}: at least {least_best}x of the best K", ratio(ours, best) >= least_best, words))
            if acceptance == max(LEAST):
                reached = ratio(ours, rows[PLAIN]) >= LEAST_OVER_PLAIN
                marks.append(mark(f"{case}: at least {LEAST_OVER_PLAIN:g}x of plain", reached, text(ours, rows[PLAIN])))
    return [*marks, *measured_marks(cells, clock), *useless_marks(cells, clock), *first_marks(cells, clock)]


def measured_marks(cells: Cells, clock: str) -> list[Mark]:
    """Judge the named condition with measured costs: it is enough that one of them reaches the mark."""
    names = [name for name in cells if name.startswith("measured") and name.endswith(" 0.9")]
    if not names:
        return []
    fixed = {name: cells[name][synchronous(USUAL_LENGTH)] for name in names}
    best = max(names, key=lambda name: ratio(cells[name][PIPELINED], fixed[name]))
    rows = cells[best]
    beside = best_synchronous(rows)
    words = f"{text(rows[PIPELINED], fixed[best])} ({best}); over K = {beside['num_drafts']}, the best, "
    words += text(rows[PIPELINED], beside)
    reached = ratio(rows[PIPELINED], fixed[best]) >= LEAST_MEASURED
    return [mark(f"{clock}, measured costs: at least {LEAST_MEASURED}x of K = {USUAL_LENGTH}", reached, words)]


def useless_marks(cells: Cells, clock: str) -> list[Mark]:
    """Judge that a drafter that is always wrong costs little, also if it claims to be right."""
    marks = []
    for name in ("acceptance 0", "useless, claims 0.8"):
        if rows := cells.get(name):
            words = (
                f"{text(rows[PIPELINED], rows[PLAIN])}; K = {USUAL_LENGTH} {text(rows[synchronous(USUAL_LENGTH)], rows[PLAIN])}"
            )
            reached = ratio(rows[PIPELINED], rows[PLAIN]) >= LEAST_USELESS
            marks.append(mark(f"{clock}, {name}: at least {LEAST_USELESS} of plain", reached, words))
    return marks


def first_marks(cells: Cells, clock: str) -> list[Mark]:
    """Judge the time to the first token after the prompt's own."""
    cases = {name: rows for name, rows in cells.items() if name.startswith("acceptance ")}
    if not cases:
        return []
    worst = max(cases, key=lambda name: first_ratio(cases[name]))
    words = f"at most {first_ratio(cases[worst]):.3f} ({worst})"
    return [mark(f"{clock}: first token at most {MOST_FIRST}x of plain's", first_ratio(cases[worst]) <= MOST_FIRST, words)]


def first_ratio(rows: Rows) -> float:
    return float(rows[PIPELINED]["first_seconds"] / rows[PLAIN]["first_seconds"])


def ablation_marks(cells: Cells) -> list[Mark]:
    """Judge that no part of pipelined speculation slows it down."""
    marks = []
    for name in ABLATIONS:
        ratios = {case: ratio(rows[name], rows[PIPELINED]) for case, rows in cells.items() if name in rows}
        if ratios:
            words = ", ".join(f"{value:.2f}x at {case}" for case, value in ratios.items())
            rule = f"{name}: not faster than the whole" + (" by more than 1 %" if name == NO_PRESSURE else "")
            marks.append(mark(f"virtual time, {rule}", max(ratios.values()) <= HARMLESS, words))
    return marks


def head_mark(cells: Cells) -> Mark:
    """Judge the head's own time in the worst condition: loop, rule and window, measured."""
    seconds = {name: float(rows[PIPELINED]["head_cpu_seconds_per_run"]) for name, rows in cells.items()}
    worst = max(seconds, key=seconds.__getitem__)
    rule = f"processor time of loop, rule and window at most {1e3 * MOST_HEAD_SECONDS:g} ms per run"
    return mark(rule, seconds[worst] <= MOST_HEAD_SECONDS, f"at most {1e3 * seconds[worst]:.2f} ms ({worst})")


def agreement_marks(points: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Judge that processes are as fast as the simulator says, at every point: a condition and a method."""
    if not points:
        return []
    close = [point for point in points if abs(point["ratio"] - 1) <= CLOSE]
    worst = max(points, key=lambda point: abs(point["ratio"] - 1))
    words = f"{len(close)} of {len(points)}; furthest {worst['ratio']:.2f} ({worst['condition']}, {worst['method']})"
    rule = f"processes within {percent(CLOSE)} of the simulator at all points, at least {LEAST_POINTS}"
    marks = [mark(rule, len(close) == len(points) >= LEAST_POINTS, words)]
    differing = [point for point in points if point["num_identical"] < point["num_texts"]]
    words = "; ".join(f"{point['condition']}, {point['method']}" for point in differing) or f"all {len(points)}"
    marks.append(mark("processes write the target's own text at every point", not differing, words))
    unequal = [point for point in points if point["method"] == PIPELINED and "slow stage" in point["condition"]]
    unequal += [point for point in points if point["method"] == PIPELINED and "unequal" in point["condition"]]
    if unequal:
        least = min(unequal, key=lambda point: point["ratio"])
        words = ", ".join(f"{point['ratio']:.2f} ({point['condition']})" for point in unequal)
        rule = f"slow and unequal stages at least {LEAST_UNEQUAL} of the simulator's speed"
        marks.append(mark(rule, least["ratio"] >= LEAST_UNEQUAL, words))
    return marks
