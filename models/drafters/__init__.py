"""The drafters, one a file, and the registry that finds them by name."""

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .checkpoint import load_drafter, save_drafter
    from .null import NullDrafter
    from .registry import DRAFTERS, build_drafter

__all__ = ["DRAFTERS", "NullDrafter", "build_drafter", "load_drafter", "save_drafter"]
__getattr__ = lazily(
    __name__,
    {
        "checkpoint": ("load_drafter", "save_drafter"),
        "null": ("NullDrafter",),
        "registry": ("DRAFTERS", "build_drafter"),
    },
)
