"""The page and the record of `outrider forecast`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..eval.config import EvalConfig
from ..eval.forecast.result import SURE, Interval, Measured, MethodForecast, certainty_groups, is_noisy, verdict
from ..eval.measure.environment import describe_environment
from .plan import Planner, format_time

MULTIPLES = (0.5, 1.0, 2.0)
"""Of the recipe's data, for which the curve is continued."""
WIDTH, MOST_GROUPS = 80, 8


def print_forecast(
    config: EvalConfig,
    measured: Measured,
    forecasts: Sequence[MethodForecast],
    total_labels: float,
    seconds: Mapping[float, float],
    console: Console,
) -> None:
    """Print what a person acts on: what can be won, what steps cost, the curves, the speedups, and a sentence.

    `seconds` are those that the recipe will take, by multiples of its data.
    """
    names = ", ".join(suite.name for suite in config.suites)
    console.print(f"{len(measured.prompts)} prompts, first turns, of {escape(names)}.", soft_wrap=True)
    free = [one.label for one in forecasts if not one.is_trained and one.temperature == forecasts[0].temperature]
    for temperature in config.temperatures:
        here = [one for one in forecasts if one.temperature == temperature]
        at = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        # 1. What the target leaves to be won.
        table = table_of(f"How certain the target is ({at})", "category", "tokens", "entropy", f"p >= {SURE}", *free)
        groups = certainty_groups(measured, temperature, free)
        for group in [*groups[:-1][:MOST_GROUPS], groups[-1]]:
            numbers = (f"{group.num_tokens}", f"{group.entropy:.2f}", f"{group.certain:.0%}")
            table.add_row(escape(group.category), *numbers, *(f"{group.free[label]:.2f}" for label in free))
        console.print(table)
        # 2. Tokens per step.
        sizes = [_number(labels) for labels in measured.num_labels]
        later = [_number(total_labels * multiple) for multiple in MULTIPLES]
        table = table_of(f"Tokens per step by labels: measured, then forecast [90 %] ({at})", "drafter", *sizes, *later)
        for one in here:
            if one.is_trained:
                reached = [f"{value:.2f}" for value in one.measured]
                table.add_row(escape(one.label), *reached, *map(cell, one.tokens_per_step.values()))
        console.print(table)
        # 3. Speedups.
        if is_noisy(measured):
            continue
        batches = list(measured.seconds)
        columns = [f"batch {size}" for size in batches]
        table = table_of(f"Speedup with the recipe's data, and tokens per step that break even ({at})", "drafter", *columns)
        for one in here:
            speedups = {size: f"{cell(speedup)}\n{one.break_even[size]:.2f}" for size, speedup in one.speedup.items()}
            cells = [speedups.get(size, "-") for size in batches]
            table.add_row(escape(one.label if one.is_trained else f"{one.label} (measured)"), *cells)
        console.print(table)
    # 4. Passes, steps, hours, and the verdict.
    if measured.passes:
        widths = next(iter(measured.passes.values()))
        table = table_of(
            "Milliseconds of a pass, one text at a time", "tokens of the text", *(f"{width} new" for width in widths)
        )
        for length, seconds_of in measured.passes.items():
            table.add_row(f"{length:,}", *(f"{1e3 * value:.1f}" for value in seconds_of.values()))
        console.print(table)
    table = table_of("Milliseconds of a step (of the draft)", "drafter", *(f"batch {size}" for size in measured.seconds))
    for label in next(iter(measured.seconds.values())):
        cells = [f"{1e3 * median(one[label].steps):.1f} ({1e3 * one[label].draft:.1f})" for one in measured.seconds.values()]
        table.add_row(escape(label), *cells)
    console.print(table)
    if is_noisy(measured):
        console.print(
            "[bold red]The machine was noisy[/]: steps of the same method took different times in different turns, so "
            "no speedup can be told. Forecast again when nothing else runs.",
            soft_wrap=True,
        )
    hours = ", ".join(f"{multiple:g}x the data {format_time(left)}" for multiple, left in seconds.items())
    what = "labels and training" if len(seconds) > 1 else "the training, with the labels that are there"
    console.print(f"What is left of {what}: {hours}.", soft_wrap=True)
    for temperature in config.temperatures if not is_noisy(measured) else ():
        at = f"At temperature {temperature:g}: " if len(config.temperatures) > 1 else ""
        console.print(f"[bold]{at}{escape(verdict(forecasts, temperature))}[/]", soft_wrap=True)


def table_of(title: str, first: str, *columns: str) -> Table:
    """Return a table whose first column is text, and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, width=WIDTH)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _number(labels: float) -> str:
    """Write a number of labels so that it fits a narrow column."""
    return f"{labels:,.0f}" if labels < 1e6 else f"{labels / 1e6:,.1f}M"


def cell(interval: Interval) -> str:
    """Return an interval on two lines, which fit a narrow column."""
    return f"{interval.value:.2f}\n[{interval.low:.2f}, {interval.high:.2f}]"


def record_of(measured: Measured, forecasts: Sequence[MethodForecast], total_labels: float, planner: Planner) -> dict[str, Any]:
    """Return the content of forecast.json."""
    target = planner.target
    return {
        "target": target.identity.name,
        "total_labels": round(total_labels),
        "seconds": dict(planner.seconds),
        "num_labels": measured.num_labels,
        "num_prompts": len(measured.prompts),
        "forecasts": [asdict(one) for one in forecasts],
        "is_noisy": is_noisy(measured),
        "pass_seconds": measured.passes,
        "verdicts": {} if is_noisy(measured) else {at: verdict(forecasts, at) for at in measured.certainty},
        "environment": asdict(describe_environment(target.device, target.linears)),
        "step_seconds": {size: {label: asdict(one) for label, one in by.items()} for size, by in measured.seconds.items()},
    }
