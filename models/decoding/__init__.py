"""Speculative decoding with draft trees: the loop, the trees, and the acceptance rules."""

from ..phases import PhaseSeconds
from .acceptance import GreedyAcceptance, SpeculativeSampling, TypicalAcceptance
from .loop import generate
from .prompts import Prompts
from .sampling import RowSeeds, Sampling, warp
from .stopping import Finish
from .streaming import stream_text
from .tree import DraftTree, chain_tree, empty_tree
from .types import Acceptance, Step, TargetOutput

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
