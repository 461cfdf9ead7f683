"""Validation in training: tokens per step of decoding held-out prompts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.data.shards import label_store
from outrider.data.types import UNKNOWN, DistilledExample
from outrider.models.decoding import GreedyAcceptance, generate
from outrider.models.drafters import NullDrafter, build_drafter, load_drafter, parse_drafter
from outrider.models.drafters.objective import Objective
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target
from outrider.train.batches import BatchStream
from outrider.train.config import TrainConfig, for_launch
from outrider.train.records import read_records
from outrider.train.run import train
from outrider.train.validation import HeldOut, Validator, hold_out

from .conftest import HORIZON, Run, write_shards

RunTrain = Callable[..., Run]
ROOM = 32


@pytest.fixture
def held_out(shards_dir: Path) -> list[HeldOut]:
    return hold_out(shards_dir, label_store(shards_dir).load(), 5, seed=0, max_prompt_tokens=ROOM)


@pytest.fixture
def validator(held_out: list[HeldOut], target: HFTarget, accelerator: Accelerator) -> Validator:
    return Validator(
        held_out,
        target=target,
        objective=Objective(),
        horizon=HORIZON,
        max_new_tokens=12,
        batch_size=2,
        accelerator=accelerator,
    )


def test_held_out_texts_are_in_no_batch_and_all_others_are(shards_dir: Path, held_out: list[HeldOut]) -> None:
    manifest = label_store(shards_dir).load()
    locations = [text.location for text in held_out]
    assert len(set(locations)) == 5
    assert len({shard for shard, _ in locations}) >= 3, "not all of one shard"
    assert {len(text.prompt) for text in held_out} == {4}, "the texts of the fixture answer from token 4 on"
    ids = {manifest.shards[shard].ids[row] for shard, row in locations}
    stream = BatchStream(shards_dir, manifest, TrainConfig(steps=1, batch_size=17), rank=0, num_processes=1, held_out=locations)
    for epoch in range(3):
        assert set(stream.ids(epoch)) == {f"text-{index}" for index in range(22)} - ids


def test_what_is_held_out_depends_on_the_seed_alone(shards_dir: Path, held_out: list[HeldOut]) -> None:
    manifest = label_store(shards_dir).load()
    again = hold_out(shards_dir, manifest, 5, seed=0, max_prompt_tokens=ROOM)
    assert [text.location for text in again] == [text.location for text in held_out]
    other = hold_out(shards_dir, manifest, 5, seed=1, max_prompt_tokens=ROOM)
    assert [text.location for text in other] != [text.location for text in held_out]


def test_a_short_shard_is_filled_up_from_the_others(target: HFTarget, examples: list[DistilledExample], tmp_path: Path) -> None:
    shards = write_shards(tmp_path, target.identity, examples, per_shard=7)  # 7, 7, 7, and 1
    manifest = label_store(shards).load()
    drawn = hold_out(shards, manifest, 20, seed=0, max_prompt_tokens=ROOM)
    assert len({text.location for text in drawn}) == 20


def test_fewer_texts_than_processes_are_an_error_before_any_work() -> None:
    four = TrainConfig(steps=1, validation_texts=4)
    for texts in (0, 5):
        for_launch(replace(four, validation_texts=texts), {"num_processes": 5}, tensor_parallel=False)
    for_launch(four, {"num_processes": 5}, tensor_parallel=True)
    with pytest.raises(ValueError, match=r"train\.validation_texts is 4, fewer than the 5 processes"):
        for_launch(four, {"num_processes": 5}, tensor_parallel=False)


def test_tokens_per_step_equal_those_of_decoding_each_prompt_alone(validator, held_out, target):
    drafter = build_drafter(parse_drafter({"kind": "redrafter", "exit_width": 32, "head_init": "target"}), target)
    measured = validator(drafter)
    assert target._cache is None, "its memory is given back"
    num_tokens = num_steps = 0
    for text in held_out:
        prompt = text.prompt[None]
        first, *steps = generate(target, drafter, GreedyAcceptance(), prompt, max_new_tokens=12, stop_ids=target.stop_ids)
        assert first.is_prefill
        num_tokens += sum(len(step.tokens[0]) for step in steps)
        num_steps += len(steps)
    assert measured["validation_tokens_per_step"] == num_tokens / num_steps > 1
    assert drafter.training, "a drafter comes back in the mode it was in"


def test_labels_are_the_targets_own_answers(validator: Validator, held_out: list[HeldOut], target: HFTarget) -> None:
    validator(build_drafter(parse_drafter({"kind": "redrafter", "exit_width": 16}), target))
    batch = validator._batch(range(5))
    assert int(batch.positions.sum()) > 20
    for row, text in enumerate(held_out):
        steps = generate(
            target, NullDrafter(), GreedyAcceptance(), text.prompt[None], max_new_tokens=12, stop_ids=target.stop_ids
        )
        answer = [token for step in steps for token in step.tokens[0]]
        start = len(text.prompt)
        assert batch.input_ids[row, start : start + len(answer)].tolist() == answer
        for offset in range(len(answer)):
            expected = (answer + [UNKNOWN] * HORIZON)[offset : offset + HORIZON]
            assert batch.continuations[row, start - 1 + offset].tolist() == expected


def test_validation_does_not_change_training(run_train: RunTrain) -> None:
    base = {"validation_texts": 4, "validation_tokens": 8}
    often, once = run_train("often", **base, validate_every=2), run_train("once", **base)
    weights = [load_file(run.drafter_dir / "model.safetensors") for run in (often, once)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    lines = [line for line in read_records(often.train_dir / "metrics.jsonl") if "validation_tokens_per_step" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    summaries = [json.loads((run.train_dir / "summary.json").read_text())["validation"] for run in (often, once)]
    assert summaries[0] == summaries[1]
    assert summaries[0]["validation_tokens_per_step"] >= 1


@pytest.mark.parametrize(
    "options",
    [pytest.param({"kind": "eagle3", "depth": 3}, marks=pytest.mark.slow), {"kind": "draft_model", "num_layers": 1}],
    ids=["eagle3", "draft_model"],
)
def test_drafters_in_float32_decode_with_a_target_in_bfloat16(options, tiny_target_dir, shards_dir, accelerator, tmp_path):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), dtype="bfloat16"), torch.device("cpu"))
    config = TrainConfig(steps=2, batch_size=2, validation_texts=3, validation_tokens=8)
    train(config, parse_drafter(options), target, shards_dir, tmp_path / "train", tmp_path / "drafter", accelerator)
    summary = json.loads((tmp_path / "train/summary.json").read_text())
    assert summary["validation"]["validation_tokens_per_step"] >= 1


def test_medusa_takes_its_tree_from_the_held_out_answers(run_train: RunTrain, target: HFTarget) -> None:
    run = run_train(validation_texts=4, validation_tokens=8, replace_drafter={"kind": "medusa", "num_heads": 3})
    measured = json.loads((run.train_dir / "summary.json").read_text())["validation"]["validation_accuracy_by_depth"]
    accuracies = load_drafter(run.drafter_dir, target).accuracies
    torch.testing.assert_close(accuracies.cumsum(1), torch.tensor(measured))


def test_prompts_fit_a_draft_model_of_a_shorter_context(run_train: RunTrain, tiny_target_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, max_position_embeddings=16)
    model.save_pretrained(tmp_path / "short")
    AutoTokenizer.from_pretrained(tiny_target_dir).save_pretrained(tmp_path / "short")
    drafter = {"kind": "draft_model", "path": str(tmp_path / "short")}
    options = {"validation_texts": 3, "replace_drafter": drafter}
    with pytest.raises(ValueError, match="only 0 have a prompt of at most 3 tokens"):
        run_train("no_room", **options, validation_tokens=13)
    run = run_train("room", **options, validation_tokens=8)
    assert json.loads((run.train_dir / "summary.json").read_text())["validation"]["validation_tokens_per_step"] >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_texts": 22}, "22, and the shards hold 22 texts"),
        ({"validation_texts": 3, "validation_tokens": 10_000}, "is 10000, and target and drafter can read at most 1024 tokens"),
        ({"validation_texts": 3, "validation_tokens": 1_022}, "only 0 have a prompt of at most 2 tokens"),
        ({"validate_every": 2}, "validation_texts is 0"),
    ],
)
def test_impossible_held_out_texts_are_an_error_before_training(run_train, options, words):
    with pytest.raises(ValueError, match=words):
        run_train(**options)
