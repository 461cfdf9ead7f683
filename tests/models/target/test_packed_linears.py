"""Packed linear layers: equal outputs, and no change of the model afterwards."""

import copy

import pytest
import torch
from torch import nn

from outrider.models.target.packed_linears import packed_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize("rows", [1, 2, 5, 17, 200])
def test_packed_layers_compute_the_same(rows: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False))
    x = torch.randn(2, rows, 48)
    with torch.inference_mode():
        plain = model(x)
        with packed_linears(model) as count:
            packed = model(x)
        assert count == 2
        torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(x), plain), "the layers stayed packed"


def test_a_shared_layer_is_packed_once_and_its_weights_stay():
    layer = nn.Linear(8, 8)
    weight = layer.weight
    with packed_linears(layer, nn.Sequential(layer)) as count:
        assert count == 1
        assert layer.weight is weight
        assert set(layer.state_dict()) == {"weight", "bias"}
    assert "forward" not in vars(layer)


def test_other_types_and_subclasses_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8).double(), Scaled(8, 8), nn.Conv1d(1, 1, 1))
    before = copy.deepcopy(model[1])
    with packed_linears(model) as count:
        x = torch.randn(3, 8)
        assert count == 0
        assert torch.equal(model[1](x), before(x))


def test_an_error_inside_the_context_unpacks_too():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="boom"), packed_linears(layer):
        raise RuntimeError("boom")
    assert "forward" not in vars(layer)


def test_an_inner_context_leaves_the_outer_one_packed():
    layer = nn.Linear(4, 4)
    with packed_linears(layer):
        with packed_linears(layer) as count:
            assert count == 0
        assert "forward" in vars(layer)
