"""Speculative decoding with draft trees: the loop, the trees, and the rules that keep it lossless."""

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .acceptance import GreedyAcceptance, SpeculativeSampling, TypicalAcceptance
    from .loop import generate
    from .prompts import Prompts
    from .sampling import RowSeeds, Sampling, warp
    from .stopping import Finish
    from .streaming import stream_text
    from .tree import DraftTree, chain_tree, empty_tree
    from .types import Acceptance, PhaseSeconds, Step, TargetOutput

__all__ = [
    "Acceptance",
    "DraftTree",
    "Finish",
    "GreedyAcceptance",
    "PhaseSeconds",
    "Prompts",
    "RowSeeds",
    "Sampling",
    "SpeculativeSampling",
    "Step",
    "TargetOutput",
    "TypicalAcceptance",
    "chain_tree",
    "empty_tree",
    "generate",
    "stream_text",
    "warp",
]
__getattr__ = lazily(
    __name__,
    {
        "acceptance": (
            "GreedyAcceptance",
            "SpeculativeSampling",
            "TypicalAcceptance",
        ),
        "loop": ("generate",),
        "prompts": ("Prompts",),
        "sampling": (
            "RowSeeds",
            "Sampling",
            "warp",
        ),
        "stopping": ("Finish",),
        "streaming": ("stream_text",),
        "tree": (
            "DraftTree",
            "chain_tree",
            "empty_tree",
        ),
        "types": (
            "Acceptance",
            "PhaseSeconds",
            "Step",
            "TargetOutput",
        ),
    },
)
