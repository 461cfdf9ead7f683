"""Copies of the training state, and random states."""

import random

import numpy as np
import torch

from outrider.train.state import HostCopy, random_state, set_random_state


def test_a_copy_keeps_values_kinds_and_nesting_and_shares_no_memory() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2).T)  # not contiguous
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight}}, "groups": [{"betas": (0.9, 0.99), "params": [0]}]}
    copy = HostCopy()(state)
    before = weight.detach().clone()
    weight.data.zero_()
    assert torch.equal(copy["state"][0]["exp_avg"], before)
    assert not copy["state"][0]["exp_avg"].requires_grad
    assert copy["groups"] == state["groups"]
    assert type(copy["groups"][0]["betas"]) is tuple


def test_the_next_copy_takes_the_same_memory_unless_a_shape_has_changed() -> None:
    copy, state = HostCopy(), {"a": torch.ones(4), "b": torch.ones(4)}
    first = copy(state)
    second = copy({"a": torch.zeros(4), "b": torch.zeros(5)})
    assert second["a"].data_ptr() == first["a"].data_ptr() != second["b"].data_ptr()
    assert first["b"].tolist() == [1.0] * 4
    assert second["b"].tolist() == [0.0] * 5


def test_every_random_generator_is_restored() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    np.random.randn()
    state = random_state(torch.device("cpu"))
    drawn = draw()
    assert draw() != drawn
    set_random_state(state, torch.device("cpu"))
    assert draw() == drawn
