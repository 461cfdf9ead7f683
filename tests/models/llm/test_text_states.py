"""Reading of the target's states in training, with no more computation than needed."""

from collections.abc import Iterator

import pytest
import torch

from outrider.data.types import DrafterBatch
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.hidden_states import decoder_layers
from outrider.train.batches import states_of_texts

from ...host_reads import HostReads, ScalarReads


@pytest.fixture
def calls(target: HFTarget) -> Iterator[list[str]]:
    """Record the target's modules in the order of execution, and whether gradients were on."""
    seen: list[str] = []
    modules = {f"layer {index}": layer for index, layer in enumerate(decoder_layers(target.model))}
    modules |= {"norm": target.model.get_decoder().norm, "head": target.head}
    handles = [
        module.register_forward_hook(lambda *_, name=name: seen.append(name + " with gradients" * torch.is_grad_enabled()))
        for name, module in modules.items()
    ]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.fixture
def texts() -> DrafterBatch:
    input_ids = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 5, 0, 0]])
    return DrafterBatch(
        input_ids=input_ids,
        attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        positions=torch.zeros_like(input_ids, dtype=torch.bool),
        continuations=torch.zeros(2, 5, 2, dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("last", "layers", "expected"),
    [
        (True, (), ["layer 0", "layer 1", "norm"]),
        (True, (1, 0), ["layer 0", "layer 1", "norm"]),
        (False, (1, 0), ["layer 0"]),
        (False, (0,), []),
        (False, (), []),
    ],
)
def test_layers_after_the_last_needed_one_and_the_head_are_not_run(last, layers, expected, target, texts, calls):
    with torch.enable_grad():
        states_of_texts(target, texts, last=last, layers=layers)
    assert calls == expected


def test_a_pass_that_ends_early_gives_the_states_of_a_whole_pass(target: HFTarget, texts: DrafterBatch) -> None:
    last, features = states_of_texts(target, texts, last=True, layers=(1, 0))
    for layers in ((1, 0), (1,)):
        none, actual = states_of_texts(target, texts, last=False, layers=layers)
        assert none is None
        assert torch.equal(actual, features[..., : target.hidden_size * len(layers)])
        assert actual.dtype == target.dtype == torch.float64
    again, _ = states_of_texts(target, texts, last=True, layers=())
    assert torch.equal(again, last), "the pass after it is whole again"
    assert target.model(texts.input_ids, use_cache=False).logits.shape == (2, 5, target.vocab_size)


def test_rows_are_read_without_a_mask_and_padding_changes_nothing(target: HFTarget, texts: DrafterBatch) -> None:
    """Attention's fastest kernels accept no mask."""
    masks: list[object] = []

    def spy(module: object, args: object, kwargs: dict[str, object]) -> None:
        masks.append(kwargs["attention_mask"])

    expected, expected_features = target.read_texts((1, 0), input_ids=texts.input_ids, attention_mask=texts.attention_mask)
    handles = [layer.register_forward_pre_hook(spy, with_kwargs=True) for layer in decoder_layers(target.model)]
    last, features = states_of_texts(target, texts, last=True, layers=(1, 0))
    by_target, _ = target.hidden_states(texts.input_ids)
    for handle in handles:
        handle.remove()
    assert masks == [None] * 4
    real = texts.attention_mask
    for actual in (last, by_target):
        torch.testing.assert_close(actual[real], expected[real])
    torch.testing.assert_close(features[real], expected_features[real])


@pytest.mark.parametrize(("last", "layers"), [(True, ()), (True, (0, 1)), (False, (1,))])
def test_reading_states_needs_no_host_read(last: bool, layers: tuple[int, ...], target: HFTarget, texts: DrafterBatch) -> None:
    states_of_texts(target, texts, last=last, layers=layers)
    with HostReads() as reads, ScalarReads() as scalars:
        states_of_texts(target, texts, last=last, layers=layers)
    assert (reads.names, scalars.count) == ([], 0)


def test_an_error_inside_a_pass_is_raised(target: HFTarget, texts: DrafterBatch) -> None:
    with pytest.raises(IndexError):
        target.layer_inputs((1,), input_ids=texts.input_ids + target.vocab_size)
    states_of_texts(target, texts, last=False, layers=(1,))
