"""Two processes on a CPU that share a training by DDP or FSDP2, launched as a user launches them, against one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.manifest import load_manifest, save_manifest
from outrider.data.types import DistilledExample
from outrider.models.hf_target import HFTarget

from .conftest import Run, write_shards
from .launching import CONFIG, DRAFTERS, IN_ONE_PROCESS, STEPS, launch, numbers, weights

KINDS = {
    "redrafter": "redrafter",
    "one depth": "redrafter",  # its recurrence gets no gradient, which DDP refuses unless it is told
    "medusa": "medusa",
    "eagle": "eagle",
    "sliced redrafter": "redrafter",
    "sliced eagle": "eagle",  # begins with the weights of a layer that is in slices
    "fsdp medusa": "medusa",
    "fsdp eagle3": "eagle3",
}


@pytest.fixture(scope="module")
def short_shards_dir(target: HFTarget, examples: list[DistilledExample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels of two tokens, so that a single one is drafted."""
    cut = [replace(example, continuations=example.continuations[:, :2].clone()) for example in examples]
    directory = write_shards(tmp_path_factory.mktemp("short"), target.identity, cut)
    save_manifest(directory, replace(load_manifest(directory), horizon=2))
    return directory


@pytest.fixture(scope="module")
def launched(tiny_target_dir: Path, shards_dir: Path, short_shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainings of two processes, in a folder each."""
    output = tmp_path_factory.mktemp("processes")
    trainings: dict[str, Any] = {
        name: {"config": CONFIG, "drafter": DRAFTERS[kind], "fsdp": name.startswith("fsdp")} for name, kind in KINDS.items()
    }
    for name in trainings:
        trainings[name]["tensor_parallel"] = name.startswith("sliced")
    trainings["one depth"]["shards"] = str(short_shards_dir)
    trainings["fsdp resumed"] = {**trainings["fsdp medusa"], "from": "fsdp medusa", "at": 2}
    launch(["--config_file", "conf/launch/cpu.yaml"], tiny_target_dir, shards_dir, output, trainings)
    return output


@pytest.mark.parametrize("name", KINDS)
def test_two_processes_learn_what_one_does_of_the_same_texts_per_step(
    name: str, launched: Path, shards_dir: Path, short_shards_dir: Path, run_train: Callable[..., Run]
) -> None:
    shards = short_shards_dir if name == "one depth" else shards_dir
    run = run_train(shards=shards, replace_drafter=DRAFTERS[KINDS[name]], **{**CONFIG, **IN_ONE_PROCESS})
    one, two = run.train_dir.parent, launched / name
    pairs = list(zip(numbers(two), numbers(one), strict=True))
    assert len(pairs) == STEPS + 1
    for of_two, of_one in pairs:
        assert of_two == pytest.approx(of_one, rel=1e-4)
    ours, theirs = weights(two), weights(one)
    assert len(ours) >= 4
    assert ours.keys() == theirs.keys()
    # Where a gradient begins at zero (EAGLE's), Adam scales its rounding up to whole steps.
    for key in ours if KINDS[name] in ("redrafter", "medusa") else ():
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_with_fsdp_ends_with_the_bits_of_an_unbroken_one(launched: Path) -> None:
    resumed, unbroken = launched / "fsdp resumed", launched / "fsdp medusa"
    assert len(numbers(resumed)) == STEPS - 2 + 1
    assert numbers(resumed) == numbers(unbroken)[2:]
    ours, theirs = weights(resumed), weights(unbroken)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
