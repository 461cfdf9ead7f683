"""The kernels that attention under a mask reaches on a GPU, each against plain arithmetic in
float64.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.data.manifest import TargetIdentity
from outrider.models.decoding import DraftTree, Prompts
from outrider.models.drafters.branches.attention import attend_densely
from outrider.models.target.hf_target import HFTarget
from outrider.models.target.tree_attention import IMPLEMENTATION, tree_attention_mask

# A backend that was chosen and doesn't take the inputs says why in warnings.
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


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """Within the test only this backend is on; `any` leaves PyTorch its choice."""
    name: str = request.param
    if device.type != "cuda" and name not in ("any", "math"):
        pytest.skip(f"the backend {name} is CUDA's")
    if BACKENDS[name] is None:
        yield name
    else:
        with sdpa_kernel([BACKENDS[name]]):
            yield name


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What transformers calls for a layer with grouped heads: [batch, query, head, head_dim]."""
    output, _ = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](torch.nn.Module(), query, key, value, mask)
    return output


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same in float64, [batch, query, head, head_dim]."""
    query, key, value = (each.double() for each in (query, key, value))
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
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
    """What a backend computes.

    It may refuse a type or a shape, but only when it was chosen by name.
    """
    try:
        return attention()
    except RuntimeError as error:
        if backend == "any" or "No available kernel" not in str(error):
            raise
        pytest.skip(f"the backend {backend} doesn't take this")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_grouped_heads_under_a_mask_are_what_arithmetic_says(device, backend, dtype, kind):
    num_cases = 0
    for queries in (1, 5, 21, 61):
        for columns in (33, 256, 1000):
            query, key, value, visible = tensors(device, dtype, queries, columns)
            mask = visible if kind == "bool" else additive(visible, dtype)
            found = kernel_or_skip(backend, lambda: attend(query, key, value, mask))  # noqa: B023
            assert found.shape == (2, queries, HEADS, HEAD_DIM)
            difference = (found.double() - by_hand(query, key, value, visible)).abs().max()
            assert difference < TOLERANCES[dtype], (queries, columns)
            num_cases += 1
    assert num_cases == 12


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_window_that_hides_whole_blocks_of_keys_leaves_numbers(device, backend, dtype):
    """Kernels go through the keys block by block; a block of which nothing is seen must count for
    nothing.
    """
    lineage = torch.tensor([[[0, -1], [1, 0], [2, -1]]] * 2, device=device)
    lengths = torch.tensor([COLUMNS - 4, COLUMNS - 40], device=device)
    mask = tree_attention_mask(lineage, lengths, COLUMNS, dtype, window=WINDOW)
    query, key, value, _ = tensors(device, dtype, 4, COLUMNS)
    assert bool((mask[:, :, :, :128] < 0).all()), "the first blocks are hidden"
    found = kernel_or_skip(backend, lambda: attend(query, key, value, mask))
    assert (found.double() - by_hand(query, key, value, mask)).abs().max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_model_with_a_window_reads_a_tree_alike_with_every_kernel(device, backend, dtype):
    target = mistral(device, dtype)
    found = kernel_or_skip(backend, lambda: tree_logits(target, device))
    with sdpa_kernel([SDPBackend.MATH]):
        expected = tree_logits(target, device)
    assert found.isfinite().all()
    assert (found - expected).norm() < 10 * TOLERANCES[dtype] * expected.norm()


def mistral(device: torch.device, dtype: torch.dtype) -> HFTarget:
    config = MistralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    identity = TargetIdentity(
        name="mistral",
        revision=None,
        weights_sha256="",
        config_sha256="",
        quantization="",
        tokenizer_sha256="",
        hidden_size=64,
        vocab_size=300,
    )
    return HFTarget(model, None, identity)


@torch.inference_mode()
def tree_logits(target: HFTarget, device: torch.device) -> torch.Tensor:
    text = torch.arange(COLUMNS, device=device) * 7 % 300
    target.prefill(Prompts.of([text, text[:250]]), max_new_tokens=8, max_nodes=3)
    tokens, parents = torch.tensor([[5, 7, 6]] * 2, device=device), torch.tensor([[-1, 0, -1]] * 2, device=device)
    logits = target.verify(text[[3, 4]], DraftTree(tokens=tokens, parents=parents, max_depth=2)).logits.float()
    return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_branches_in_training_have_the_gradients_that_arithmetic_says(device, backend, dtype):
    branches, seq, depth = 21, 70, 3
    query, key, value, seen = tensors(device, dtype, branches, seq)
    seen[:, :, 0] = False  # a branch may see nothing of the text
    generator = torch.Generator().manual_seed(1)
    own = [
        tuple(torch.randn(2, KV_HEADS, branches, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(2))
        for _ in range(depth)
    ]
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value, *(part for pair in own for part in pair))]
    weights = torch.randn(query.shape, generator=generator).to(device, dtype)

    def output(function: Any) -> torch.Tensor:
        text, branch = (leaves[1], leaves[2]), list(zip(leaves[3::2], leaves[4::2], strict=True))
        return function(leaves[0], text, branch, seen, HEAD_DIM**-0.5)

    found = kernel_or_skip(backend, lambda: output(attend_densely))
    kernel_or_skip(backend, lambda: (found * weights).sum().backward())
    gradients = [leaf.grad.double() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    expected = output(densely_by_hand)
    (expected * weights.double()).sum().backward()
    assert (found.double() - expected).abs().max() < TOLERANCES[dtype]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (gradient - leaf.grad.double()).norm() < 4 * TOLERANCES[dtype] * leaf.grad.double().norm()


def densely_by_hand(query: Any, text: Any, own: Any, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """[batch, head, branch, head_dim], in float64: each branch's own entries one by one."""
    keys, values = (torch.cat([each, *parts], dim=2) for each, parts in zip(text, zip(*own, strict=True), strict=True))
    of_own = torch.eye(query.shape[2], dtype=torch.bool, device=query.device).repeat(1, len(own))
    mask = torch.cat([seen, of_own.expand(len(query), 1, -1, -1)], dim=3)
    assert scale == HEAD_DIM**-0.5
    return by_hand(query, keys, values, mask).transpose(1, 2)
