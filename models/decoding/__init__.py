"""Speculative decoding with draft trees: the loop, the trees, and the rules that keep it lossless."""

from .acceptance import GreedyAcceptance
from .loop import generate
from .tree import DraftTree, chain_tree, empty_tree
from .types import Acceptance, PhaseSeconds, Step, TargetOutput

__all__ = [
    "Acceptance",
    "DraftTree",
    "GreedyAcceptance",
    "PhaseSeconds",
    "Step",
    "TargetOutput",
    "chain_tree",
    "empty_tree",
    "generate",
]
