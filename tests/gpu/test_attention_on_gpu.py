"""GPU kernels of attention with masks, each against plain arithmetic in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.models.decoding import DraftTree, GreedyAcceptance, Prompts, generate
from outrider.models.drafters import NullDrafter
from outrider.models.drafters.branches import Entries, attend_densely
from outrider.models.llm import split_attention, tree_reader
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.split_attention import MAX_PARTS, has_kernel, split_mask
from outrider.models.llm.tree_attention import IMPLEMENTATION, hidden_score, tree_attention_mask

from ..tiny_models import IDENTITY

# A selected backend that rejects its inputs gives the reasons in warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
TOLERANCES = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BACKENDS = {
    "any": None,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WINDOW, COLUMNS = 64, 300
PARTS = (1, 4, 8, 16, MAX_PARTS)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """Enable only this backend during the test; with `any` PyTorch chooses."""
    name: str = request.param
    if device.type != "cuda" and name not in ("any", "math"):
        pytest.skip(f"the backend {name} is CUDA's")
    if BACKENDS[name] is None:
        yield name
    else:
        with sdpa_kernel([BACKENDS[name]]):
            yield name


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attend as a layer with grouped heads does: [batch, query, head, head_dim]."""
    output, _ = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](torch.nn.Module(), query, key, value, mask)
    return output


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the same attention in float64: [batch, query, head, head_dim]."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    hidden = ~mask if mask.dtype == torch.bool else mask < 0
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def tensors(device: torch.device, dtype: torch.dtype, queries: int, columns: int, batch: int = 2) -> Any:
    generator = torch.Generator().manual_seed(queries * 1000 + columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # A cache is longer than the part that is read, so keys and values aren't contiguous.
    key, value = (normal(batch, KV_HEADS, columns + 7, HEAD_DIM)[:, :, :columns] for _ in range(2))
    visible = torch.rand(batch, 1, queries, columns, generator=generator) < 0.7
    visible[..., 0] = True
    return normal(batch, HEADS, queries, HEAD_DIM), key, value, visible.to(device)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def kernel_or_skip(backend: str, attention: Any) -> torch.Tensor:
    """Run a backend, and skip the test if the backend rejects a type or a shape.

    Only a backend selected by name may do so.
    """
    try:
        return attention()
    except RuntimeError as error:
        if backend == "any" or "No available kernel" not in str(error):
            raise
        pytest.skip(f"the backend {backend} doesn't take this")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_grouped_heads_with_a_mask_equal_plain_arithmetic(device, backend, dtype, kind):
    num_cases = 0
    for queries in (1, 5, 21, 61):
        for columns in (33, 256, 1000):
            query, key, value, visible = tensors(device, dtype, queries, columns)
            mask = visible if kind == "bool" else additive(visible, dtype)
            actual = kernel_or_skip(backend, lambda: attend(query, key, value, mask))  # noqa: B023
            assert actual.shape == (2, queries, HEADS, HEAD_DIM)
            difference = (actual.double() - by_hand(query, key, value, visible)).abs().max()
            assert difference < TOLERANCES[dtype], (queries, columns)
            num_cases += 1
    assert num_cases == 12


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_window_that_masks_whole_blocks_of_keys_gives_no_nan(device, backend, dtype):
    """Kernels process keys in blocks; a fully masked block must have no influence."""
    lineage = torch.tensor([[[0, -1], [1, 0], [2, -1]]] * 2, device=device)
    lengths = torch.tensor([COLUMNS - 4, COLUMNS - 40], device=device)
    mask = tree_attention_mask(lineage, lengths, COLUMNS, dtype, window=WINDOW)
    query, key, value, _ = tensors(device, dtype, 4, COLUMNS)
    assert bool((mask[:, :, :, :128] < 0).all()), "the first blocks are hidden"
    actual = kernel_or_skip(backend, lambda: attend(query, key, value, mask))
    assert (actual.double() - by_hand(query, key, value, mask)).abs().max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_model_with_a_window_reads_a_tree_equally_with_every_kernel(device, backend, dtype):
    target = mistral(device, dtype)
    actual = kernel_or_skip(backend, lambda: tree_logits(target, device))
    with sdpa_kernel([SDPBackend.MATH]):
        expected = tree_logits(target, device)
    assert actual.isfinite().all()
    assert (actual - expected).norm() < 10 * TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_split_keys_folded_heads_and_math_agree(device, dtype):
    """The mask alone decides the form: whole and folded, or in parts."""
    num_cases = 0
    for queries in (1, 5, 21, 61):
        for columns in (512, 1024, 2560):
            for batch in (1, 3):
                query, key, value, visible = tensors(device, dtype, queries, columns, batch)
                visible[..., columns // 2 :] = False  # whole parts are hidden
                expected = by_hand(query, key, value, visible)
                mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, hidden_score(dtype))
                for num_parts in PARTS:
                    actual = attend(query, key, value, split_mask(mask, num_parts))
                    difference = (actual.double() - expected).abs().max()
                    assert difference < TOLERANCES[dtype], (queries, columns, batch, num_parts)
                    num_cases += 1
                with sdpa_kernel([SDPBackend.MATH]):
                    assert (attend(query, key, value, mask).double() - expected).abs().max() < TOLERANCES[dtype]
    assert num_cases == 24 * len(PARTS)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_window_that_masks_whole_parts_gives_no_nan(device, dtype):
    lineage = torch.tensor([[[0, -1], [1, 0], [2, -1]]] * 2, device=device)
    columns = 512
    lengths = torch.tensor([columns - 4, columns - 40], device=device)
    mask = tree_attention_mask(lineage, lengths, columns, dtype, window=WINDOW)
    query, key, value, _ = tensors(device, dtype, 4, columns)
    for num_parts in PARTS[1:]:
        actual = attend(query, key, value, split_mask(mask, num_parts))
        assert (actual.double() - by_hand(query, key, value, mask)).abs().max() < TOLERANCES[dtype], num_parts


@pytest.mark.parametrize("form", [{}, {"cuda_graphs": True}, {"compiled": True, "cuda_graphs": True}], ids=str)
def test_keys_are_split_and_the_text_stays(device, form, monkeypatch):
    """In float32 on the same prompt: nothing split, and each number of parts."""
    if form and device.type != "cuda":
        pytest.skip("only CUDA records")
    texts = {}
    parts_of_passes: set[int] = set()
    masks_by_kind = tree_reader.masks_by_kind

    def counted_masks(*args: Any) -> Any:
        parts_of_passes.add(args[-1])
        return masks_by_kind(*args)

    monkeypatch.setattr(tree_reader, "masks_by_kind", counted_masks)
    for num_parts in (1, 4, 32):
        torch._dynamo.reset()
        parts_of_passes.clear()
        monkeypatch.setattr(split_attention, "count_parts", lambda *sizes, chosen=num_parts: chosen)
        target = mistral(device, torch.float32, sliding_window=None, **form)
        prompt = torch.arange(1600, device=device) * 7 % 300
        steps = generate(target, NullDrafter(), GreedyAcceptance(), [prompt, prompt[:1500]], max_new_tokens=24)
        texts[num_parts] = [step.tokens for step in steps]
        if device.type == "cuda":
            assert num_parts in parts_of_passes
    assert texts[4] == texts[32] == texts[1]


def mistral(device: torch.device, dtype: torch.dtype, sliding_window: int | None = WINDOW, **form: Any) -> HFTarget:
    config = MistralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=sliding_window,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    identity = replace(IDENTITY, hidden_size=64, vocab_size=300)
    return HFTarget(model, None, identity, **form)


@torch.inference_mode()
def tree_logits(target: HFTarget, device: torch.device) -> torch.Tensor:
    text = torch.arange(COLUMNS, device=device) * 7 % 300
    target.prefill(Prompts.of([text, text[:250]]), max_new_tokens=8, max_nodes=3)
    tokens, parents = torch.tensor([[5, 7, 6]] * 2, device=device), torch.tensor([[-1, 0, -1]] * 2, device=device)
    logits = target.verify(text[[3, 4]], DraftTree(tokens=tokens, parents=parents, max_depth=2)).logits.float()
    return logits - logits.mean(-1, keepdim=True)


def in_two_parts(query: Any, text: Any, branch_entries: Any, seen: torch.Tensor, scale: float) -> torch.Tensor:
    assert has_kernel(query, text[1])
    return Entries(text, branch_entries).attend(query, seen, scale)


@pytest.mark.parametrize("attend", [attend_densely, in_two_parts])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gradients_of_branches_in_training_equal_plain_arithmetic(device, backend, dtype, attend):
    branches, seq, depth = 21, 70, 3
    query, key, value, seen = tensors(device, dtype, branches, seq)
    seen[:, :, 0] = False  # one branch attends to no token of the text
    generator = torch.Generator().manual_seed(1)
    branch_entries = [
        tuple(torch.randn(2, KV_HEADS, branches, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(2))
        for _ in range(depth)
    ]
    leaves = [
        tensor.detach().clone().requires_grad_()
        for tensor in (query, key, value, *(part for pair in branch_entries for part in pair))
    ]
    weights = torch.randn(query.shape, generator=generator).to(device, dtype)

    def output(function: Any) -> torch.Tensor:
        text, branch = (leaves[1], leaves[2]), list(zip(leaves[3::2], leaves[4::2], strict=True))
        return function(leaves[0], text, branch, seen, HEAD_DIM**-0.5)

    actual = kernel_or_skip(backend, lambda: output(attend))
    kernel_or_skip(backend, lambda: (actual * weights).sum().backward())
    gradients = [leaf.grad.double() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    expected = output(densely_by_hand)
    (expected * weights.double()).sum().backward()
    assert (actual.double() - expected).abs().max() < TOLERANCES[dtype]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (gradient - leaf.grad.double()).norm() < 4 * TOLERANCES[dtype] * leaf.grad.double().norm()


def densely_by_hand(query: Any, text: Any, branch_entries: Any, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend in float64 to text and branch entries: [batch, head, branch, head_dim]."""
    keys, values = (
        torch.cat([text_part, *parts], dim=2) for text_part, parts in zip(text, zip(*branch_entries, strict=True), strict=True)
    )
    of_own = torch.eye(query.shape[2], dtype=torch.bool, device=query.device).repeat(1, len(branch_entries))
    mask = torch.cat([seen, of_own.expand(len(query), 1, -1, -1)], dim=3)
    assert scale == HEAD_DIM**-0.5
    return by_hand(query, keys, values, mask).transpose(1, 2)
