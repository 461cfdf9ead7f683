"""Code paths for GPUs, run on a CPU: folded heads, layouts of kernels, rounded key lengths."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, Prompts, empty_tree, generate
from outrider.models.drafters import NullDrafter, build_drafter, cached_drafter, parse_drafter
from outrider.models.drafters.draft_model import DraftModel
from outrider.models.drafters.graphed import GraphedDrafter
from outrider.models.drafters.options import DraftModelConfig
from outrider.models.drafters.redrafter import NUM_SIZES
from outrider.models.llm import tree_attention, tree_reader
from outrider.models.llm.hf_target import HFTarget

from ...decoded import texts_of
from ..recorder import PoolRecorder

PROMPTS = [[1, 70, 71, 72, 2], [9, 8], [40, 41, 42, 43, 44, 45, 46, 47]]
TREES = {
    "redrafter": {"beam_width": 3, "beam_length": 3},
    "medusa": {"tree_nodes": 6},
    "eagle": {"depth": 3, "top_k": 2, "tree_nodes": 6},
    "eagle3": {"depth": 3, "top_k": 2, "tree_nodes": 6},
    "draft_model": {"num_layers": 1, "length": 3, "top_k": 2},
}
STEP = 8


@pytest.fixture
def llama(target) -> HFTarget:
    """Make a target of four layers, for EAGLE-3, with grouped heads and in float32.

    Such a target uses CUDA's simplest attention kernel.
    """
    torch.manual_seed(0)
    options = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=64, tie_word_embeddings=False, **options)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return HFTarget(LlamaForCausalLM(config).eval().requires_grad_(False), target.tokenizer, target.identity)


@pytest.fixture
def like_a_gpu(monkeypatch) -> list[int]:
    """Use a GPU's code paths, with a kernel whose output has CUDA's memory layout.

    The returned list grows with each call of the kernel.
    """
    calls: list[int] = []

    def efficient(query, *args, **kwargs):
        calls.append(query.shape[2])
        output = scaled_dot_product_attention(query, *args, **kwargs)
        return output.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(tree_attention, "has_grouped_kernel", lambda device: False)
    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", efficient)
    for module in (tree_reader, cached_drafter):
        monkeypatch.setattr(module, "extent_step", lambda device, *, is_fixed: STEP)
    return calls


def answers(target, drafter, rows=PROMPTS, max_new_tokens=20) -> list[list[int]]:
    prompts = [torch.tensor(row) for row in rows]
    tokens = texts_of(generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=max_new_tokens), len(rows))
    target.release_cache()
    return tokens


@pytest.mark.parametrize("kind", TREES)
def test_every_drafter_decodes_the_same_on_a_gpus_paths(llama, request, kind):
    torch.manual_seed(1)
    drafter = build_drafter(parse_drafter({"kind": kind, **TREES[kind]}), llama).eval().requires_grad_(False)
    expected = answers(llama, NullDrafter())
    calls = request.getfixturevalue("like_a_gpu")
    assert answers(llama, drafter) == expected
    assert len(calls) > 20, "the folded path was taken"


def test_plain_decoding_of_even_rows_needs_no_mask_on_a_gpu(llama, like_a_gpu):
    """Kernels without a mask are faster there, and the baseline must be as fast as possible."""
    answers(llama, NullDrafter(), PROMPTS[:1])  # the first prefill probes the model with a tree
    like_a_gpu.clear()
    answers(llama, NullDrafter(), PROMPTS[:1])
    assert not like_a_gpu, "masked attention would have come here"
    answers(llama, NullDrafter(), PROMPTS[:2])
    assert like_a_gpu


def test_passes_without_a_mask_let_flash_attention_read_each_key_once(llama, monkeypatch):
    """With a mask, or with keys repeated for heads, PyTorch can't choose that kernel."""
    answers(llama, NullDrafter(), PROMPTS[:1])  # the first prefill probes the model with a tree
    calls = []

    def attend(query, key, value, attn_mask=None, **options):
        calls.append((query.shape[2], key.shape[1], attn_mask, options))
        return scaled_dot_product_attention(query, key, value, attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    answers(llama, NullDrafter(), PROMPTS[:1], max_new_tokens=4)
    num_layers, kv_heads = 4, 2
    assert [num_queries for num_queries, *_ in calls] == [len(PROMPTS[0])] * num_layers + [1] * 3 * num_layers
    for num_queries, num_heads, mask, options in calls:
        assert (num_heads, mask) == (kv_heads, None)
        assert options["enable_gqa"]
        assert options["is_causal"] == (num_queries > 1)


def test_a_recorded_draft_model_has_room_for_the_whole_answer(llama, monkeypatch):
    """Its cache once grew in the middle of an answer.

    The next recording then used a pool without a graph but with an output in use. PyTorch asserts
    against that.
    """
    recorder = PoolRecorder()
    reader = HFTarget(llama.model, llama.tokenizer, llama.identity, cuda_graphs=True, recorder=recorder)
    drafter = DraftModel(DraftModelConfig(length=3, top_k=3), reader)
    monkeypatch.setattr(tree_reader, "extent_step", lambda device, *, is_fixed: 64)
    assert answers(llama, drafter, PROMPTS[:1], 70) == answers(llama, NullDrafter(), PROMPTS[:1], 70)
    assert recorder.num_pools == 1, "the cache has moved"


def test_recordings_after_a_cache_moved_use_a_new_pool(llama, monkeypatch):
    recorder = PoolRecorder()
    graphed = HFTarget(llama.model, llama.tokenizer, llama.identity, cuda_graphs=True, recorder=recorder)
    monkeypatch.setattr(tree_reader, "extent_step", lambda device, *, is_fixed: STEP)
    prompts, options = torch.tensor(PROMPTS[:1]), {"max_nodes": 0}
    nothing = empty_tree(1, prompts.device)
    outputs = []
    for room in (4, 80):
        graphed.prefill(Prompts.of(prompts), max_new_tokens=room, **options)
        outputs.append(graphed.verify(prompts[:, 0], nothing))  # still in use when the cache moves
    assert recorder.num_pools == len(outputs) == 2


@pytest.mark.parametrize("rows", [PROMPTS, PROMPTS[:1]], ids=["batch", "alone"])
def test_the_target_reads_little_padding(llama, rows):
    """On a GPU each tree was once padded to its largest size; shared prefixes saved nothing."""
    sizes: dict[bool, set[int]] = {}
    texts = {}
    most = 16 * 4
    for few_sizes in (False, True):
        torch.manual_seed(1)
        options = {"kind": "redrafter", "beam_width": 16, "beam_length": 4}
        drafter = build_drafter(parse_drafter(options), llama).eval().requires_grad_(False)
        drafter.has_few_sizes = few_sizes
        steps = list(generate(llama, drafter, GreedyAcceptance(), [torch.tensor(row) for row in rows], max_new_tokens=20))
        texts[few_sizes] = [step.tokens for step in steps]
        sizes[few_sizes] = {step.num_nodes for step in steps[1:]}
    assert texts[False] == texts[True]
    step = -(-most // NUM_SIZES)
    assert {min(-(-size // step) * step, most) for size in sizes[False]} == sizes[True]
    assert len(sizes[False]) > 1
    assert max(sizes[False]) < most


@pytest.mark.parametrize(("form", "has_few_sizes"), [({}, False), ({"compiled": True}, True), ({"cuda_graphs": True}, True)])
def test_trees_have_few_sizes_if_shapes_are_recorded(llama, monkeypatch, form, has_few_sizes):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    if form.get("cuda_graphs"):
        form |= {"recorder": PoolRecorder()}
    target = HFTarget(llama.model, llama.tokenizer, llama.identity, **form)
    assert build_drafter(parse_drafter({"kind": "redrafter"}), target).has_few_sizes == has_few_sizes


def test_a_recorded_drafter_drafts_at_full_size_and_is_trimmed_outside_the_recording(llama):
    recorders = PoolRecorder(), PoolRecorder()
    graphed = HFTarget(llama.model, llama.tokenizer, llama.identity, cuda_graphs=True, recorder=recorders[0])
    torch.manual_seed(1)
    drafter = (
        build_drafter(parse_drafter({"kind": "redrafter", "beam_width": 8, "beam_length": 4}), graphed)
        .eval()
        .requires_grad_(False)
    )
    replayed = GraphedDrafter(drafter, recorders[1])
    assert answers(graphed, replayed) == answers(llama, NullDrafter())
    prompts = [torch.tensor(row) for row in PROMPTS]
    sizes = [step.num_nodes for step in generate(graphed, replayed, GreedyAcceptance(), prompts, max_new_tokens=20)]
    step = -(-8 * 4 // NUM_SIZES)
    assert all(size % step == 0 or size == 8 * 4 for size in sizes)
    assert min(sizes[1:]) < 8 * 4


@pytest.mark.parametrize("kind", ["nothing", *TREES])
def test_decoding_gives_the_device_of_every_new_tensor(llama, kind):
    """A tensor on the CPU by default would be an error on a GPU, or a copy in every step."""
    torch.manual_seed(1)
    drafter = NullDrafter()
    if kind != "nothing":
        drafter = build_drafter(parse_drafter({"kind": kind, **TREES[kind]}), llama).eval().requires_grad_(False)
    prompts = [torch.tensor(row) for row in PROMPTS]
    expected = answers(llama, NullDrafter())
    with torch.device("meta"):  # on this device, reading a value is an error
        steps = list(generate(llama, drafter, GreedyAcceptance(), prompts, max_new_tokens=20))
    assert texts_of(steps, len(prompts)) == expected
