"""Training with DDP or FSDP2 in two launched processes on a CPU, against one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from outrider.data.shards import label_store
from outrider.data.types import UNKNOWN, DistilledExample
from outrider.models.drafters import DRAFTERS as REGISTERED
from outrider.models.drafters import build_drafter, parse_drafter, save_drafter
from outrider.models.llm.hf_target import HFTarget

from .conftest import Run, write_shards
from .launching import CONFIG, DRAFTERS, IN_ONE_PROCESS, STEPS, launch, numbers, weights

LOW_RANK = {"lora_rank": 2}
KINDS = {
    "redrafter": "redrafter",
    # its recurrence gets no gradient, an error for DDP without the option
    "one depth": "redrafter",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "draft model": "draft model",
    "block": "block",
    "few labels": "redrafter",  # in many steps one process has none
    "sliced eagle": "eagle",  # starts from the weights of a sliced layer
    "fsdp medusa": "medusa",
    "fsdp eagle3": "eagle3",
}
DRAFTERS = {
    **DRAFTERS,
    "mtp": {"kind": "mtp", "init": "random"},
    "draft model": {"kind": "draft_model", "num_layers": 1, "init": "target_layers"},
    "block": {"kind": "block", "feature_layers": [0, 1], "block": 3},
}


def test_every_registered_kind_is_trained_by_ddp() -> None:
    """All runs but `one depth` have find_unused_parameters=false, which another test checks."""
    by_ddp = {DRAFTERS[kind]["kind"] for name, kind in KINDS.items() if not name.startswith(("sliced", "fsdp"))}
    assert by_ddp == REGISTERED.keys()


@pytest.fixture(scope="module")
def short_shards_dir(target: HFTarget, examples: list[DistilledExample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write labels of only two tokens, so that one depth is trained."""
    cut = [replace(example, continuations=example.continuations[:, :2].clone()) for example in examples]
    directory = write_shards(tmp_path_factory.mktemp("short"), target.identity, cut)
    label_store(directory).save(replace(label_store(directory).load(), horizon=2))
    return directory


@pytest.fixture(scope="module")
def sparse_shards_dir(target: HFTarget, examples: list[DistilledExample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shards in which three of four texts have no label."""
    sparse = [
        example if index % 4 == 0 else replace(example, continuations=torch.full_like(example.continuations, UNKNOWN))
        for index, example in enumerate(examples)
    ]
    return write_shards(tmp_path_factory.mktemp("sparse"), target.identity, sparse)


@pytest.fixture(scope="module")
def special_shards(short_shards_dir: Path, sparse_shards_dir: Path) -> dict[str, Path]:
    """Map training runs to their special shards."""
    return {"one depth": short_shards_dir, "few labels": sparse_shards_dir}


@pytest.fixture(scope="module")
def base_dir(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the drafter that a low-rank change starts from."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    save_drafter(build_drafter(parse_drafter(DRAFTERS["redrafter"]), target), folder, target.identity)
    return folder


@pytest.fixture(scope="module")
def launched(
    tiny_target_dir: Path, shards_dir: Path, special_shards: dict[str, Path], base_dir: Path, once_per_run: Callable[..., Path]
) -> Path:
    """Run all training runs in one launch of two processes, each in its folder.

    Starting the processes takes most of the time.
    """
    # The runs with FSDP2 come last: all runs after the first of them use it.
    runs = sorted(KINDS.items(), key=lambda run: run[0].startswith("fsdp"))
    trainings: dict[str, Any] = {
        name: {
            "config": CONFIG,
            "drafter": DRAFTERS[kind],
            "fsdp": name.startswith("fsdp"),
        }
        for name, kind in runs
    }
    for name in trainings:
        trainings[name]["tensor_parallel"] = name.startswith("sliced")
        if name in special_shards:
            trainings[name]["shards"] = str(special_shards[name])
    low_rank = {"config": {**CONFIG, **LOW_RANK}, "drafter": {"start_from": str(base_dir)}, "fsdp": False}
    trainings = {"low rank": {**low_rank, "tensor_parallel": False}, **trainings}
    trainings["fsdp resumed"] = {**trainings["fsdp medusa"], "from": "fsdp medusa", "at": 2}
    arguments = ["--config_file", "conf/launch/cpu.yaml"]
    return once_per_run("processes", lambda output: launch(arguments, tiny_target_dir, shards_dir, output, trainings))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_two_processes_train_like_one_on_the_same_texts_per_step(name, launched, shards_dir, special_shards, run_train):
    run = run_train(
        shards=special_shards.get(name, shards_dir), replace_drafter=DRAFTERS[KINDS[name]], **{**CONFIG, **IN_ONE_PROCESS}
    )
    one, two = run.train_dir.parent, launched / name
    pairs = list(zip(numbers(two), numbers(one), strict=True))
    assert len(pairs) == STEPS + 1
    for of_two, of_one in pairs:
        assert of_two == pytest.approx(of_one, rel=1e-4)
    ours, theirs = weights(two), weights(one)
    assert len(ours) >= 4
    assert ours.keys() == theirs.keys()
    # Adam scales rounding errors of gradients near zero (EAGLE's first ones) up to whole steps.
    for key in ours if KINDS[name] in ("redrafter", "medusa") else ():
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_train_the_same_low_rank_change_as_one(
    launched: Path, base_dir: Path, run_train: Callable[..., Run]
) -> None:
    run = run_train(replace_drafter={"start_from": str(base_dir)}, **{**CONFIG, **IN_ONE_PROCESS, **LOW_RANK})
    ours, theirs = weights(run.train_dir.parent), weights(launched / "low rank")
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-4)
    assert (launched / "low rank/drafter/low_rank/model.safetensors").is_file()


@pytest.mark.parametrize(("name", "expected"), [("one depth", True), ("redrafter", False), ("eagle3", False)])
def test_ddp_looks_for_unused_parameters_only_if_there_are_some(
    name: str,
    expected: bool,
    shards_dir: Path,
    special_shards: dict[str, Path],
    run_train: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise DDP would traverse the whole graph in every step."""
    handlers: list[Any] = []
    original = Accelerator.prepare

    def prepare(self: Accelerator, *args: Any) -> Any:
        handlers.append(self.ddp_handler)
        return original(self, *args)

    monkeypatch.setattr(Accelerator, "prepare", prepare)
    run_train(shards=special_shards.get(name, shards_dir), replace_drafter=DRAFTERS[KINDS[name]], steps=1)
    (handler,) = handlers
    assert handler.find_unused_parameters == expected
    assert handler.gradient_as_bucket_view


@pytest.mark.slow
def test_a_resumed_run_with_fsdp_ends_with_the_bits_of_an_unbroken_one(launched: Path) -> None:
    resumed, unbroken = launched / "fsdp resumed", launched / "fsdp medusa"
    assert len(numbers(resumed)) == STEPS - 2 + 1
    assert numbers(resumed) == numbers(unbroken)[2:]
    ours, theirs = weights(resumed), weights(unbroken)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
