"""Counts of the outcomes by kind, their table and their record."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import ACCEPTED, BROKE, HELD, YOURS
from .processes import Outcome

RECORD, TABLE = "attacks.json", "table.md"


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the counts by kind, the accepted cases with their reasons, and the broken ones."""
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        verdicts = Counter(outcome.verdict for outcome in outcomes if outcome.kind == kind)
        rows.append(
            {
                "kind": kind,
                "tried": verdicts.total(),
                "held": sum(verdicts[name] for name in HELD),
                "accepted": verdicts[ACCEPTED],
                "broke": sum(verdicts[name] for name in BROKE),
                "seconds": round(sum(outcome.seconds for outcome in outcomes if outcome.kind == kind), 1),
                "verdicts": dict(sorted(verdicts.items())),
            }
        )
    return {
        "rows": rows,
        "accepted": [asdict(outcome) for outcome in outcomes if outcome.verdict in (ACCEPTED, YOURS)],
        "broke": [asdict(outcome) for outcome in outcomes if outcome.verdict in BROKE],
        "slowest": asdict(max(outcomes, key=lambda outcome: outcome.seconds)) if outcomes else None,
    }


def write_report(record: Mapping[str, Any], folder: Path) -> None:
    """Write the record and its table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    (folder / TABLE).write_text(table(record))


def table(record: Mapping[str, Any]) -> str:
    """Return the counts, what is accepted without a word and why, and what broke."""
    verdicts = [name for name in (*HELD, ACCEPTED, *BROKE) if any(name in row["verdicts"] for row in record["rows"])]
    lines = [
        "| kind | tried | held | accepted | broke | " + " | ".join(verdicts) + " |",
        "|---|" + "---:|" * (4 + len(verdicts)),
    ]
    for row in record["rows"]:
        counts = [row["tried"], row["held"], row["accepted"], row["broke"]]
        cells = [str(row["verdicts"].get(name, "")) for name in verdicts]
        lines.append(f"| {row['kind']} | " + " | ".join([*map(str, counts), *cells]) + " |")
    meanings = {**HELD, ACCEPTED: "accepted without a word, for the reason below", **BROKE}
    lines += ["", *(f"- {name}: {meanings[name]}." for name in verdicts)]
    if record["accepted"]:
        lines += ["", "| accepted | why |", "|---|---|"]
        reasons: dict[str, list[str]] = {}
        for case in record["accepted"]:
            reasons.setdefault(case["note"], []).append(f"{case['kind']}: {case['name']}")
        lines += [f"| {'; '.join(names)} | {reason} |" for reason, names in reasons.items()]
    if record["broke"]:
        lines += ["", "| broke | how | what happened |", "|---|---|---|"]
        cells = [[f"{case['kind']}: {case['name']}", case["verdict"], case["note"]] for case in record["broke"]]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(lines) + "\n"
