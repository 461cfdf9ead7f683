"""Drafter layers of another architecture than the target's, against transformers' layers."""

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaModel
from transformers.cache_utils import DynamicCache

from outrider.models.drafters import build_drafter, load_drafter, parse_drafter, save_drafter
from outrider.models.llm.hf_target import HFTarget

FORM = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
}


def test_a_llama_layer_with_another_rotary_base_equals_transformers_layer(target):
    torch.manual_seed(0)
    drafter = build_drafter(parse_drafter({"kind": "eagle", "init": "random", "layer": FORM}), target).double().eval()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = LlamaModel(LlamaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, **{**FORM, "model_type": "llama"}))
    theirs = theirs.double().eval()
    theirs.layers[0].load_state_dict(drafter.layer.state_dict(), strict=False)
    theirs.layers[0].input_layernorm, theirs.norm = nn.Identity(), nn.Identity()
    tokens, hidden = torch.arange(12)[None], torch.randn(1, 12, 32, dtype=torch.float64)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        actual = drafter.read(tokens, hidden, torch.arange(12)[None], DynamicCache(), mask)
        pair = drafter.fc(torch.cat([drafter.embed(tokens), hidden], dim=-1))
        expected = theirs(inputs_embeds=pair).last_hidden_state
    assert expected.std() > 0.1
    assert torch.allclose(actual, expected, atol=1e-9)


@pytest.mark.parametrize("form", ["llama", "qwen3"])
def test_a_form_takes_the_rotary_base_of_the_targets_first_layer(form: str, target: HFTarget) -> None:
    """Gemma 3 has a base for each type of layer."""
    bases = {"sliding_attention": 123.0, "full_attention": 456.0}
    config = Gemma3TextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        layer_types=list(bases),
        rope_parameters={name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()},
    )
    gemma = HFTarget(Gemma3ForCausalLM(config).eval(), target.tokenizer, target.identity)
    drafter = build_drafter(parse_drafter({"kind": "eagle", "init": "random", "layer": {"model_type": form}}), gemma)
    assert torch.allclose(drafter.own_rotary.inv_freq, 123.0 ** (-torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_form_is_saved_with_the_drafter(kind, target, tmp_path):
    drafter = build_drafter(parse_drafter({"kind": kind, "init": "random", "layer": FORM, "depth": 2}), target)
    save_drafter(drafter, tmp_path, target.identity)
    again = load_drafter(tmp_path, target)
    assert again.config == drafter.config
    assert torch.equal(again.own_rotary.inv_freq, drafter.own_rotary.inv_freq)


@pytest.mark.parametrize(
    "cast",
    [
        lambda drafter: drafter.bfloat16(),
        lambda drafter: drafter.to(torch.bfloat16),
        # older versions of DeepSpeed cast like this
        lambda drafter: nn.Sequential(drafter).bfloat16(),
    ],
    ids=["bfloat16", "to", "from outside"],
)
@pytest.mark.parametrize(
    ("options", "rotary_of"),
    [
        ({"kind": "eagle", "init": "random", "layer": FORM}, lambda drafter: drafter.own_rotary),
        ({"kind": "draft_model", "num_layers": 1}, lambda drafter: drafter.model.model.rotary_emb),
    ],
    ids=["eagle", "draft_model"],
)
def test_no_cast_rounds_the_rotary_frequencies(options, rotary_of, cast, target):
    """In bf16 the cosine at position 2,000 would be off by up to 0.3."""
    drafter = build_drafter(parse_drafter(options), target)
    far = torch.zeros(1, 1, 8), torch.tensor([[2000]])
    expected = rotary_of(drafter)(*far)[0]
    cast(drafter)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert torch.equal(rotary_of(drafter)(*far)[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": {"model_type": "gpt2"}}, "drafter.layer.model_type is 'gpt2'; it must be one of llama, qwen2, qwen3"),
        ({"layer": {"model_type": "llama", "hidden_size": 8}}, "drafter.layer: there is no option hidden_size"),
        ({"layer": FORM}, r"has no mlp.gate_proj.weight of shape .* set drafter.init=random"),
        ({"layer": {"model_type": "qwen3"}}, r"has no self_attn.q_norm.weight of shape"),
        ({"init": "random", "layer": {"model_type": "llama", "num_attention_heads": 5}}, "transformers can't build a layer"),
        # Attention with such heads once ended the process by a division by zero.
        (
            {"init": "random", "layer": {"model_type": "qwen3", "num_attention_heads": 1}},
            "num_attention_heads is 1 and num_key_value_heads 2; the first must be a multiple",
        ),
        ({"init": "random", "layer": {"model_type": "qwen3", "head_dim": 1}}, "head_dim is 1; rotary embeddings need an even"),
    ],
)
def test_impossible_layer_options_are_named(target, options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(parse_drafter({"kind": "eagle", **options}), target)


def test_a_layer_with_the_targets_sizes_starts_from_the_targets_layer(target):
    layer = build_drafter(parse_drafter({"kind": "eagle3", "layer": {"model_type": "llama"}}), target).layer
    target_layer = target.model.model.layers[-1]
    assert torch.equal(layer.self_attn.k_proj.weight.double(), torch.cat([target_layer.self_attn.k_proj.weight] * 2, dim=1))
