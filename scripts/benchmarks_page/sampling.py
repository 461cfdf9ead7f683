"""Tables of the study of sampled decoding: drawn trees, and sampled labels."""

from collections.abc import Callable
from typing import Any

from .tables import Records, method_name, number, table, with_interval


def drawn_trees(records: Records, name: str) -> str:
    """Return tokens per step of drawn and of deterministic trees, by temperature."""
    rows = records.read(name)["trees"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    cells = {(row["kind"], row["nodes"], row["tree"], row["temperature"]): row for row in rows}
    lines = [
        [
            f"{method_name(kind)}, {nodes} nodes, {tree}",
            *(text for temperature in temperatures for text in _figures(cells[kind, nodes, tree, temperature])),
        ]
        for kind, nodes, tree in dict.fromkeys(key[:3] for key in cells)
    ]
    return table(["tree", *_columns(temperatures, "the deterministic tree")], lines)


def sampled_labels(records: Records, name: str) -> str:
    """Return tokens per step of a drafter by its labels and loss, by temperature."""
    rows = records.read(name)["labels"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    cells = {(row["labels"], row["temperature"]): row for row in rows}
    lines = []
    for labels in dict.fromkeys(key[0] for key in cells):
        of_labels = [cells[labels, temperature] for temperature in temperatures]
        by_seed = " / ".join(", ".join(number(value) for value in row["by_seed"]) for row in of_labels)
        lines.append([labels, *(text for row in of_labels for text in _figures(row)), by_seed])
    return table([f"labels of a {method_name(rows[0]['kind'])}", *_columns(temperatures, "greedy labels"), "by seed"], lines)


def _columns(temperatures: list[float], reference: str) -> list[str]:
    return [
        text for temperature in temperatures for text in (f"tokens per step, T = {temperature:g}", f"over {reference} [95 %]")
    ]


def _figures(row: dict[str, Any]) -> tuple[str, str]:
    return number(row["tokens_per_step"]), with_interval(row["ratio"], row["ratio_interval"])


SAMPLING: dict[str, Callable[..., str]] = {function.__name__: function for function in (drawn_trees, sampled_labels)}
