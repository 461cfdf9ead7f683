"""Tables and notes that a bench has printed, as its record has them."""

from collections.abc import Callable

from .tables import Records


def printed_tables(records: Records, name: str) -> str:
    """Return all tables."""
    tables: str = records.read(name)["tables"]
    return tables.strip()


def printed_notes(records: Records, name: str) -> str:
    """Return the goals, each reached or not, and other notes."""
    return "\n".join(f"- {line}" for line in records.read(name)["notes"])


PRINTED: dict[str, Callable[..., str]] = {"printed_tables": printed_tables, "printed_notes": printed_notes}
