"""Table of the attacks by kind."""

from .tables import Records, number, table


def attack_counts(records: Records, name: str) -> str:
    """Return how many attacks of each kind were tried, held and broke something."""
    rows = [
        [row["kind"], *(str(row[column]) for column in ("tried", "held", "accepted", "broke")), number(row["seconds"] / 60, 1)]
        for row in records.read(name)["rows"]
    ]
    return table(["kind", "tried", "held", "accepted", "broke", "minutes"], rows)
