"""Checkpoints of tiny random targets with an MTP head under their families' names, and what the heads compute."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, masking_utils

from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..conformance.families import make_family

QWEN = {
    "fc": "mtp.fc",
    "e": "mtp.pre_fc_norm_embedding",
    "h": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
OWN_LAYER = {
    "fc": "model.layers.4.eh_proj",
    "e": "model.layers.4.enorm",
    "h": "model.layers.4.hnorm",
    "norm": "model.layers.4.shared_head.norm",
    "layer": "model.layers.4",
}
MIMO = {
    "fc": "model.mtp_layers.0.input_proj",
    "e": "model.mtp_layers.0.token_layernorm",
    "h": "model.mtp_layers.0.hidden_layernorm",
    "norm": "model.mtp_layers.0.final_layernorm",
    "layer": "model.mtp_layers.0",
}
NAMES = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), QWEN),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), OWN_LAYER),
    "smollm3": MIMO,
}
"""Names of a head's parts by family. SmolLM3 stands for MiMo, which transformers doesn't have."""


class PlainHead(nn.Module):
    """An MTP head of transformers' own modules, as the family's paper or engine describes it."""

    def __init__(self, model: PreTrainedModel, family: str) -> None:
        super().__init__()
        config, layers = model.config.get_text_config(), model.get_decoder().layers
        index = max(number for number, layer in enumerate(layers) if hasattr(layer, "self_attn"))
        self.layer = type(layers[index])(config, layer_idx=index)
        make_norm = type(layers[index].input_layernorm)
        self.e, self.h, self.norm = (make_norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.model, self.family = (model,), family
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and "bias" not in name), std=0.3)
        self.to(model.dtype)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs for pairs of a token and the state before it, of one text."""
        model = self.model[0]
        pair = [self.e(model.get_input_embeddings()(tokens)), self.h(hidden)]
        inputs = self.fc(torch.cat(pair[::-1] if NAMES[self.family] is MIMO else pair, dim=-1))
        positions = torch.arange(tokens.shape[1])[None]
        mask = masking_utils.create_causal_mask(
            config=model.config.get_text_config(),
            inputs_embeds=inputs,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        rotary = model.get_decoder().rotary_emb(inputs, positions)
        outputs = self.layer(inputs, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return self.norm(outputs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors under the family's names; each expert has its own."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            part, _, rest = name.partition(".")
            stored = f"{NAMES[self.family][part]}.{rest}"
            if ".experts." not in name or self.family == "qwen3_5_moe_text":
                tensors[stored] = tensor.clone()
                continue
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for number, expert in enumerate(tensor):
                for which, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    tensors[f"{stored.rpartition('.')[0]}.{number}.{which}.weight"] = rows.clone()
        return tensors


def write_checkpoint(folder: Path, family: str, *, with_head: bool = True) -> PlainHead:
    """Write a checkpoint in float64, in two shards if the head is in the second; return the head."""
    torch.manual_seed(1)
    model = make_family(family)
    head = PlainHead(model, family)
    model.save_pretrained(folder)
    if with_head:
        weights = load_file(folder / "model.safetensors")
        save_file(weights | head.tensors(), folder / "model.safetensors", {"format": "pt"})
    return head


def load(folder: Path, dtype: str = "float64") -> HFTarget:
    """Load a target; its experts are computed one by one, since others know no float64."""
    target = load_target(TargetConfig(name_or_path=str(folder), dtype=dtype), torch.device("cpu"), needs_tokenizer=False)
    target.model.set_experts_implementation("eager")
    return target
