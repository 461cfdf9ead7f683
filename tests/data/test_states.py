"""Hidden states in eight bits: their errors, and values that are rejected."""

import pytest
import torch

from outrider.data.config import STATE_DTYPES
from outrider.data.states import LARGEST, are_finite, encode_states, state_bytes

WIDTH = 96


def states() -> torch.Tensor:
    """Make hidden states of very different sizes, one with a single huge element.

    The first token of a text often has such a state.
    """
    values = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    values[7, 3] = 100 * values[7].abs().max()
    return values


def test_bfloat16_states_are_decoded_bit_by_bit() -> None:
    stored = encode_states(states().bfloat16(), "bfloat16")
    assert stored.scales is None
    assert torch.equal(stored.decode(), states().bfloat16())


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_error_of_eight_bit_states_is_within_the_formats_bound(dtype: str) -> None:
    original = states()
    largest = original.abs().amax(1, keepdim=True)
    error = (encode_states(original, dtype).decode() - original).abs()
    floating = torch.maximum(original.abs() / 2**4, largest / LARGEST[dtype] / 2**10)
    bound = {"float8_e4m3fn": floating, "int8": (largest / 254).expand_as(original)}[dtype]
    assert (error <= bound * 1.0001).all()
    assert (error > bound / 2).any(), "the bound is the format's, not a wider one"


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_tokens_scale_does_not_depend_on_other_tokens(dtype: str) -> None:
    original = states()
    alone = encode_states(original[:1], dtype).decode()
    assert torch.equal(encode_states(original, dtype).decode()[:1], alone)
    assert torch.equal(encode_states(-original, dtype).decode(), -encode_states(original, dtype).decode()), "symmetric"
    largest = original.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(encode_states(original, dtype).decode().gather(1, largest), original.gather(1, largest))


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
def test_zero_and_extreme_states_are_decoded_to_finite_numbers(dtype: str, value: float) -> None:
    decoded = encode_states(torch.full((2, WIDTH), value), dtype).decode().float()
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, torch.full((2, WIDTH), value), rtol=2**-8, atol=1e-37)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_the_tokens_with_nan_and_infinite_states_are_marked(dtype: str, value: float) -> None:
    original = states()
    original[5, 5] = value
    assert are_finite(original).logical_not().nonzero().tolist() == [[5]]
    others = torch.arange(len(original)) != 5
    expected, actual = encode_states(original[others], dtype), encode_states(original, dtype)
    assert torch.equal(actual.decode()[others], expected.decode()), "the other tokens are encoded as before"


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_state_bytes_equals_the_size_of_the_tensors(dtype: str) -> None:
    stored = encode_states(states(), dtype)
    tensors = [stored.values, *([] if stored.scales is None else [stored.scales])]
    assert sum(tensor.nbytes for tensor in tensors) == len(stored) * state_bytes(WIDTH, dtype)
