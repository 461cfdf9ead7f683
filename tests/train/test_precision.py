"""TF32 in training: where it is on, and that nothing else uses it."""

from collections.abc import Iterator

import pytest
import torch

from outrider.train import loop as loop_module
from outrider.train.parallel import tensor_float32
from outrider.train.validation import Validator


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_an_accelerator_multiplies_in_tf32_within_the_block_only() -> None:
    inside = []

    def fail() -> None:
        inside.append(torch.get_float32_matmul_precision())
        raise RuntimeError("ends the block")

    with pytest.raises(RuntimeError, match="ends the block"), tensor_float32(torch.device("cuda")):
        fail()
    assert inside == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_cpu_keeps_its_precision() -> None:
    """On a CPU `high` may mean bf16."""
    with tensor_float32(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_lower_precision_of_the_process_is_kept() -> None:
    torch.set_float32_matmul_precision("medium")
    with tensor_float32(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "medium"


def test_losses_and_gradients_use_tf32_and_validation_does_not(run_train, monkeypatch):
    seen: dict[str, set[str]] = {"backward": set(), "target": set(), "validation": set()}

    def spy(name: str, owner: object, attribute: str) -> None:
        original = getattr(owner, attribute)

        def wrapper(*args: object, **kwargs: object) -> object:
            seen[name].add(torch.get_float32_matmul_precision())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, wrapper)

    monkeypatch.setattr(loop_module, "tensor_float32", lambda device: tensor_float32(torch.device("cuda")))
    spy("backward", loop_module, "backward")
    spy("target", loop_module, "with_hidden_states")
    spy("validation", Validator, "__call__")
    run_train(steps=2, validation_texts=2, validation_tokens=4)
    assert seen == {"backward": {"high"}, "target": {"highest"}, "validation": {"highest"}}
    assert torch.get_float32_matmul_precision() == "highest"
