"""Tables of evaluations: folders with a summary.json."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from outrider.eval.records.names import BASELINE

from .tables import Records, count, device_name, kind_name, method_name, number, table, with_interval

SIZES = "size_study/size_study.json"


def speeds(records: Records, name: str, temperature: float = 0.0, suite: str | None = None) -> str:
    """Return the table of an evaluation at one temperature, on one suite."""
    rows = _rows(records, name, temperature, suite)
    timed = any(row.get("draft_seconds_per_step") for row in rows)
    columns = ["method", "tokens per step", "tokens/s", "speedup [95 %]", "ceiling (computed)"]
    cells = []
    for row in rows:
        line = [method_name(row["method"]), number(row["tokens_per_step"]), number(row["tokens_per_second"], 0)]
        line += [with_interval(row["speedup"], row["speedup_ci95"], "x"), number(row["ceiling"], 2, "x")]
        if timed:
            seconds = row["draft_seconds_per_step"]
            line.append(number(None if seconds is None else 1000 * seconds, 1))
        cells.append([*line, _verdict(row)])
    return table([*columns, *(["drafter, ms per step"] if timed else []), "lossless"], cells)


def conditions(records: Records, name: str, temperature: float = 0.0, suite: str | None = None) -> str:
    """Return what an evaluation was measured on, in a sentence."""
    row = _rows(records, name, temperature, suite)[0]
    answers = f"{count(row['num_prompts'], 'prompt')}, answers of at most {count(row['max_new_tokens'], 'token')}"
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"Suite {row['suite']}, {answers}, {kind}, batch size {row['batch_size']}, {row['dtype']}."


def tokens_per_step(records: Records, *names: str) -> str:
    """Return tokens per step of several evaluations, for records whose speeds mean nothing."""
    rows = [row for name in names for row in _rows(records, name, 0.0, None) if row["method"] != BASELINE]
    cells = [[method_name(row["method"]), number(row["tokens_per_step"]), _verdict(row)] for row in rows]
    return table(["method", "tokens per step", "lossless"], cells)


def speedup_by_batch_size(records: Records, name: str) -> str:
    """Return a table of speedups with a column for each batch size."""
    rows = [row for row in records.read(name) if row["method"] != BASELINE]
    sizes = sorted({row["batch_size"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["batch_size"]): row for row in rows}
    cells = [
        [
            method_name(method),
            number(found[method, sizes[0]]["tokens_per_step"]),
            *(number(found[method, size]["speedup"], 2, "x") for size in sizes),
        ]
        for method in methods
    ]
    return table(["method", "tokens per step", *(f"speedup at batch size {size}" for size in sizes)], cells)


def trainings(records: Records, name: str, estimates: str) -> str:
    """Return what trainings took, and their measured tokens per step beside those of decoding."""
    decoded = {row["drafter"]: row for row in records.read(estimates)["figures"]}
    columns = [
        "drafter",
        "parameters",
        "steps",
        "seconds",
        "chain estimate on training batches",
        "measured in training",
        "decoding other prompts [95 %]",
        "ratio",
    ]
    cells = []
    for drafter, facts in records.read(name).items():
        row = decoded[drafter]
        cells.append(
            [
                kind_name(drafter),
                f"{facts['parameters'] / 1e6:.2f} M",
                facts["steps"],
                number(facts["seconds"], 0),
                number(facts["tokens_per_step_estimate"]),
                number(row["training"]),
                with_interval(row["decoding"], row["interval"]),
                number(row["decoding"] / row["training"]),
            ]
        )
    return table(columns, cells)


def drafters_table(records: Records) -> str:
    """Return the README's table: speedups by the target's size, in its faster type and all threads."""
    record = records.read(SIZES)
    threads = max(row["threads"] for row in record["rows"])
    rows = [row for row in record["rows"] if row["threads"] == threads]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    plain = {row["dtype"]: row["tokens_per_second"] for row in rows if row["size"] == sizes[-1] and row["method"] == "plain"}
    dtype = max(plain, key=lambda name: plain[name])
    found = {(row["method"], row["size"]): row for row in rows if row["dtype"] == dtype}
    methods = dict.fromkeys(method for method, _ in found)
    cells = [
        [
            method,
            number(found[method, sizes[-1]]["tokens_per_step"]),
            *(with_interval(found[method, size]["speedup"], found[method, size]["speedup_ci95"], "x") for size in sizes),
        ]
        for method in methods
    ]
    environment = record["environment"]
    machine = f"{environment['cpu']}, {count(environment['num_cpus'], 'core')}, {device_name(environment['device'])}"
    columns = ["method", "tokens per step", *(f"{size} parameters" for size in sizes)]
    return (
        table(columns, cells)
        + f"\n\n{machine}; {dtype}, greedy, batch size 1, {count(threads, 'thread')}; all drafters trained alike."
    )


def _rows(records: Records, name: str, temperature: float, suite: str | None) -> list[dict[str, Any]]:
    rows = records.read(name)
    return [row for row in rows if row["temperature"] == temperature and suite in (None, row["suite"])]


def _verdict(row: dict[str, Any]) -> str:
    """Return the verdict on a row's answers; older records have no words for it."""
    return str(row.get("lossless_label") or ("yes" if row["lossless"] else "NO"))


def boosting(records: Records, name: str) -> str:
    """Return tokens per step of two drafters and their merges, by the number of nodes."""
    by_name: dict[str, list[str]] = defaultdict(list)
    columns = []
    for row in records.read(name)["rows"]:
        if (column := f"{row['nodes']} nodes [95 %]") not in columns:
            columns.append(column)
        value = row["ratio"] if "ratio" in row else row["tokens_per_step"]
        by_name[row["name"]].append(with_interval(value, row["interval"], "x" if "ratio" in row else ""))
    return table(["tokens per step", *columns], [[method, *values] for method, values in by_name.items()])


SUMMARIES: dict[str, Callable[..., str]] = {
    "speeds": speeds,
    "conditions": conditions,
    "tokens_per_step": tokens_per_step,
    "speedup_by_batch_size": speedup_by_batch_size,
    "trainings": trainings,
    "boosting": boosting,
}
