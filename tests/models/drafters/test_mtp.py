"""MTP heads: read from checkpoints, computed as transformers does, and refused where they can't be read."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.mtp import Mtp
from outrider.models.drafters.mtp_weights import dequantised, quantised
from outrider.models.llm.hf_target import HFTarget

from ...conformance.families import PROMPTS, decode, make_family
from ...tiny_models import IDENTITY
from ..mtp_checkpoints import NAMES, load, write_checkpoint

TEXT = torch.tensor([PROMPTS[0] + PROMPTS[2]])
SHARD = "model-{:05d}-of-00002.safetensors"
SMALL = {"kind": "mtp", "depth": 3, "top_k": 3, "tree_nodes": 8}


def outputs_of(drafter: Mtp, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    num = tokens.shape[1]
    mask = torch.ones(num, num, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        return drafter.read(tokens, drafter.fuse(hidden), torch.arange(num)[None], DynamicCache(), mask)


@pytest.fixture(scope="module", params=[*NAMES])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, write_checkpoint(folder, request.param)


@pytest.mark.quick_cases(5)
def test_a_head_of_a_checkpoint_computes_what_its_modules_do_and_changes_no_token(checkpoint):
    _, folder, head = checkpoint
    target = load(folder)
    drafter = build_drafter(parse_drafter(SMALL), target).double().eval()
    hidden, _ = target.hidden_states(TEXT)
    with torch.no_grad():
        expected = head(TEXT[:, 1:], hidden[:, :-1])
    torch.testing.assert_close(outputs_of(drafter, TEXT[:, 1:], hidden[:, :-1]), expected, rtol=1e-6, atol=1e-6)
    plain = [decode(target, NullDrafter(), [prompt], 12)[0][0] for prompt in PROMPTS]
    assert decode(target, drafter, PROMPTS, 12)[0] == plain


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_head_equals_transformers_own_where_it_has_one(family, tmp_path):
    write_checkpoint(tmp_path, family)
    target = load(tmp_path)
    target.model.config.num_mtp_layers = 1
    target.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4.*"]  # transformers knows real sizes only
    theirs = MtpModel.from_pretrained(target.model)
    drafter = build_drafter(parse_drafter(SMALL), target).double().eval()
    hidden, _ = target.hidden_states(TEXT)
    positions = torch.arange(1, TEXT.shape[1])[None]
    with torch.no_grad():
        cache = MtpCache(config=target.model.config.get_mtp_config())
        expected = theirs.double().forward_layer(0, hidden[:, :-1], positions, cache, input_ids=TEXT[:, 1:])
    # Their positions begin at 1, and rotary embeddings in float32 round.
    torch.testing.assert_close(outputs_of(drafter, TEXT[:, 1:], hidden[:, :-1]), expected, rtol=1e-4, atol=1e-5)


# --- heads that can't be read


def change(folder, tensors):
    """Replace tensors of a checkpoint, or remove those that are None."""
    weights = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")


def refusal(folder) -> str:
    with pytest.raises(ValueError) as caught:  # the tests check the message
        build_drafter(parse_drafter(SMALL), load(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mtp.fc.weight": None}, "has no MTP head: no tensors as in the checkpoints of Qwen3-Next"),
        ({"mtp.norm.weight": None}, "missing mtp.norm.weight"),
        ({"mtp.gate.weight": torch.ones(2)}, "unknown mtp.gate.weight"),
        ({"mtp.norm.weight": torch.ones(3)}, r"mtp.norm.weight is (3,), not (32,)"),
        ({"mtp.norm.weight": torch.full((32,), torch.nan)}, "final_norm.weight has numbers that aren't finite"),
        ({"mtp.fc.weight": torch.ones(32, 64, dtype=torch.int8)}, "is quantised (mtp.fc.weight, of torch.int8)"),
        ({"mtp.fc.qweight": torch.ones(32, 64, dtype=torch.int32)}, "is quantised (mtp.fc.qweight, of torch.int32)"),
    ],
)
def test_a_head_that_cant_be_read_is_one_error_that_names_a_tensor_and_a_remedy(tensors, message, tmp_path):
    write_checkpoint(tmp_path, "qwen3_5_text")
    change(tmp_path, tensors)
    error = refusal(tmp_path)
    assert message in error
    assert "drafter.init=random" in error or "download it again" in error


def test_further_layers_and_copies_of_the_targets_tensors_are_left_out(tmp_path):
    head = write_checkpoint(tmp_path, "qwen3_5_text")
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    change(tmp_path, {"mtp.layers.1.mlp.up_proj.weight": torch.ones(2, 2), "mtp.embed_tokens.weight": embeddings})
    drafter = build_drafter(parse_drafter(SMALL), load(tmp_path))
    torch.testing.assert_close(drafter.fc.weight.double(), head.fc.weight)


def test_a_target_that_no_file_holds_and_layers_of_another_structure_are_refused():
    with pytest.raises(ValueError, match=r"not loaded from files.*drafter.init=random"):
        build_drafter(parse_drafter(SMALL), HFTarget(make_family("smollm3"), None, IDENTITY))
    for family in ("gemma4_text", "deepseek_v32", "gpt_oss", "kimi_linear"):
        with pytest.raises(ValueError, match="no layer that is plain attention to the whole text"):
            build_drafter(parse_drafter({**SMALL, "init": "random"}), HFTarget(make_family(family), None, IDENTITY))


# --- 8-bit floats


@pytest.mark.parametrize(
    ("shape", "blocks"), [((), None), ((1,), None), ((40,), None), ((40, 1), (1, 128)), ((3, 5), (16, 16)), ((4, 8), (10, 10))]
)
def test_8_bit_floats_are_multiplied_by_their_scales_and_written_back_in_their_blocks(shape, blocks):
    torch.manual_seed(0)
    values = torch.randn(40, 72) * torch.linspace(0.1, 10, 40)[:, None]
    narrow, scale = quantised(values, torch.ones(shape), torch.float8_e4m3fn, blocks)
    assert narrow.dtype is torch.float8_e4m3fn
    assert scale.shape == shape
    assert len(scale.unique()) == scale.numel()
    restored = dequantised(narrow, scale, blocks)
    assert (restored - values).norm() < 0.04 * values.norm()
    again, same = quantised(restored, scale, torch.float8_e4m3fn, blocks)
    torch.testing.assert_close(same, scale)
    torch.testing.assert_close(dequantised(again, same, blocks), restored)


NAME = "model.layers.4.self_attn.o_proj.weight"


def narrowed(folder, head, scale, blocks, **tensors):
    """Store a matrix of the head in 8-bit floats, with scales like these."""
    narrow, scale = quantised(head.layer.self_attn.o_proj.weight.detach(), scale, torch.float8_e4m3fn, blocks)
    change(folder, {NAME: narrow, f"{NAME}_scale_inv": scale, **tensors})
    return narrow, scale


@pytest.mark.parametrize(("shape", "blocks"), [((2, 2), (16, 16)), ((4, 4), (10, 10)), ((32, 1), None)])
def test_a_head_in_8_bit_floats_is_read_in_the_blocks_of_its_configuration(shape, blocks, tmp_path):
    head = write_checkpoint(tmp_path, "deepseek_v3")
    narrowed(tmp_path, head, torch.ones(shape), blocks)
    target = load(tmp_path)
    if blocks is not None:
        target.model.config.quantization_config = {"weight_block_size": list(blocks)}
    weight = build_drafter(parse_drafter(SMALL), target).layer.self_attn.o_proj.weight
    expected = head.layer.self_attn.o_proj.weight.float()
    assert (weight - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("shape", [(2, 2), (3,), (0, 0), (2, 2, 2), (40, 40)])
def test_scales_that_belong_to_nothing_are_refused(shape, tmp_path):
    head = write_checkpoint(tmp_path, "deepseek_v3")
    narrowed(tmp_path, head, torch.ones(()), None, **{f"{NAME}_scale_inv": torch.ones(shape)})
    assert "neither one scale, nor one for each row or each block (None" in refusal(tmp_path)


def test_8_bit_floats_without_scales_and_scales_of_wider_floats_are_refused(tmp_path):
    head = write_checkpoint(tmp_path, "deepseek_v3")
    narrowed(tmp_path, head, torch.ones(()), None, **{f"{NAME}_scale_inv": None})
    assert f"{NAME} has no scales" in refusal(tmp_path)
    change(tmp_path, {NAME: torch.ones(32, 32), f"{NAME}_scale_inv": torch.ones(())})
    assert f"{NAME} has scales, and is of torch.float32" in refusal(tmp_path)


# --- checkpoints in other forms


def test_embeddings_and_an_output_layer_must_be_the_targets(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v3")
    weights = load_file(tmp_path / "model.safetensors")
    own = {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    change(tmp_path, {name: weights[source].clone() for name, source in own.items()})
    build_drafter(parse_drafter(SMALL), load(tmp_path))
    change(tmp_path, {"model.layers.4.shared_head.head.weight": weights["lm_head.weight"] + 1})
    assert "model.layers.4.shared_head.head.weight differs from the target's own" in refusal(tmp_path)


@pytest.mark.parametrize("form", ["a file that nothing names", "shards without an index"])
def test_a_head_is_found_where_transformers_does_not_look(form, tmp_path):
    head = write_checkpoint(tmp_path, "qwen3_5_text")
    weights = load_file(tmp_path / "model.safetensors")
    own = {name: tensor for name, tensor in weights.items() if name.startswith("mtp.")}
    rest = {name: tensor for name, tensor in weights.items() if name not in own}
    first, second = ("model.safetensors", "mtp.safetensors") if "nothing" in form else (SHARD.format(1), SHARD.format(2))
    (tmp_path / "model.safetensors").unlink()
    save_file(rest, tmp_path / first, {"format": "pt"})
    save_file(own, tmp_path / second, {"format": "pt"})
    drafter = build_drafter(parse_drafter(SMALL), load(tmp_path))
    torch.testing.assert_close(drafter.fc.weight.double(), head.fc.weight)
