"""The registry of drafters. A new one is a module, a row here, and a file in conf/drafter/."""

from .base import TrainableDrafter
from .draft_model import DraftModel
from .eagle import Eagle
from .eagle3 import Eagle3
from .medusa import Medusa
from .redrafter import Redrafter

DRAFTERS: dict[str, type[TrainableDrafter]] = {
    "draft_model": DraftModel,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "redrafter": Redrafter,
}


def kind_of(drafter: TrainableDrafter) -> str:
    """Return the registry's name of a drafter."""
    return next(kind for kind, drafter_class in DRAFTERS.items() if type(drafter) is drafter_class)
