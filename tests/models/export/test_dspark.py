"""The formats of DSpark, against a table, a slow version of the formula, and others' configurations."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from torch.nn.functional import embedding, linear, silu

from outrider.models.decoding import Prompts
from outrider.models.drafters import build_drafter, parse_drafter
from outrider.models.export import dspark
from outrider.models.export.formats import write_folder
from outrider.models.export.registry import format_of, import_drafter, refusals_after_training

H, V, DRAFT, MLP, HEADS, KV_HEADS, HEAD_DIM, RANK, BLOCK, MASK, EPS = 32, 300, 40, 48, 4, 2, 8, 6, 3, 299, 1e-6
FORMATS = (dspark.DEEPSPEC, dspark.SPECULATORS)
OPTIONS: dict[str, Any] = {
    "correction": "markov",
    "rank": RANK,
    "inject": False,
    "mask_token_id": MASK,
    "block": BLOCK,
    "num_layers": 2,
    "feature_layers": [0, 3, 5],
    "layer": {"model_type": "qwen3"},
}
TEXT = [7, 70, 71, 72, 2, 99]

# Parameters of DeepSpec's Qwen3DSparkModel (deepspec/modeling/dspark/qwen3/modeling.py) without its
# frozen copies of the target's embeddings and head. Those of speculators' DSparkDraftModel 0.9.0 are
# the same. In vLLM 0.33.0 (qwen3_dspark.py) and SGLang 0.5.23 (dspark.py), the copies are optional.
LAYER = {
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, H),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, H),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, H),
    "self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
    "self_attn.q_norm.weight": (HEAD_DIM,),
    "self_attn.k_norm.weight": (HEAD_DIM,),
    "mlp.gate_proj.weight": (MLP, H),
    "mlp.up_proj.weight": (MLP, H),
    "mlp.down_proj.weight": (H, MLP),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
}
TENSORS = {
    "fc.weight": (H, 3 * H),
    "hidden_norm.weight": (H,),
    "norm.weight": (H,),
    "markov_head.markov_w1.weight": (V, RANK),
    "markov_head.markov_w2.weight": (V, RANK),
    **{f"layers.{index}.{name}": shape for index in range(2) for name, shape in LAYER.items()},
}
LAYERS_CONFIG = {
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": MLP,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPS,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": V,
}
HEAD_CONFIG = {
    "block_size": BLOCK,
    "enable_confidence_head": False,
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": MASK,
    "sample_from_anchor": True,
}
# Keys that build_draft_config of DeepSpec writes (qwen3/config.py), and that its model asserts.
DEEPSPEC = {
    **LAYERS_CONFIG,
    **HEAD_CONFIG,
    "architectures": ["Qwen3DSparkModel"],
    "num_anchors": 512,
    "num_target_layers": 7,
    "target_layer_ids": [-1, 2, 4],
    "torch_dtype": "float32",
}
# Keys of DSparkSpeculatorConfig 0.9.0.
SPECULATORS = {
    **HEAD_CONFIG,
    "architectures": ["DSparkSpeculator"],
    "aux_hidden_state_layer_ids": [0, 3, 5],
    "confidence_head_with_markov": False,
    "draft_vocab_size": V,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": BLOCK, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/tiny"},
    },
    "speculators_model_type": "dspark",
    "speculators_version": "0.9.0",
    "torch_dtype": "float32",
    "transformer_layer_config": LAYERS_CONFIG,
}


@pytest.fixture(scope="module")
def qwen3(make_target: Any) -> Any:
    return make_target("qwen3")


def export(path: Path, target: Any, make_drafter: Any, format: Any = dspark.DEEPSPEC, **options: Any) -> Any:
    """Export a drafter with random weights; return it."""
    drafter = make_drafter("block", target, **{"init": "random", **OPTIONS, **options})
    write_folder(format, drafter, path, target)
    return drafter


def as_published(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Remove `outrider.json`, change keys (None removes a key), and add or replace tensors."""
    (path / "outrider.json").unlink(missing_ok=True)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    weights = safetensors.torch.load_file(path / "model.safetensors") | (tensors or {})
    safetensors.torch.save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("format", "config"), [(dspark.DEEPSPEC, DEEPSPEC), (dspark.SPECULATORS, SPECULATORS)])
def test_names_shapes_and_keys_are_those_that_others_read(format, config, qwen3, make_drafter, tmp_path):
    export(tmp_path / "a", qwen3, make_drafter, format)
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == config
    tensors = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TENSORS


def test_a_reduced_vocabulary_has_its_head_and_its_maps(qwen3, make_drafter, tmp_path):
    drafter = export(tmp_path / "a", qwen3, make_drafter, dspark.SPECULATORS, draft_vocab_size=DRAFT)
    tensors = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    reduced = {"lm_head.weight": (DRAFT, H), "markov_head.markov_w2.weight": (DRAFT, RANK), "d2t": (DRAFT,), "t2d": (V,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TENSORS | reduced
    tokens = (torch.arange(DRAFT) + tensors["d2t"]).tolist()
    assert tokens == drafter.draft_tokens.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


# --- the formula


def rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * values / (values.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotated(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [token, head, HEAD_DIM] by its positions, in halves."""
    angles = positions[:, None, None] / 50000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    left, right = values.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def slow_chain(path: Path, target: Any, text: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Compute DSpark's corrected logits [slot, output] and greedy drafts after a text, from the files.

    The text's last token is the anchor, which the target hasn't read.
    """
    config, tensors = json.loads((path / "config.json").read_text()), safetensors.torch.load_file(path / "model.safetensors")
    # 1. The context: the outputs of the target's layers, -1 for its embeddings, at all tokens before the anchor.
    states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    layer_ids = config.get("target_layer_ids") or [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
    features = torch.cat([states[layer + 1][0] for layer in layer_ids], dim=-1)
    context = rms_norm(linear(features, tensors["fc.weight"]), tensors["hidden_norm.weight"])
    # 2. The slots: the anchor and mask tokens, which see the context and each other.
    table = target.model.get_input_embeddings().weight
    hidden = embedding(torch.tensor([text[-1], *[config["mask_token_id"]] * (config["block_size"] - 1)]), table)
    positions = torch.arange(len(context) + len(hidden))
    for index in range(2):
        weights = {name.removeprefix(f"layers.{index}."): tensor for name, tensor in tensors.items()}
        slots = rms_norm(hidden, weights["input_layernorm.weight"])
        both = torch.cat([context, slots])
        query = linear(slots, weights["self_attn.q_proj.weight"]).unflatten(-1, (HEADS, HEAD_DIM))
        key = linear(both, weights["self_attn.k_proj.weight"]).unflatten(-1, (KV_HEADS, HEAD_DIM))
        value = linear(both, weights["self_attn.v_proj.weight"]).unflatten(-1, (KV_HEADS, HEAD_DIM))
        query = rotated(rms_norm(query, weights["self_attn.q_norm.weight"]), positions[len(context) :])
        key = rotated(rms_norm(key, weights["self_attn.k_norm.weight"]), positions)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
        shares = (torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", shares, value).flatten(1)
        hidden = hidden + linear(seen, weights["self_attn.o_proj.weight"])
        normed = rms_norm(hidden, weights["post_attention_layernorm.weight"])
        gated = silu(linear(normed, weights["mlp.gate_proj.weight"])) * linear(normed, weights["mlp.up_proj.weight"])
        hidden = hidden + linear(gated, weights["mlp.down_proj.weight"])
    # 3. The head, and the Markov head from token to token.
    head = tensors.get("lm_head.weight", target.model.get_output_embeddings().weight)
    logits, drafts, token = [], [], text[-1]
    for slot in rms_norm(hidden, tensors["norm.weight"]):
        bias = linear(tensors["markov_head.markov_w1.weight"][token], tensors["markov_head.markov_w2.weight"])
        logits.append(linear(slot, head) + bias)
        token = int(logits[-1].argmax())
        token += int(tensors["d2t"][token]) if "d2t" in tensors else 0
        drafts.append(token)
    return torch.stack(logits), drafts


@torch.no_grad()
@pytest.mark.parametrize(
    ("format", "options"),
    [(dspark.DEEPSPEC, {}), (dspark.SPECULATORS, {}), (dspark.SPECULATORS, {"draft_vocab_size": DRAFT})],
)
def test_a_drafter_drafts_by_the_published_formula(format, options, qwen3, make_drafter, tmp_path):
    export(tmp_path / "a", qwen3, make_drafter, format, **options)
    drafter = import_drafter(as_published(tmp_path / "a"), qwen3, options={"width": 1, "candidates": V})
    assert drafter.config.layer is None, "it is the target's own kind"
    expected, drafts = slow_chain(tmp_path / "a", qwen3, TEXT)
    # 1. The logits, with the same tokens before the slots.
    prompts = Prompts.of([torch.tensor(TEXT[:-1])])
    prefill = qwen3.prefill(prompts, max_new_tokens=4, max_nodes=drafter.max_nodes, feature_layers=drafter.feature_layers)
    state = drafter.init_state(prompts, prefill, max_new_tokens=4)
    slots = []
    search = drafter.search_slots
    drafter.search_slots = lambda hidden, *others: slots.append(hidden[0]) or search(hidden, *others)
    tree, _ = drafter.propose(state, torch.tensor(TEXT[-1:]))
    states = drafter.correction.states(torch.tensor([TEXT[-1], *drafts[:-1]]), drafter.embed)
    torch.testing.assert_close(drafter.logits(slots[0], states), expected, rtol=1e-4, atol=1e-4)
    # 2. The chain itself.
    assert tree.tokens[0].tolist() == drafts
    assert len(set(drafts)) > 1


# --- export


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "rnn"}, r"its correction is rnn, but DSpark's is markov \(train with drafter.correction=markov\)"),
        ({"inject": True}, r"its slots start with the latest context.*\(train with drafter.inject=false\)"),
        ({"num_slots": 1}, r"it has 1 slots for .* draft tokens.*\(train with drafter.num_slots=null\)"),
        ({"mask_token_id": None}, r"a learned vector.*train with drafter.mask_token_id=ID"),
        ({"layer": {"model_type": "llama"}}, r"its layer is llama's.*train with 'drafter.layer={model_type: qwen3}'"),
        ({"feature_layers": [3, 0]}, r"in the order \[3, 0\].*drafter.feature_layers=\[0, 3\]"),
        ({"draft_vocab_size": DRAFT}, r"drafter.draft_vocab_size=null, or export it as speculators-dspark"),
        ({"format": dspark.SPECULATORS, "draft_vocab_size": V}, r"a head of its own for the whole vocabulary.*or null"),
    ],
)
def test_a_drafter_unlike_dsparks_is_an_error_with_the_remedy(options, message, qwen3, make_drafter, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "a", qwen3, make_drafter, **options)
    assert not (tmp_path / "a").exists()


def test_the_recipe_of_dspark_can_be_exported(qwen3):
    recipes = Path(__file__).parents[3] / "conf" / "drafter"
    options: Any = {}
    for name in ("block", "block_dspark"):
        options |= OmegaConf.to_container(OmegaConf.load(recipes / f"{name}.yaml"))
    del options["defaults"]
    assert options["mask_token_id"] >= V, "it is a token of the real vocabulary"
    fresh = build_drafter(parse_drafter({**options, "mask_token_id": MASK}), qwen3)
    refusals = refusals_after_training(fresh, qwen3)
    assert refusals == {"dspark": None, "speculators-dspark": None}


# --- import


def test_a_published_drafter_loads_without_its_confidence_head(qwen3, make_drafter, tmp_path, caplog):
    """The layout of deepseek-ai/dspark_qwen3_8b_block7: with copies of the target's ends, and this head."""
    drafter = export(tmp_path / "a", qwen3, make_drafter)
    weight, bias = torch.ones(1, H + RANK), torch.ones(1)
    as_published(
        tmp_path / "a",
        {
            "embed_tokens.weight": qwen3.embed_tokens.weight.clone(),
            "lm_head.weight": qwen3.head.weight.clone(),
            "confidence_head.proj.weight": weight,
            "confidence_head.proj.bias": bias,
        },
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        sample_from_anchor=None,
        max_window_layers=36,
        pad_token_id=None,
        rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
        rope_theta=None,
        sliding_window=None,
        transformers_version="5.10.2",
        use_cache=True,
    )
    assert format_of(tmp_path / "a").name == "dspark"
    with caplog.at_level(logging.WARNING):
        again = import_drafter(tmp_path / "a", qwen3, options={"tree_nodes": 5})
    assert [record.message.partition(" has ")[2][:17] for record in caplog.records] == ["a confidence head"]
    assert again.config.tree_nodes == 5
    ours = drafter.state_dict()
    assert again.state_dict().keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in again.state_dict().items())
    write_folder(dspark.SPECULATORS, again, tmp_path / "b", qwen3)
    assert not [name for name in safetensors.torch.load_file(tmp_path / "b" / "model.safetensors") if "confidence" in name]


def test_the_section_of_specforge_is_read_like_keys_at_the_top(qwen3, make_drafter, tmp_path):
    drafter = export(tmp_path / "a", qwen3, make_drafter)
    moved = {"mask_token_id": MASK, "target_layer_ids": [-1, 2, 4], "markov_rank": RANK, "markov_head_type": "vanilla"}
    as_published(tmp_path / "a", **dict.fromkeys(moved), dflash_config=moved, architectures=["DSparkDraftModel"])
    again = import_drafter(tmp_path / "a", qwen3)
    assert again.feature_layers == drafter.feature_layers == (0, 3, 5)
    as_published(tmp_path / "a", mask_token_id=MASK - 1)
    with pytest.raises(ValueError, match="has two values of mask_token_id, one in dflash_config"):
        import_drafter(tmp_path / "a", qwen3)
    as_published(tmp_path / "a", mask_token_id=None, dflash_config={**moved, "causal": True})
    with pytest.raises(ValueError, match="causal: there is no such key"):
        import_drafter(tmp_path / "a", qwen3)


def test_outputs_in_another_order_than_the_targets_tokens_are_sorted(qwen3, make_drafter, tmp_path):
    drafter = export(tmp_path / "a", qwen3, make_drafter, dspark.SPECULATORS, draft_vocab_size=DRAFT)
    tensors = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    flipped = {name: tensors[name].flip(0).contiguous() for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    tokens = drafter.draft_tokens.flip(0)
    as_published(tmp_path / "a", flipped | {"d2t": tokens - torch.arange(DRAFT)})
    again = import_drafter(tmp_path / "a", qwen3).state_dict()
    assert again.keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in again.items())


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size=0: must be above 0"),
    ({"block_size": 10**9}, r"config\.json describes no drafter of the kind block: .*block 1000000000"),
    ({"markov_rank": 10**15}, "markov_rank=1000000000000000: must be below"),
    ({"markov_rank": RANK + 1}, r"markov_w1.weight is \(300, 6\), not \(300, 7\)"),
    ({"mask_token_id": V}, "mask_token_id is 300; the target has 300 tokens"),
    ({"markov_head_type": "gated"}, "markov_head_type=.gated.: must be vanilla"),
    ({"sample_from_anchor": False}, "sample_from_anchor=false: must be True"),
    ({"enable_confidence_head": "yes"}, "enable_confidence_head=.yes.: must be true or false"),
    ({"draft_vocab_size": 0}, "draft_vocab_size=0: must be above 0"),
    ({"draft_vocab_size": DRAFT}, "missing d2t; missing lm_head.weight|missing lm_head.weight"),
]


@pytest.mark.parametrize("format", FORMATS)
def test_an_unsupported_configuration_is_an_error_before_weights_are_read(format, qwen3, make_drafter, tmp_path, monkeypatch):
    export(tmp_path / "a", qwen3, make_drafter, format)
    layer_key = "target_layer_ids" if format is dspark.DEEPSPEC else "aux_hidden_state_layer_ids"
    more = [
        ({layer_key: []}, rf"{layer_key}=\[\]: must not be empty"),
        ({layer_key: [3, 1, 2]}, rf"{layer_key}=\[3, 1, 2\]: must be ascending numbers"),
        ({layer_key: [-2, 1, 2]}, rf"{layer_key}\[0\]=-2: must be at least"),
        ({layer_key: [1, 2, 7]}, "the target has the layers 0 to 6"),
    ]
    as_published(tmp_path / "a")
    original = (tmp_path / "a" / "config.json").read_text()
    monkeypatch.setattr("outrider.models.export.folders.Folder.load", lambda self: pytest.fail("weights were read"))
    for change, message in HOSTILE + more:
        config = json.loads(original) | change
        (tmp_path / "a" / "config.json").write_text(json.dumps({key: config[key] for key in config if config[key] is not None}))
        with pytest.raises(ValueError, match=message):
            import_drafter(tmp_path / "a", qwen3, name=format.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be above 0"),
        ({"num_hidden_layers": 10**9}, "layer_types .* of 1000000000 layers"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "has num_hidden_layers 1000000000"),
        ({"num_hidden_layers": 3}, "layer_types .* of 3 layers"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must be a multiple of the second"),
    ],
)
def test_layers_that_drafters_here_do_not_have_are_an_error(change, message, qwen3, make_drafter, tmp_path):
    export(tmp_path / "a", qwen3, make_drafter)
    as_published(tmp_path / "a", **change)
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path / "a", qwen3, name="dspark")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": None}, "sample_from_anchor: is missing"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type=.dflash.: must be dspark"),
        ({"transformer_layer_config": None}, "transformer_layer_config: is missing"),
        ({"speculators_config": {"algorithm": "dflash"}}, "speculators_config.algorithm 'dflash'"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, the target's 32"),
    ],
)
def test_other_algorithms_of_speculators_are_named(change, message, qwen3, make_drafter, tmp_path):
    export(tmp_path / "a", qwen3, make_drafter, dspark.SPECULATORS)
    as_published(tmp_path / "a", **change)
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path / "a", qwen3, name="speculators-dspark")


def test_a_drafter_of_another_target_is_an_error(qwen3, make_drafter, tmp_path):
    export(tmp_path / "a", qwen3, make_drafter)
    as_published(tmp_path / "a", num_target_layers=36)
    with pytest.raises(ValueError, match=r"num_target_layers 36 \(the target's is 7\)"):
        import_drafter(tmp_path / "a", qwen3)
    as_published(tmp_path / "a", {"lm_head.weight": qwen3.head.weight.flip(0).contiguous()}, num_target_layers=7)
    with pytest.raises(ValueError, match="has lm_head.weight that differs from the target's"):
        import_drafter(tmp_path / "a", qwen3)


def test_a_confidence_head_of_another_width_is_an_error(qwen3, make_drafter, tmp_path):
    export(tmp_path / "a", qwen3, make_drafter)
    as_published(tmp_path / "a", {"confidence_head.proj.weight": torch.ones(1, H + RANK)})
    with pytest.raises(ValueError, match=rf"confidence_head.proj.weight is \(1, {H + RANK}\), not \(1, {H}\)"):
        import_drafter(tmp_path / "a", qwen3)
