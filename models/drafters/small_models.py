"""The model of an independent draft model: the target made smaller, or another model."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ...data.hub import use_hub
from ...data.manifest import TargetIdentity
from ..bounded_build import CANT_BE_BUILT
from ..llm.config import TargetConfig
from ..llm.gguf_files import folder_of
from ..llm.hf_target import HFTarget
from ..llm.identity import weights_digest
from ..llm.loading import load_target
from ..llm.own_tokenizer import MIN_TOKENIZER_SHARE
from ..llm.pretrained import attention_of, loading_errors
from ..llm.tree_attention import FULL, STATE_KINDS
from .decoder_layer import require_copyable_weights, whole
from .options import DraftModelConfig

NOT_ARCHITECTURE = ("_name_or_path", "architectures", "auto_map", "dtype", "quantization_config", "transformers_version")
"""Keys of a configuration that describe a model's origin and storage, not its computation."""

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Keys whose value is a list with one item per layer."""


def architecture_in(config: PretrainedConfig) -> dict[str, Any]:
    """Return the JSON values of a configuration that describe the model's computation."""
    return {key: value for key, value in config.to_diff_dict().items() if key not in NOT_ARCHITECTURE}


def build_model(architecture: dict[str, Any], target: HFTarget) -> PreTrainedModel:
    """Build a model with random weights, in float32.

    Raises ValueError for an invalid architecture.
    """
    try:
        config: Any = AutoConfig.for_model(**architecture)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_of(config, target.model.config._attn_implementation),
            trust_remote_code=False,
        )
    except CANT_BE_BUILT as error:
        raise ValueError(
            f"transformers can't build the draft model ({error!s:.500}); its configuration is {architecture!s:.500}"
        ) from error
    return model


def smaller_architecture(config: DraftModelConfig, target: HFTarget) -> dict[str, Any]:
    """Return the target's configuration with the sizes of `config`."""
    # 1. Derive the sizes in the target's ratios.
    target_config = target.model.config.get_text_config()
    if config.num_layers > target_config.num_hidden_layers:
        raise ValueError(f"drafter.num_layers is {config.num_layers}; the target has only {target_config.num_hidden_layers}")
    heads, hidden = target_config.num_attention_heads, config.hidden_size or target_config.hidden_size
    num_heads = max(1, heads * hidden // target_config.hidden_size)
    target_kv_heads = getattr(target_config, "num_key_value_heads", None) or heads
    num_kv_heads = max(1, num_heads * target_kv_heads // heads)
    if hidden % num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"a draft model of hidden size {hidden} with {num_heads} heads and {num_kv_heads} KV heads can't be built; "
            "choose a drafter.hidden_size that is a multiple of the number of heads"
        )
    # 2. Keep the sizes that the target's family has.
    sizes = {"hidden_size": hidden, "num_hidden_layers": config.num_layers, "num_attention_heads": num_heads}
    if hasattr(target_config, "num_key_value_heads"):
        sizes["num_key_value_heads"] = num_kv_heads
    if hasattr(target_config, "intermediate_size"):
        widths = target_config.intermediate_size
        width = widths[0] if isinstance(widths, list) else widths  # some families have one for each layer
        sizes["intermediate_size"] = width * hidden // target_config.hidden_size
    # 3. Put them into the target's configuration; some families have other names for these keys.
    shape = architecture_in(target_config)
    for name in PER_LAYER:
        if isinstance(shape.get(name), list):
            shape[name] = shape[name][: config.num_layers]
    # A draft model of a family with recurrent layers has full attention only.
    if FULL in (kinds := getattr(target_config, "layer_types", None) or ()) and STATE_KINDS.keys() & set(kinds):
        shape["layer_types"] = [FULL] * config.num_layers
    return shape | {target_config.attribute_map.get(name, name): size for name, size in sizes.items()}


@torch.no_grad()
def first_layers(model: PreTrainedModel, target: HFTarget) -> None:
    """Copy the target's weights into a model that is the target with fewer layers."""
    require_copyable_weights(target, target.model)
    weights, target_weights = model.state_dict(), target.model.state_dict()
    if missing := sorted(weights.keys() - target_weights.keys()):
        raise ValueError(f"the target has no {missing[0]}, so the draft model can't start with its layers; set init=random")
    for name, weight in weights.items():
        weight.copy_(whole(target_weights[name]))


def weights_digest_at(path: str) -> str:
    """Return the digest of an existing model's weights, without loading them.

    Raises ValueError if there is no model.
    """
    path = folder_of(path)
    if not Path(path).is_dir():
        use_hub()
    with loading_errors(f"drafter.path is {path}, and this model", path):
        return weights_digest(path, getattr(AutoConfig.from_pretrained(path), "_commit_hash", None))


def pretrained(path: str, target: HFTarget) -> HFTarget:
    """Load an existing model in float32.

    Raises ValueError if it can't be loaded, isn't in safetensors format, or has another tokenizer.
    """
    config = TargetConfig(
        name_or_path=path,
        dtype="float32",
        attn_implementation=target.model.config._attn_implementation,
        device=str(target.device),
        tokenizer_options=target.tokenizer_options,
        compiled=target.compiled,
        cuda_graphs=target.cuda_graphs,
    )
    try:
        loaded = load_target(config, safetensors_only=True)
    except ValueError as error:
        raise ValueError(f"drafter.path is {path}: {error}") from error
    require_same_tokenizer(loaded.identity.name, loaded.identity.tokenizer_sha256, target.identity)
    loaded.model.train().requires_grad_(True)
    return loaded


def require_common_vocabulary(vocab_size: int, target: HFTarget) -> None:
    """Raise ValueError if the draft model's number of tokens differs from the target's by more than padding."""
    smaller, larger = sorted((vocab_size, target.vocab_size))
    if smaller < MIN_TOKENIZER_SHARE * larger:
        raise ValueError(
            f"the draft model has a vocabulary of {vocab_size} tokens and {target.identity.name} one of {target.vocab_size}, "
            "which differ by more than padding; use a smaller model of the same family"
        )


@torch.no_grad()
def fit_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Give a draft model the target's number of tokens, which may be padded to another one.

    Rows beyond the target's vocabulary are cut off. A token that only the target has gets the mean of
    the other rows: the model reads it as an average token, and its logit is the mean of the others,
    which is never above the largest.
    """
    config: Any = model.config.get_text_config()
    own = config.vocab_size
    if own == vocab_size:
        return
    with torch.random.fork_rng():  # new rows are random at first
        embeddings: Any = model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for module in (embeddings, model.get_output_embeddings()):
        for rows in module.parameters():
            rows[own:] = rows[:own].mean(dim=0)
    if (getattr(config, "pad_token_id", None) or 0) >= vocab_size:
        config.pad_token_id = embeddings.padding_idx = None


def require_same_tokenizer(name: str, digest: str, target: TargetIdentity) -> None:
    """Raise ValueError if the draft model's tokenizer `digest` differs from the target's."""
    if digest != target.tokenizer_sha256:
        raise ValueError(
            f"the draft model {name} has another tokenizer than {target.name}, so its token ids stand for other "
            "texts; use a smaller model of the same family"
        )
