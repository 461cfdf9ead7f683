"""Hidden states in eight bits: what they keep, and what they refuse."""

import pytest
import torch

from outrider.data.choices import STATE_DTYPES
from outrider.data.states import LARGEST, encode_states, state_bytes

WIDTH = 96


def states() -> torch.Tensor:
    """Tokens of very different sizes, one of them with a single huge element, as the first token of
    a text often has.
    """
    values = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    values[7, 3] = 100 * values[7].abs().max()
    return values


def test_bfloat16_states_come_back_bit_by_bit() -> None:
    stored = encode_states(states().bfloat16(), "bfloat16")
    assert stored.scales is None
    assert torch.equal(stored.decode(), states().bfloat16())


@pytest.mark.parametrize("dtype", LARGEST)
def test_eight_bits_err_by_no_more_than_their_format_does(dtype: str) -> None:
    given = states()
    largest = given.abs().amax(1, keepdim=True)
    error = (encode_states(given, dtype).decode() - given).abs()
    floating = torch.maximum(given.abs() / 2**4, largest / LARGEST[dtype] / 2**10)
    bound = {"float8_e4m3fn": floating, "int8": (largest / 254).expand_as(given)}[dtype]
    assert (error <= bound * 1.0001).all()
    assert (error > bound / 2).any(), "the bound is the format's, not a wider one"


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_token_keeps_its_own_scale_whatever_stands_beside_it(dtype: str) -> None:
    given = states()
    alone = encode_states(given[:1], dtype).decode()
    assert torch.equal(encode_states(given, dtype).decode()[:1], alone)
    assert torch.equal(encode_states(-given, dtype).decode(), -encode_states(given, dtype).decode()), "symmetric"
    largest = given.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(encode_states(given, dtype).decode().gather(1, largest), given.gather(1, largest))


def test_eight_floating_bits_keep_what_even_steps_lose_beside_a_huge_element() -> None:
    given = states()[7:8]
    lost = {dtype: (encode_states(given, dtype).decode() == 0).float().mean() for dtype in LARGEST}
    assert lost["float8_e4m3fn"] < 0.1 < 0.5 < lost["int8"]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
def test_tokens_of_nothing_or_of_extremes_are_numbers_again(dtype: str, value: float) -> None:
    decoded = encode_states(torch.full((2, WIDTH), value), dtype).decode().float()
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, torch.full((2, WIDTH), value), rtol=2**-8, atol=1e-37)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_refused_and_not_stored_as_one(dtype: str, value: float) -> None:
    given = states()
    given[5, 5] = value
    with pytest.raises(ValueError, match=r"not all numbers.*target\.dtype"):
        encode_states(given, dtype)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_bytes_are_those_of_the_tensors(dtype: str) -> None:
    stored = encode_states(states(), dtype)
    tensors = [stored.values, *([] if stored.scales is None else [stored.scales])]
    assert sum(tensor.nbytes for tensor in tensors) == len(stored) * state_bytes(WIDTH, dtype)
