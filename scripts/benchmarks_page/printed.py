"""Tables that a bench has printed, as its record has them."""

from collections.abc import Callable

from .tables import Records


def printed_tables(records: Records, name: str) -> str:
    """Return all tables."""
    tables: str = records.read(name)["tables"]
    return tables.strip()


PRINTED: dict[str, Callable[..., str]] = {"printed_tables": printed_tables}
