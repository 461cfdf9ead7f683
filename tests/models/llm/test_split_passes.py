"""Passes whose attention reads the keys in parts: the text stays, and other models are read whole."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.decoding import GreedyAcceptance, Prompts, empty_tree, generate
from outrider.models.drafters import NullDrafter, build_drafter, parse_drafter
from outrider.models.llm import split_attention, tree_attention, tree_reader
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.split_attention import choose_num_parts

from ...decoded import texts_of
from ..recorder import PoolRecorder
from . import efficient_attention

STEP = 256
"""Extents in these tests, and the fewest keys that are split."""
LONG, ROOM = [7 * number % 300 for number in range(STEP - 8)], 24
"""A prompt whose answer grows beyond STEP columns."""
PROMPTS = [LONG, LONG[5:60], LONG[:200]]
NUM_PARTS = 2
"""Of STEP keys, for 64 processors and two heads of keys."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Imitate a GPU of 64 multiprocessors; return the numbers of parts of all masked passes."""
    monkeypatch.setattr(split_attention, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(split_attention, "num_processors", lambda device: 64)
    monkeypatch.setattr(split_attention, "MIN_KEYS", STEP)
    monkeypatch.setattr(tree_attention, "has_grouped_kernel", lambda device: False)
    monkeypatch.setattr(tree_reader, "extent_step", lambda device, *, is_fixed: STEP)
    masks_by_kind, seen = tree_reader.masks_by_kind, set()

    def counted_masks(*args: Any) -> Any:
        seen.add(args[-1])
        return masks_by_kind(*args)

    monkeypatch.setattr(tree_reader, "masks_by_kind", counted_masks)
    with efficient_attention.on_cpu():
        yield seen


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=64, tie_word_embeddings=False, **options)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def make_target(target: HFTarget, model: LlamaForCausalLM) -> Any:
    return lambda **form: HFTarget(model, target.tokenizer, target.identity, **form)


def redrafter(target: HFTarget) -> Any:
    torch.manual_seed(1)
    options = {"kind": "redrafter", "beam_width": 3, "beam_length": 3, "tree_nodes": 9}
    return build_drafter(parse_drafter(options), target).eval().requires_grad_(False)


def answers(target: HFTarget, drafter: Any, rows: Any = PROMPTS) -> list[list[int]]:
    prompts = [torch.tensor(row) for row in rows]
    return texts_of(generate(target, drafter, GreedyAcceptance(), prompts, max_new_tokens=ROOM), len(rows))


def prefilled(target: HFTarget) -> Any:
    """Return a cache of two rows of different lengths, with a pass prepared."""
    target._trees.kinds = {"full_attention": None}  # no probe
    target.prefill(Prompts.of([torch.tensor(LONG), torch.tensor(LONG[5:])]), max_new_tokens=ROOM, max_nodes=0)
    cache = target._require_cache()
    cache.begin_pass(1)
    return cache


@pytest.mark.parametrize("form", ["eager", "cuda_graphs", pytest.param("compiled", marks=[pytest.mark.slow, pytest.mark.long])])
def test_the_text_is_the_same_in_every_form(request, make_target, monkeypatch, form):
    expected = answers(make_target(), NullDrafter())
    parts: set[int] = request.getfixturevalue("parts")
    options: dict[str, Any] = {
        "eager": {},
        "cuda_graphs": {"cuda_graphs": True, "recorder": PoolRecorder()},
        "compiled": {"compiled": True},
    }[form]
    # Compile without a backend of kernels. A graph break is an error, and so are too many graphs.
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend="aot_eager"))
    target = make_target(**options)
    for drafter in (NullDrafter(), redrafter(target)):
        assert answers(target, drafter) == expected
        assert answers(target, drafter, PROMPTS[:1]) == expected[:1]
    assert NUM_PARTS in parts


def test_a_cpu_splits_nothing(make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_attention, "MIN_KEYS", 1)
    monkeypatch.setattr(tree_attention, "attend_split", None)
    assert answers(make_target(), NullDrafter())


@pytest.mark.parametrize("limit", [{"MAX_TEXTS": 1}, {"MIN_KEYS": 4 * STEP}], ids=str)
def test_many_rows_and_short_texts_are_not_split(parts, make_target, monkeypatch, limit):
    cache = prefilled(make_target())
    assert choose_num_parts(make_target().model, cache) == NUM_PARTS
    for name, value in limit.items():
        monkeypatch.setattr(split_attention, name, value)
    assert choose_num_parts(make_target().model, cache) == 1


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("_supports_attention_backend", False), ("dtype", torch.bfloat16)],
    ids=["own code", "another type"],
)
def test_layers_that_may_not_read_a_split_mask_get_none(parts, make_target, monkeypatch, attribute, value):
    """A model with attention code of its own would add the mask to the scores of all keys."""
    target = make_target()
    cache = prefilled(target)
    monkeypatch.setattr(type(target.model), attribute, value)
    assert choose_num_parts(target.model, cache) == 1


def test_eager_attention_is_not_split(parts: set[int], make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    cache = prefilled(target)
    monkeypatch.setattr(target.model.config, "_attn_implementation", "eager")
    assert choose_num_parts(target.model, cache) == 1


def test_texts_that_return_before_any_prompt_are_read_whole(parts: set[int], make_target: Any) -> None:
    """The layers of such a target have no keys yet."""
    first, second = make_target(), make_target()
    prefilled(first)
    texts = [first.take(0), first.take(1)]
    last, nothing = torch.tensor([1, 2]), empty_tree(2, torch.device("cpu"))
    expected = first.verify(last, nothing).logits
    second._trees.kinds = first._trees.kinds
    second.resume(None, texts, capacity=STEP)
    parts.clear()
    torch.testing.assert_close(second.verify(last, nothing).logits, expected, rtol=1e-4, atol=1e-4)
    assert parts == {1}
