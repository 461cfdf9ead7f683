"""Table of the study of when a growing draft tree is verified."""

from .tables import Records, number, table

EXPECTED = "expected"


def growth_rules(records: Records, name: str) -> str:
    """Return the speed of each rule over the best fixed tree."""
    record = records.read(name)
    best = [row for row in record["rows"] if row["method"] == "best fixed"]
    ratios = [row["ratio"] for row in best]
    # 1. The best fixed tree of each ratio.
    trees = [f"{row['setting']['length']} deep, {row['nodes_per_step']} nodes" for row in best]
    rows = [
        ["best fixed tree", "", *trees],
        ["its tokens per step", "", *(number(row["tokens_per_step"]) for row in best)],
    ]
    # 2. The rules.
    rules = [row for row in record["rows"] if row["method"] != "best fixed"]
    for method, gamma in dict.fromkeys((row["method"], row["gamma"]) for row in rules):
        cells = {row["ratio"]: row for row in rules if (row["method"], row["gamma"]) == (method, gamma)}
        speeds = [number(cells[ratio]["over_best_fixed"], 2, "x") for ratio in ratios]
        rows.append([method, f"{gamma:.2g}", *speeds])
        if method == EXPECTED:
            rows.append(["its draft passes and nodes per step", "", *map(_work, (cells[ratio] for ratio in ratios))])
    columns = ["rule", "gamma", *(f"a pass takes {ratio:g} draft passes" for ratio in ratios)]
    return f"{table(columns, rows)}\n\n{record['texts']} texts of {record['tokens']:,} tokens."


def _work(row: dict[str, float]) -> str:
    return f"{row['drafts_per_step']:.1f}, {row['nodes_per_step']:.0f}"
