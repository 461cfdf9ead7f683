"""Tables of the study of free drafts: baselines, trained drafters and merged trees."""

from collections.abc import Callable
from typing import Any

from outrider.eval.results.marks import is_error, marks

from .tables import Records, count, device_name, number, table, with_interval

FREE_STUDY = "free_study/free_study.json"
PARTS = {
    "demo": "Greedy, a prompt at a time",
    "sampled": "Temperature 1",
    "batch": "Four prompts at a time",
    "grown": "Beside the grown target",
}


def free_methods(records: Records, name: str) -> str:
    """Return a table of the methods for each part of the study and each type."""
    rows = records.read(name)["rows"]
    tables = []
    for part, title in PARTS.items():
        for dtype in dict.fromkeys(row["dtype"] for row in rows if row["part"] == part):
            of_part = [row for row in rows if (row["part"], row["dtype"]) == (part, dtype)]
            cells = [
                [
                    row["method"],
                    number(row["tokens_per_step"]),
                    number(row["draft_tokens_per_step"], 1),
                    _speed(row),
                    *([_speed(row["least_repeating"] or {})] if part == "demo" else []),
                    f"{row['num_identical']} of {row['num_prompts']}",
                ]
                for row in of_part
            ]
            columns = ["method", "tokens per step", "nodes per step", "speedup [95 %]"]
            columns += [*(["least repeating third"] if part == "demo" else []), "identical"]
            size = f", {of_part[0]['size']} parameters" if of_part[0]["size"] else ""
            tables.append(f"{title}{size}, {dtype}:\n\n{table(columns, cells)}")
    return "\n\n".join(tables)


def free_pace(records: Records, name: str) -> str:
    """Return how drafting by expected gain compares with fixed numbers of nodes."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for pair in records.read(name)["pairs"]:
        key = tuple(pair[field] for field in ("size", "dtype", "suite", "temperature", "batch_size"))
        if pair["part"] in ("pace", "grown"):
            found.setdefault(key, {})[pair["against"]] = pair
    cells = [
        [
            f"{size or 'demo'}, {dtype}, {suite}",
            f"{t:g}",
            batch,
            by["best fixed"]["other"],
            _speed(by["best fixed"]),
            _speed(by["default fixed"]),
        ]
        for (size, dtype, suite, t, batch), by in found.items()
        if {"best fixed", "default fixed"} <= by.keys()
    ]
    columns = [
        "target, type, suite",
        "temperature",
        "batch size",
        "best fixed setting, in hindsight",
        "speed over it",
        "over the default fixed one",
    ]
    return table(columns, cells)


def suffix_index(records: Records, name: str) -> str:
    """Return memory and time of the index of `suffix` over long texts."""
    record = records.read(name)
    rows = [
        [
            text,
            number(values["megabytes"], 1),
            number(values["prompt_seconds"]),
            number(values["add_microseconds_per_token"], 1),
            number(values["draft_microseconds"], 0),
            number(values["draft_microseconds_99th_percentile"], 0),
        ]
        for text, values in record["texts"].items()
    ]
    lengths = f"A prompt of {count(record['prompt_tokens'], 'token')}, {count(record['tokens'], 'token')} with the answer."
    columns = [
        "text",
        "MB",
        "seconds for the prompt",
        "microseconds to add a token",
        "to draft, median",
        "to draft, 99th percentile",
    ]
    return f"{lengths}\n\n{table(columns, rows)}"


def free_table(records: Records, name: str = FREE_STUDY) -> str:
    """Return the table of README and docs: all methods on the demo, and beside the grown target."""
    record = records.read(name)
    # 1. The columns: the demo, and the grown target in its faster type.
    demo = {row["method"]: row for row in record["rows"] if row["part"] == "demo"}
    grown = [row for row in record["rows"] if row["part"] == "grown"]
    plain = {row["dtype"]: row["tokens_per_second"] for row in grown if row["method"] == "plain"}
    dtype = max(plain, key=lambda name: plain[name], default=None)
    large = {row["method"]: row for row in grown if row["dtype"] == dtype}
    # 2. The table.
    cells = [
        [method, number(row["tokens_per_step"]), _speed(row), *([_speed(large.get(method, {}))] if large else [])]
        for method, row in demo.items()
    ]
    columns = ["method", "tokens per step", "the demo's target", *(f"grown to {row['size']} parameters" for row in grown[:1])]
    environment, first = record["environment"], next(iter(demo.values()))
    machine = f"{environment['cpu']}, {count(environment['num_cpus'], 'core')}, {device_name(environment['device'])}"
    types = first["dtype"] + (f" and {dtype}" if dtype and dtype != first["dtype"] else "")
    settings = f"{types}, greedy, batch size {first['batch_size']}, {count(first['threads'], 'thread')}"
    return f"{table(columns, cells)}\n\n{machine}; {settings}."


def _speed(row: dict[str, Any]) -> str:
    """Format a speedup with its marks; an error of measurement has no speed."""
    if row.get("speedup") is None:
        return row.get("fault") or "-"
    return "error" if is_error(row) else ", ".join([with_interval(row["speedup"], row["speedup_ci95"], "x"), *marks(row)])


FREE_DRAFTS: dict[str, Callable[..., str]] = {
    "free_methods": free_methods,
    "free_pace": free_pace,
    "suffix_index": suffix_index,
}
