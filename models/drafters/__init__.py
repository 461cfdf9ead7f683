"""The drafters, one a file, and the registry that finds them by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import load_drafter, save_drafter
    from .null import NullDrafter
    from .registry import DRAFTERS, build_drafter

__all__ = ["DRAFTERS", "NullDrafter", "build_drafter", "load_drafter", "save_drafter"]

HOMES = {
    "DRAFTERS": "registry",
    "NullDrafter": "null",
    "build_drafter": "registry",
    "load_drafter": "checkpoint",
    "save_drafter": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: whoever only looks at a folder's files needs no model, and no transformers."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
