"""Packages whose names are loaded when they are asked for: whoever only reads a folder's files needs no model, and modules that
need each other's packages can be imported in any order."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, names_of: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__` for the names that its modules have."""
    homes = {name: module for module, names in names_of.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    return load
