"""vLLM's model of DSpark drafters, from vLLM's files, over the plain layers of `engine_models`."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from engine_models import PLAIN, Attention, Linear, VllmConfig, fill_with_nan, get_rope, own_modules, require_taken
from torch.nn import functional as F

TARGET_LAYERS = 8
TARGETS_OWN = ["model.embed_tokens.weight", "model.mask_embedding", "lm_head.weight"]
"""Parameters that are the target's, or that only other checkpoints have."""


class UnquantizedLinearMethod:
    """Method of the plain layers, by which vLLM knows that their weights may be merged."""


class BlockAttention(Attention):
    """Attention over a block's slots and the context that `do_kv_cache_update` has written."""

    kv_cache = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.impl = SimpleNamespace(do_kv_cache_update=write_context)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any = None) -> torch.Tensor:
        q, k, v = (
            tensor.view(len(q), num, self.head_dim).transpose(0, 1) for tensor, num in zip((q, k, v), self.heads, strict=True)
        )
        keys, values = torch.cat([self.kept[0], k], dim=1), torch.cat([self.kept[1], v], dim=1)
        mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], scale=self.scaling, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)


def write_context(attention: BlockAttention, k: torch.Tensor, v: torch.Tensor, cache: Any, slots: torch.Tensor) -> None:
    attention.kept = [k.transpose(0, 1), v.transpose(0, 1)]


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """Write the norm; [layer, token, head, width] has a weight for each layer, as in vLLM's kernel."""
    weight = weight[:, None, None] if weight.ndim > 1 else weight
    out.copy_(weight * F.rms_norm(x, x.shape[-1:], eps=epsilon))


def rotary_embedding(
    positions: torch.Tensor, k: torch.Tensor, _: None, head_dim: int, table: torch.Tensor, is_neox: bool
) -> None:
    """Rotate keys [token, heads * head_dim] in place by a table of cosines and sines."""
    assert is_neox
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    left, right = k.view(len(k), -1, head_dim).chunk(2, dim=-1)
    k.copy_(torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).flatten(1))


def rope_with_table(head_dim: int, *, max_position: int, **options: Any) -> Any:
    """Return `get_rope` with the table that vLLM's kernel reads."""
    rope = get_rope(head_dim, max_position=max_position, **options)
    positions = torch.arange(max_position)
    ones = torch.cat([torch.ones(max_position, head_dim // 2), torch.zeros(max_position, head_dim // 2)], dim=-1)
    rope.cos_sin_cache = rope(positions, ones)[0]  # rotating (1, 0) gives (cos, sin)
    rope.head_size, rope.is_neox_style = head_dim, True
    return rope


def module_of(path: Path) -> ModuleType:
    """Import one of vLLM's files by its path; what it imports are stubs."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_config(path: Path, folder: Path) -> Any:
    """Read a drafter's configuration as vLLM does, that of speculators by vLLM's own conversion."""
    from transformers import Qwen3Config

    values = json.loads((path / "config.json").read_text())
    if "speculators_model_type" not in values:
        return Qwen3Config.from_pretrained(path)
    layers = dict(values["transformer_layer_config"])
    algorithms = module_of(folder / "transformers_utils" / "configs" / "speculators" / "algos.py")
    algorithms.SUPPORTED_SPECULATORS_TYPES["dspark"](config_dict=values, pre_trained_config=layers)
    return Qwen3Config(**layers)


def load(path: Path, results: dict[str, Any]) -> Any:
    """Build vLLM's model of an export with its own loader."""
    from safetensors.torch import load_file

    Linear.quant_method = UnquantizedLinearMethod()  # type: ignore[attr-defined]
    PLAIN.update(
        {
            "Attention": BlockAttention,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
            "_custom_ops": SimpleNamespace(rms_norm=rms_norm, rotary_embedding=rotary_embedding),
            "current_platform": SimpleNamespace(is_rocm=lambda: False),
            "get_rope": rope_with_table,
            "set_default_rope_theta": lambda *_, **__: None,
        }
    )
    modules = {module.__name__.rpartition(".")[2]: module for module in own_modules("vllm.model_executor.models")}
    folder = Path(modules["utils"].__file__).parents[2]
    config = read_config(path, folder)
    aux_layers = module_of(folder / "v1" / "worker" / "gpu" / "spec_decode" / "eagle" / "eagle3_utils.py")
    modules["qwen3_dflash"].get_eagle3_aux_layers_from_config = aux_layers.get_eagle3_aux_layers_from_config
    vllm_config = VllmConfig.of(config, target_layers=TARGET_LAYERS, vocab_size=len(results["embeddings"]))
    read_layers = aux_layers.get_eagle3_aux_layers_from_config(vllm_config.speculative_config)
    assert list(read_layers) == results["feature_layers"], read_layers
    model = modules["qwen3_dspark"].Qwen3DSparkForCausalLM(vllm_config=vllm_config)
    fill_with_nan(model)
    weights = load_file(path / "model.safetensors")
    model.load_weights(weights.items())
    require_taken(model, weights, shared=[name for name in TARGETS_OWN if name not in weights])
    assert not any(layer.self_attn.causal or layer.self_attn.sliding_window for layer in model.model.layers)
    model.model.embed_tokens.weight.data = results["embeddings"]
    if "lm_head.weight" not in weights:
        model.lm_head.weight.data = results["head"]
    return model.eval()


@torch.no_grad()
def vllm_logits(path: Path, results: dict[str, Any], tokens: torch.Tensor, num_context: int) -> list[torch.Tensor]:
    """Compute the logits of each slot [1, output] as vLLM's DSparkSpeculator does.

    That is `_sample_sequential` in vllm/v1/worker/gpu/spec_decode/dspark/speculator.py, and the
    positions of `_prepare_dflash_inputs_kernel`.
    """
    model = load(path, results)
    assert getattr(model.config, "sample_from_anchor", True)
    context = model.model.fc(results["features"][0, :num_context])
    slots = torch.zeros(num_context, dtype=torch.long)
    model.model.precompute_and_store_context_kv(context, torch.arange(num_context), slots)
    anchor, block = tokens[0, num_context : num_context + 1], model.config.block_size
    ids = torch.cat([anchor, torch.full((block - 1,), model.config.mask_token_id)])
    hidden = model.model(ids, num_context + torch.arange(block))
    base, logits, previous = model.compute_draft_logits(hidden), [], anchor
    for slot in base.unbind():
        logits.append(slot[None] + model.markov_bias(model.markov_embed(previous)))
        previous = model.map_draft_to_target(logits[-1].argmax(-1))
    return logits
