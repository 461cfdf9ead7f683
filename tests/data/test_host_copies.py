"""Copies to the host that are waited for once."""

import torch

from outrider.data.host_copies import start_host_copies


def test_tensors_of_a_cpu_are_returned_as_they_are() -> None:
    tensors = {"values": torch.arange(6).view(2, 3), "scales": torch.ones(2)}
    host = start_host_copies(tensors)()
    assert host.keys() == tensors.keys()
    assert all(host[name] is tensor for name, tensor in tensors.items())
