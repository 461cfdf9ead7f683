"""Logits that aren't numbers: what plain decoding would have read decides, whatever is drafted."""

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.manifest import TargetIdentity
from outrider.models.decoding import (
    GreedyAcceptance,
    RowSeeds,
    Sampling,
    SpeculativeSampling,
    TargetOutput,
    TypicalAcceptance,
    empty_tree,
    generate,
    generate_pipelined,
)
from outrider.models.decoding.protocols import AcceptanceRule
from outrider.models.decoding.reading import read_acceptance, require_numbers
from outrider.models.decoding.tree import DraftTree, Drawn
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.target.hf_target import HFTarget

from ...tiny_models import IDENTITY
from .streaming_toys import DialledDrafter
from .toy_stages import ToyTarget

VOCAB = 40
HOLE = 39
"""A token whose embedding is NaN: so are all logits after it."""
PROMPTS = [torch.tensor([5, 6, 7, 8, 9, 10, 11]), torch.tensor([12, 3]), torch.tensor([4, 20, 21, 22])]
NUM_NEW = 12
SAMPLED = SpeculativeSampling(sampling=Sampling(temperature=1.0))
RULES = [GreedyAcceptance(), SAMPLED]


class HoleTarget(HFTarget):
    """A target with a hole in its vocabulary, which it writes as token number `hole_at` of an answer."""

    hole_at: int | None = None

    def _forward(self, model: Any, tokens: torch.Tensor, **arguments: Any) -> TargetOutput:
        output = super()._forward(model, tokens, **arguments)
        output.logits[..., HOLE] = output.logits[..., HOLE].where(output.logits[..., HOLE].isnan(), -inf)
        if self.hole_at is not None:
            at = arguments["position_ids"] == len(PROMPTS[0]) + self.hole_at - 1  # of row 0's prompt and answer
            output.logits[0, :, HOLE] += torch.where(at[0], inf, 0.0).nan_to_num()[-output.logits.shape[1] :]
        return output
