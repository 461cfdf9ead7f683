"""Speculative decoding with draft trees: the loop, the trees, and the acceptance rules."""

from ..phases import PhaseSeconds
from .acceptance import GreedyAcceptance, SpeculativeSampling, TypicalAcceptance
from .loop import generate, stream_text
from .pipelined import generate_pipelined
from .sampling import RowSeeds, Sampling, warp
from .speculation import ExpectedSpeculation
from .stopping import Finish
from .tree import DraftTree, chain_tree, empty_tree
from .types import Acceptance, Prompts, Step, TargetOutput

__all__ = [
    "Acceptance",
    "DraftTree",
    "ExpectedSpeculation",
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
    "generate_pipelined",
    "stream_text",
    "warp",
]
