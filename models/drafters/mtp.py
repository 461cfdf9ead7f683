"""MTP heads: a layer that the target was trained with, which predicts one token more (arXiv 2412.19437, section 2.2).

    x = fc([norm(e) ; norm(f)]),   a = x + attention(norm(x)),   g = a + MLP(norm(a)),   logits = target's head(norm(g))

Here e is the target's embedding of the next token, and f its last hidden state, or the layer's previous output if
that state isn't known yet. So the same layer drafts all depths, as serving engines do with it. It is of the
target's own kind, with whatever the family has: experts, latent attention, gates. `mtp_weights` says where
checkpoints have it.
"""

import copy

import torch
from jaxtyping import Float
from torch import nn

from ..llm.hf_target import HFTarget
from ..llm.tree_attention import FULL
from .decoder_layer import make_full_layer
from .feature_drafter import StateDrafter
from .mtp_weights import own_weights, read_head
from .options import MtpConfig


class Mtp(StateDrafter):
    """An MTP head. Deeper steps read the layer's output after the final norm, or before it."""

    Config = MtpConfig
    DEPTH_OPTION = "depth"
    config: MtpConfig

    def __init__(self, config: MtpConfig, target: HFTarget) -> None:
        super().__init__(target, make_full_layer(target), kind=FULL)
        self.config = config
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=False)
        self.enorm, self.hnorm, self.final_norm = (copy.deepcopy(self.layer.input_layernorm) for _ in range(3))

    @classmethod
    def for_target(cls, config: MtpConfig, target: HFTarget) -> "Mtp":
        drafter = cls(config, target)
        if config.init == "target":
            read_head(drafter.state_dict(), own_weights(target), target)
        return drafter

    def token_inputs(self, embeddings: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        normed: torch.Tensor = self.enorm(embeddings)
        return normed

    def layer_inputs(
        self, inputs: Float[torch.Tensor, "batch seq hidden"], hidden: Float[torch.Tensor, "batch seq hidden"]
    ) -> tuple[Float[torch.Tensor, "batch seq hidden"], Float[torch.Tensor, "batch seq hidden"]]:
        pair = self.fc(torch.cat([inputs, self.hnorm(hidden)], dim=-1))
        return self.layer.input_layernorm(pair), pair

    def layer_outputs(self, outputs: Float[torch.Tensor, "batch seq hidden"]) -> Float[torch.Tensor, "batch seq hidden"]:
        return self.final_norm(outputs) if self.config.norm_output else outputs

    def logits(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch vocab"]:
        return super().logits(outputs if self.config.norm_output else self.final_norm(outputs))
