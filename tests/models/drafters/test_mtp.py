"""MTP heads: read from checkpoints, computed as transformers does, and refused where they can't be read."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.drafters.mtp import Mtp
from outrider.models.drafters.mtp_weights import block_size, dequantised, quantised
from outrider.models.llm.hf_target import HFTarget

from ...conformance.families import PROMPTS, decode, make_family
from ...tiny_models import IDENTITY
from ..mtp_checkpoints import NAMES, load, write_checkpoint

TEXT = torch.tensor([PROMPTS[0] + PROMPTS[2]])
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
        ({"mtp.norm.weight": torch.full((32,), torch.nan)}, "final_norm.weight holds numbers that aren't finite"),
        ({"mtp.fc.weight": torch.ones(32, 64, dtype=torch.int8)}, "mtp.fc.weight is quantised to torch.int8"),
        ({"mtp.fc.qweight": torch.ones(32, 64, dtype=torch.int32)}, "unknown mtp.fc.qweight"),
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
    change(tmp_path, {"mtp.layers.1.mlp.up_proj.weight": torch.ones(2, 2), "mtp.embed_tokens.weight": torch.ones(2, 2)})
    drafter = build_drafter(parse_drafter(SMALL), load(tmp_path))
    torch.testing.assert_close(drafter.fc.weight.double(), head.fc.weight)


def test_a_target_that_no_file_holds_and_layers_of_another_structure_are_refused():
    with pytest.raises(ValueError, match=r"not loaded from files.*drafter.init=random"):
        build_drafter(parse_drafter(SMALL), HFTarget(make_family("smollm3"), None, IDENTITY))
    for family in ("gemma4_text", "deepseek_v32"):
        with pytest.raises(ValueError, match="no layer that is attention to the whole text and an MLP"):
            build_drafter(parse_drafter({**SMALL, "init": "random"}), HFTarget(make_family(family), None, IDENTITY))


# --- 8-bit floats


@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1), (3, 5)])
def test_8_bit_floats_are_multiplied_by_their_scales_and_written_back_in_their_blocks(shape):
    torch.manual_seed(0)
    values = torch.randn(40, 72) * torch.linspace(0.1, 10, 40)[:, None]
    scale = torch.ones(shape, dtype=torch.float32)
    narrow, scale = quantised(values, scale, torch.float8_e4m3fn)
    assert narrow.dtype is torch.float8_e4m3fn
    assert scale.shape == shape
    restored = dequantised(narrow, scale)
    assert (restored - values).norm() < 0.04 * values.norm()
    again, _ = quantised(restored, scale, torch.float8_e4m3fn)
    torch.testing.assert_close(dequantised(again, scale), restored, rtol=0.08, atol=0.05)


def test_blocks_are_those_of_the_files():
    assert [block_size(5, 576), block_size(56, 7168), block_size(1, 100), block_size(40, 40), block_size(5, 600)] == [
        128,
        128,
        128,
        1,
        128,
    ]


def test_a_head_in_8_bit_floats_is_read(tmp_path):
    head = write_checkpoint(tmp_path, "deepseek_v3")
    name = "model.layers.4.self_attn.o_proj.weight"
    narrow, scale = quantised(head.layer.self_attn.o_proj.weight.detach(), torch.ones(2, 2), torch.float8_e4m3fn)
    change(tmp_path, {name: narrow, f"{name}_scale_inv": scale})
    drafter = build_drafter(parse_drafter(SMALL), load(tmp_path))
    torch.testing.assert_close(drafter.layer.self_attn.o_proj.weight, dequantised(narrow, scale))
