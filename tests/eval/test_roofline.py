"""The roofline counts what a step reads, and measures a speed that a machine can have."""

import torch
from torch import nn

from outrider.eval.roofline import cache_bytes, measure_bandwidth, measure_roofline, weight_bytes
from outrider.eval.run_files import Roofline
from outrider.models.hf_target import HFTarget


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layer = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 100, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_an_embedding_counts_one_row_unless_it_is_the_head() -> None:
    assert weight_bytes(Tied(tied=False)) == 4 * (8 + 8 * 8 + 8 * 100)
    assert weight_bytes(Tied(tied=True)) == 4 * (8 * 8 + 8 * 100)


def test_half_precision_halves_the_bytes() -> None:
    assert weight_bytes(Tied(tied=True).bfloat16()) == 2 * (8 * 8 + 8 * 100)


def test_measured_bandwidth_is_plausible_and_a_given_one_is_kept(tiny_target: HFTarget) -> None:
    assert 0.05 < measure_bandwidth(1 << 20, torch.device("cpu")) < 100_000
    given = measure_roofline(tiny_target.model, tiny_target.device, 20.0)
    assert given.given
    assert given.tokens_per_second == 20e9 / given.weight_bytes
    assert not measure_roofline(tiny_target.model, tiny_target.device).given


def test_the_cache_is_known_or_said_to_be_unknown() -> None:
    size = cache_bytes(torch.device("cpu"))
    assert size is None or 1 << 15 <= size <= 1 << 34
    assert not Roofline(weight_bytes=1, bandwidth_gbs=1.0, given=True, cache_bytes=None).fits_in_cache
