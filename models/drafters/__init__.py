"""The drafters, one per module, and the registry that maps names to them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..decoding.loop import NullDrafter as NullDrafter
    from .registry import DRAFTERS as DRAFTERS
    from .registry import TRAINING_FREE as TRAINING_FREE
    from .saved.build import build_drafter as build_drafter
    from .saved.build import parse_drafter as parse_drafter
    from .saved.loading import load_drafter as load_drafter
    from .saved.loading import save_drafter as save_drafter

MODULES = {
    "DRAFTERS": ".registry",
    "NullDrafter": "..decoding.loop",
    "TRAINING_FREE": ".registry",
    "build_drafter": ".saved.build",
    "load_drafter": ".saved.loading",
    "parse_drafter": ".saved.build",
    "save_drafter": ".saved.loading",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use.

    `outrider pull` needs only `saved.download`, and no transformers.
    """
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name], __name__), name)
