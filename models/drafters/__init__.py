"""The drafters, one a file, and the registry that finds them by name."""

from .checkpoint import load_drafter, save_drafter
from .null import NullDrafter
from .registry import DRAFTERS, build_drafter

__all__ = ["DRAFTERS", "NullDrafter", "build_drafter", "load_drafter", "save_drafter"]
