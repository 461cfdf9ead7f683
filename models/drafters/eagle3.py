"""EAGLE-3: one decoder layer over fused features of three target layers (arXiv 2503.01840).

    h = fc([features of three layers])  at the first depth, at others the layer's previous output
    a = h + attention([input_layernorm(e) ; hidden_norm(h)]),   g = a + MLP(norm(a)),   logits = lm_head(norm(g))

(section 3.1). Here e is the target's frozen embedding of the next token. There is no loss on
features. Training unrolls the drafter over its own outputs, as drafting does (section 3.2).

EAGLE-3.1 has two more norms, which vLLM, SGLang and speculators know by the same names:

    h = fc([norm(features of a layer), ...])    `fc_norm`: a norm for each of the layers
    g = norm(a + MLP(norm(a))), logits = lm_head(g)    `norm_output`: deeper steps read normed outputs

speculators knows a third one, `norm_before_fc`: one norm over the features of all layers side by side (`input_norm`).
"""

import copy

import torch
from jaxtyping import Float
from torch import nn

from ..llm.hf_target import HFTarget
from ..llm.hidden_states import decoder_layers, decoder_of
from .decoder_layer import make_layer, start_from_target
from .feature_drafter import FeatureDrafter
from .fused_layers import FusedLayers, default_feature_layers
from .options import Eagle3Config
from .vocabulary import ReducedVocabulary


class Eagle3(FusedLayers, ReducedVocabulary, FeatureDrafter):
    """EAGLE-3. Deeper steps read the layer's output before the final norm, or after it."""

    Config = Eagle3Config
    DEPTH_OPTION = "depth"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: HFTarget) -> None:
        hidden_size = target.hidden_size
        super().__init__(target, make_layer(target, 2 * hidden_size, config.layer), config.layer)
        num_outputs = self.add_draft_vocabulary(config.draft_vocab_size, target.vocab_size)
        num_layers = len(decoder_layers(target.model))
        self.choose_feature_layers(config.feature_layers or default_feature_layers(num_layers), num_layers)
        self.config = config
        self.fc = nn.Linear(len(self.feature_layers) * hidden_size, hidden_size, bias=False)
        self.hidden_norm, self.norm = copy.deepcopy(self.layer.input_layernorm), copy.deepcopy(self.layer.input_layernorm)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(copy.deepcopy(self.norm) for _ in self.feature_layers)
        if config.norm_before_fc:
            self.input_norm = copy.deepcopy(self.norm)
            self.input_norm.weight = nn.Parameter(self.norm.weight.detach().repeat(len(self.feature_layers)))
        self.lm_head = nn.Linear(hidden_size, num_outputs, bias=False)

    @classmethod
    def for_target(cls, config: Eagle3Config, target: HFTarget) -> "Eagle3":
        drafter = cls(config, target)
        if config.init == "target":
            start_from_target(drafter.layer, drafter.fc, target)
            drafter.start_head(drafter.lm_head, target.head)
            with torch.no_grad():
                drafter.hidden_norm.weight.copy_(drafter.layer.input_layernorm.weight)
                drafter.norm.weight.copy_(decoder_of(target.model).norm.weight)
        return drafter

    # --- the network

    def fuse(self, features: Float[torch.Tensor, "*batch feature"]) -> Float[torch.Tensor, "*batch hidden"]:
        features = features.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def token_inputs(self, embeddings: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch hidden"]:
        normed: torch.Tensor = self.layer.input_layernorm(embeddings)
        return normed

    def layer_inputs(
        self, inputs: Float[torch.Tensor, "batch seq hidden"], hidden: Float[torch.Tensor, "batch seq hidden"]
    ) -> tuple[Float[torch.Tensor, "batch seq both"], Float[torch.Tensor, "batch seq hidden"]]:
        return torch.cat([inputs, self.hidden_norm(hidden)], dim=-1), hidden

    def layer_outputs(self, outputs: Float[torch.Tensor, "batch seq hidden"]) -> Float[torch.Tensor, "batch seq hidden"]:
        return self.norm(outputs) if self.config.norm_output else outputs

    def logits(self, outputs: Float[torch.Tensor, "*batch hidden"]) -> Float[torch.Tensor, "*batch draft_vocab"]:
        logits: torch.Tensor = self.lm_head(outputs if self.config.norm_output else self.norm(outputs))
        return logits
