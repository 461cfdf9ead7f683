"""Tables of the bench of targets larger than memory."""

from collections.abc import Callable

from .tables import Records


def offload_tables(records: Records, name: str) -> str:
    """Return the tables of all cells, and the ablation, as the bench has printed them."""
    tables: str = records.read(name)["tables"]
    return tables.strip()


def offload_notes(records: Records, name: str) -> str:
    """Return the goals, each reached or not, and the other notes of the bench."""
    return "\n".join(f"- {line}" for line in records.read(name)["notes"])


OFFLOAD: dict[str, Callable[..., str]] = {"offload_tables": offload_tables, "offload_notes": offload_notes}
