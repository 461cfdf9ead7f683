"""Training of low-rank changes."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from outrider.models.drafters.saved.download import resolve_drafter
from outrider.train.config import TrainConfig, for_launch
from outrider.train.low_rank import LowRankAdamW

from .conftest import TRAIN, Run

RunTrain = Callable[..., Run]
RANK = 2


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def low_rank_run(run_train: RunTrain, base: Run, name: str = "low", **changes: Any) -> Run:
    return run_train(name, replace_drafter={"start_from": str(base.drafter_dir)}, lora_rank=RANK, **changes)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_learns_what_an_explicit_product_of_factors_learns(decay: float) -> None:
    """The reference lets autograd find the factors' gradients."""
    torch.manual_seed(0)
    inputs, wanted = torch.randn(20, 7), torch.randn(20, 9)
    weight, bias = nn.Parameter(torch.randn(9, 7)), nn.Parameter(torch.zeros(9))
    groups = [{"params": [weight], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = LowRankAdamW(groups, RANK, lr=0.05, seed=0)
    ((_, before, up, down),) = optimizer._matrices
    reference = [
        up.detach().clone().requires_grad_(),
        down.detach().clone().requires_grad_(),
        torch.zeros(9, requires_grad=True),
    ]
    groups = [{"params": reference[:2], "weight_decay": decay}, {"params": reference[2:], "weight_decay": 0.0}]
    explicit = torch.optim.AdamW(groups, lr=0.05)
    for _ in range(10):
        for chosen, matrix, vector in (
            (optimizer, weight, bias),
            (explicit, before + reference[0] @ reference[1], reference[2]),
        ):
            (inputs @ matrix.T + vector - wanted).square().mean().backward()
            chosen.step()
            chosen.zero_grad()
    torch.testing.assert_close(weight.detach(), (before + reference[0] @ reference[1]).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias, reference[2])
    assert torch.linalg.matrix_rank(weight.detach() - before, rtol=1e-4) == RANK


def test_the_change_is_saved_beside_the_whole_drafter_and_is_a_drafter_by_itself(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    base = run_train("base")
    before = weights(base.drafter_dir)
    run = low_rank_run(run_train, base, steps=10)
    after, alone = weights(run.drafter_dir), weights(resolve_drafter(run.drafter_dir / "low_rank"))
    assert all(torch.equal(alone[name], tensor) for name, tensor in after.items())
    modes = {path.stat().st_mode for path in run.drafter_dir.rglob("*.*") if path.is_file()}
    assert len(modes) == 1, "who can read the configuration can read the weights"
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(base.drafter_dir).items()), "the base stays"
    for name, tensor in after.items():
        assert not torch.equal(tensor, before[name]), name
        if tensor.ndim == 2 and RANK * sum(tensor.shape) < tensor.numel():
            assert torch.linalg.matrix_rank(tensor - before[name], rtol=1e-3) <= RANK


def test_a_resumed_training_ends_with_the_same_bits(run_train: RunTrain) -> None:
    base = run_train("base")
    unbroken = low_rank_run(run_train, base, keep_checkpoints=9)
    resumed = Run(unbroken.train_dir.parents[1] / "resumed/train", unbroken.train_dir.parents[1] / "resumed/drafter")
    shutil.copytree(unbroken.train_dir, resumed.train_dir)
    (resumed.train_dir / "summary.json").unlink()
    for step in range(4, TRAIN["steps"] + 1):
        shutil.rmtree(resumed.train_dir / f"checkpoints/step-{step:08}")
    low_rank_run(run_train, base, "resumed", keep_checkpoints=9)
    ours, theirs = weights(resumed.drafter_dir), weights(unbroken.drafter_dir)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_change_that_was_deleted_is_written_again(run_train: RunTrain) -> None:
    base = run_train("base")
    run = low_rank_run(run_train, base)
    before = weights(run.drafter_dir / "low_rank")
    shutil.rmtree(run.drafter_dir / "low_rank")
    low_rank_run(run_train, base)
    after = weights(run.drafter_dir / "low_rank")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_share_of_the_change_is_saved_and_another_one_needs_no_training(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    base = run_train("base")
    before, start = weights(base.drafter_dir), {"start_from": str(base.drafter_dir)}
    run = run_train("whole", replace_drafter=start, steps=10)
    after = weights(run.drafter_dir)
    for share in (0.25, 1.0):
        with monkeypatch.context() as patch:
            patch.setattr("outrider.train.loop._accumulate_gradients", None)  # nothing is trained again
            run_train("whole", replace_drafter=start, steps=10, change_share=share)
        for name, tensor in weights(run.drafter_dir).items():
            torch.testing.assert_close(tensor, before[name] + share * (after[name] - before[name]))
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(run.drafter_dir).items())
    shutil.rmtree(run.train_dir / "checkpoints")
    with pytest.raises(ValueError, match=r"train\.change_share is another than in .*holds no checkpoint to write the drafter"):
        run_train("whole", replace_drafter=start, steps=10, change_share=0.5)
    low, half = low_rank_run(run_train, base, steps=10), low_rank_run(run_train, base, "half", steps=10, change_share=0.5)
    alone = weights(resolve_drafter(half.drafter_dir / "low_rank"))
    for name, tensor in weights(low.drafter_dir).items():
        change, halved = tensor - before[name], alone[name] - before[name]
        torch.testing.assert_close(halved, change / 2, rtol=0.02, atol=float(change.abs().max()) / 100)  # bfloat16


def test_a_launch_that_splits_the_state_is_refused() -> None:
    config = TrainConfig(steps=1, lora_rank=2)
    for_launch(replace(config, lora_rank=None), {"num_processes": 1, "sharding": "fsdp"}, tensor_parallel=False)
    for_launch(config, {"num_processes": 1}, tensor_parallel=False)
    with pytest.raises(ValueError, match=r"train\.lora_rank is set, and the launch splits the training's state by fsdp"):
        for_launch(config, {"num_processes": 1, "sharding": "fsdp"}, tensor_parallel=False)
