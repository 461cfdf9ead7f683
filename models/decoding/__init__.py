"""Speculative decoding with draft trees: the loop, the trees, and the acceptance rules."""

from .acceptance import GreedyAcceptance as GreedyAcceptance
from .acceptance import SpeculativeSampling as SpeculativeSampling
from .acceptance import TypicalAcceptance as TypicalAcceptance
from .loop import generate as generate
from .loop import stream_text as stream_text
from .pipelined import generate_pipelined as generate_pipelined
from .sampling import RowSeeds as RowSeeds
from .sampling import Sampling as Sampling
from .sampling import warp as warp
from .stopping import Finish as Finish
from .tree import DraftTree as DraftTree
from .tree import chain_tree as chain_tree
from .tree import empty_tree as empty_tree
from .types import Acceptance as Acceptance
from .types import Prompts as Prompts
from .types import Step as Step
from .types import TargetOutput as TargetOutput
