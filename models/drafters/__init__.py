"""The drafters, one a file, and the registry that finds them by name."""

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .null import NullDrafter
    from .registry import DRAFTERS
    from .saved.build import build_drafter, parse_drafter
    from .saved.loading import load_drafter, save_drafter

__all__ = ["DRAFTERS", "NullDrafter", "build_drafter", "load_drafter", "parse_drafter", "save_drafter"]
__getattr__ = lazily(
    __name__,
    {
        "saved.loading": ("load_drafter", "save_drafter"),
        "saved.build": ("build_drafter", "parse_drafter"),
        "null": ("NullDrafter",),
        "registry": ("DRAFTERS",),
    },
)
