"""DeepSpeed's ZeRO in two launched processes on a CPU, against one process without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Run
from .launching import CONFIG, DRAFTERS, IN_ONE_PROCESS, STEPS, launch, numbers, weights

pytestmark = pytest.mark.slow

pytest.importorskip("deepspeed")  # pip install 'outrider[deepspeed]'

TRAININGS = [("zero1", "redrafter"), ("zero2", "redrafter"), *(("zero3", kind) for kind in DRAFTERS)]
TOLERANCE = 1e-4
"""Relative difference of float32 losses: sums over two processes have other rounding errors, and
Adam's steps carry these on."""


@pytest.fixture(scope="module")
def launched(tiny_target_dir: Path, shards_dir: Path, once_per_run: Callable[..., Path]) -> Path:
    """Run all training runs with DeepSpeed in one launch of two processes, each in its folder."""
    trainings: dict[str, Any] = {
        f"{zero}-{kind}": {"zero_stage": int(zero[-1]), "config": CONFIG, "drafter": DRAFTERS[kind]} for zero, kind in TRAININGS
    }
    for zero in ("zero3", "zero2"):
        trainings[f"{zero}-resumed"] = {**trainings[f"{zero}-redrafter"], "from": f"{zero}-redrafter", "at": 2}
        trainings[f"{zero}-bf16"] = {**trainings[f"{zero}-redrafter"], "mixed_precision": "bf16"}
    file = ["--config_file", "conf/launch/one_node_zero.yaml"]
    # The target is loaded with ZeRO-3, under which transformers would partition it.
    options = ["--zero_stage", "3", "--num_processes", "2", "--mixed_precision", "no"]
    arguments = [*file, *options]
    return once_per_run("deepspeed", lambda output: launch(arguments, tiny_target_dir, shards_dir, output, trainings))


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Run]:
    """Finished training runs by kind."""
    return {}


@pytest.fixture
def in_one_process(run_train: Callable[..., Run], of_one_process: dict[str, Run]) -> Callable[[str], Path]:
    """Return a function that trains a kind once, in one process with equal texts per step."""

    def train(kind: str) -> Path:
        if kind not in of_one_process:
            of_one_process[kind] = run_train(kind, replace_drafter=DRAFTERS[kind], **{**CONFIG, **IN_ONE_PROCESS})
        return of_one_process[kind].train_dir.parent

    return train


@pytest.mark.parametrize(("zero", "kind"), TRAININGS)
def test_two_processes_with_zero_train_like_one_process_without(zero, kind, launched, in_one_process):
    one, two = in_one_process(kind), launched / f"{zero}-{kind}"
    pairs = list(zip(numbers(two), numbers(one), strict=True))
    assert len(pairs) == STEPS + 1
    for of_two, of_one in pairs:
        assert of_two == pytest.approx(of_one, rel=TOLERANCE)
    assert max(of_one.get("grad_norm", 0) for _, of_one in pairs) > 2 * CONFIG["max_grad_norm"], "nothing was clipped"
    ours, theirs = weights(two), weights(one)
    assert len(ours) >= 4
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in theirs.items()}
    for name in ours:
        assert ours[name].shape == theirs[name].shape
        # Adam scales rounding errors of gradients near zero (EAGLE's first ones) up to whole steps.
        if kind in ("redrafter", "medusa"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=TOLERANCE, atol=1e-5)


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_a_resumed_run_with_zero_ends_with_the_bits_of_an_unbroken_one(zero: str, launched: Path) -> None:
    resumed, unbroken = launched / f"{zero}-resumed", launched / f"{zero}-redrafter"
    assert len(numbers(resumed)) == STEPS - 2 + 1
    assert numbers(resumed) == numbers(unbroken)[2:]
    ours, theirs = weights(resumed), weights(unbroken)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_zero_in_16_bits_keeps_and_saves_weights_in_32(zero: str, launched: Path) -> None:
    of_bf16, of_float32 = numbers(launched / f"{zero}-bf16"), numbers(launched / f"{zero}-redrafter")
    assert [line.get("loss") for line in of_bf16[:-1]] == pytest.approx(
        [line.get("loss") for line in of_float32[:-1]], rel=0.02
    )
    assert of_bf16 != of_float32
    saved = weights(launched / f"{zero}-bf16")
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values()), "rounded to 16 bits"
