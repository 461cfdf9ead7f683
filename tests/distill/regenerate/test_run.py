"""The regeneration stage: exact answers, resuming, and no mixing of two runs."""

import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tqdm import tqdm

from outrider.cli.data import VerifyOptions, verify_command
from outrider.data.chat import ChatTemplate
from outrider.data.config import DataConfig
from outrider.data.files import read_json
from outrider.data.manifest import examples_sha256
from outrider.data.sources import load_conversations
from outrider.data.types import Example
from outrider.distill.config import DistillConfig
from outrider.distill.label.run import GREEDY_AGREEMENT, SUSPICIOUS_AGREEMENT, distill
from outrider.distill.regenerate import run as module
from outrider.distill.regenerate.answers import answer_store, read_answers
from outrider.distill.regenerate.dialogues import Dialogue
from outrider.distill.regenerate.engine import Answer, Limits, Request
from outrider.distill.regenerate.run import answer_conversations, answer_limits, regenerate
from outrider.models.llm import linears
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

from ..label.test_run import contents, results_of_two

CONFIG = DistillConfig(engine="decoder", shard_examples=3, temperature=1.0, max_new_tokens=24, decode_batch_size=2, horizon=3)
BY_LENGTH = replace(CONFIG, engine="batch", decode_batch_size=None, kv_budget_gib=2e-4)
STOPS = [3, *range(20, 30)]
"""Stop tokens of the target; a random model rarely generates a single one."""


def load(directory: Path) -> HFTarget:
    target = load_target(TargetConfig(name_or_path=str(directory), device="cpu"))
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = STOPS
    return target


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load(tiny_target_dir)


def write_conversations(path: Path, count: int) -> DataConfig:
    """Write `count` conversations of one to three answers."""
    rng = random.Random(0)
    records = []
    for index in range(count):
        messages = []
        for _ in range(rng.randint(1, 3)):
            question = " ".join(str(rng.randrange(100)) for _ in range(rng.randint(1, 6)))
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "an old answer"}]
        records.append({"id": f"chat-{index}", "messages": messages})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source="messages", path=str(path), max_length=120)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return write_conversations(tmp_path / "chats.jsonl", 8)


def run(config: DistillConfig, data: DataConfig, target: HFTarget, output_dir: Path) -> list[Example]:
    return regenerate(config, data, target, output_dir, Accelerator(cpu=True))


@contextmanager
def no_engine(*args: Any) -> Iterator[Any]:
    pytest.fail("answered again")
    yield


def test_greedy_answers_are_transformers_after_the_tokens_before_them(target, data, tmp_path):
    config = DistillConfig(engine="decoder", shard_examples=3, max_new_tokens=12, decode_batch_size=3)
    examples = run(config, data, target, tmp_path / "answers")
    shards = answer_store(tmp_path / "answers").load().shards
    answered = [example for entry in shards for example in read_answers(tmp_path / "answers", entry)]
    visited = 0
    for example, facts in zip(examples, answered, strict=True):
        assert example.id == facts.id
        mask = torch.zeros(len(example.input_ids), dtype=torch.bool)
        for span in facts.answers:
            prompt = example.input_ids[None, : span.start]
            output = target.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=STOPS,
                pad_token_id=0,
            )[0, span.start :].tolist()
            assert example.input_ids[span.start : span.start + span.num_tokens].tolist() == output
            assert span.cut == (output[-1] not in STOPS)
            mask[span.start : span.start + span.num_tokens] = True
            visited += 1
        assert torch.equal(example.loss_mask, mask)
    assert visited > 6


def test_statistics_account_for_every_turn(target: HFTarget, data: DataConfig, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        examples = run(CONFIG, data, target, tmp_path / "answers")
    statistics = read_json(tmp_path / "answers" / "stats.json")
    conversations, _ = load_conversations(data)
    assert statistics["num_turns"] == sum(len(conversation.turns) // 2 for conversation in conversations)
    assert statistics["num_turns"] == statistics["num_answers"] + sum(statistics["dropped_turns"].values())
    assert statistics["dropped_turns"]["after a cut answer"] > 0
    assert statistics["num_examples"] == len(examples) == len({example.id for example in examples}) > 8
    assert {example.id.rsplit("#", 1)[0] for example in examples} <= {f"chat-{index}" for index in range(8)}
    assert statistics["num_tokens"] == sum(int(example.loss_mask.sum()) for example in examples)
    assert statistics["cut_share"] == pytest.approx(statistics["num_cut"] / statistics["num_answers"])
    assert 0 < statistics["num_cut"] < statistics["num_answers"]
    assert statistics["tokens_per_process_second"] > 0
    assert f"regenerated {statistics['num_answers']} answers of 8 conversations" in caplog.text
    assert "old answer" not in target.tokenizer.decode(torch.cat([example.input_ids for example in examples]))


def test_answers_do_not_depend_on_the_other_conversations(target: HFTarget, data: DataConfig, tmp_path: Path) -> None:
    whole = {example.id: example for example in run(CONFIG, data, target, tmp_path / "whole")}
    lines = Path(str(data.path)).read_text().splitlines()[::-2]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    some = DataConfig(source="messages", path=str(tmp_path / "some.jsonl"), max_length=120)
    visited = 0
    for example in run(CONFIG, some, target, tmp_path / "some"):
        assert torch.equal(example.input_ids, whole[example.id].input_ids)
        visited += 1
    assert 4 <= visited < len(whole)


def test_labelling_uses_the_regenerated_answers(target: HFTarget, data: DataConfig, tmp_path: Path) -> None:
    config = DistillConfig(engine="decoder", shard_examples=4, max_new_tokens=12, horizon=3)
    examples = run(config, data, target, tmp_path / "answers")
    folder, accelerator = tmp_path / "distill", Accelerator(cpu=True)
    manifest = distill(config, data, target, folder, accelerator, examples=examples)
    assert manifest.data_sha256 == examples_sha256(examples)
    assert [id for shard in manifest.shards for id in shard.ids] == [example.id for example in examples]
    statistics = read_json(folder / "stats.json")
    assert statistics["num_positions"] == sum(int(example.loss_mask.sum()) for example in examples)
    assert statistics["agreement"] == 1.0
    with pytest.raises(ValueError, match="the conversations .or the target.s answers to them. changed"):
        distill(config, data, target, folder, accelerator)


def test_answers_of_another_model_are_a_warning_during_labelling(target, data, tmp_path, caplog):
    warm = DistillConfig(engine="decoder", shard_examples=9, horizon=3, temperature=0.2, max_new_tokens=12)
    sampled = run(warm, data, target, tmp_path / "answers")
    for config, is_warned in ((warm, False), (DistillConfig(engine="decoder", shard_examples=9, horizon=3), True)):
        caplog.clear()
        folder = tmp_path / f"distill-{is_warned}"
        with caplog.at_level(logging.WARNING, logger="outrider"):
            distill(config, data, target, folder, Accelerator(cpu=True), examples=sampled)
        agreement = read_json(folder / "stats.json")["agreement"]
        assert SUSPICIOUS_AGREEMENT < agreement < GREEDY_AGREEMENT
        assert ("in another precision" in caplog.text) == is_warned


def test_an_example_leaves_room_for_its_labels_in_the_context_window(target: HFTarget) -> None:
    data = DataConfig(source="text", path="texts", max_length=5000)
    limits = answer_limits(DistillConfig(horizon=5), data, target)
    assert limits.max_tokens == target.context_length - 3
    data.max_length = 99
    assert answer_limits(DistillConfig(horizon=5), data, target).max_tokens == 99
    assert [limits.room(count) for count in (1, 900, limits.max_tokens)] == [1021 - 1, 121, 0]


def test_a_complete_folder_is_not_changed(target, data, tmp_path, monkeypatch):
    folder = tmp_path / "answers"
    first = examples_sha256(run(CONFIG, data, target, folder))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr(module, "open_engine", no_engine)
    assert examples_sha256(run(CONFIG, data, target, folder)) == first
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_the_batch_engine_gives_the_decoders_examples_and_equal_bytes(target, data, tmp_path):
    examples = run(BY_LENGTH, data, target, tmp_path / "batch")
    assert examples_sha256(examples) == examples_sha256(run(CONFIG, data, target, tmp_path / "decoder"))
    before = contents(tmp_path / "batch")
    for path in (tmp_path / "batch").glob("*00001*"):
        path.unlink()
    run(BY_LENGTH, data, target, tmp_path / "batch")
    assert contents(tmp_path / "batch") == before


def test_only_a_deleted_shard_of_answers_is_recomputed(target, data, tmp_path, monkeypatch):
    """A resumed run computes linear layers as before, though another way would be faster now."""
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(linears, "timed", lambda *_: linears.Times((9, 9, 9), (1, 1, 1), (9, 9, 9)))
    folder = tmp_path / "answers"
    run(CONFIG, data, target, folder)
    assert "columns first" in read_json(folder / "manifest.json")["linears"].values()
    assert all(parameter.is_contiguous() for parameter in target.model.parameters()), "labels are computed as always"
    monkeypatch.setattr(linears, "timed", lambda *_: linears.Times((1, 1, 1), (9, 9, 9), (9, 9, 9)))
    before = contents(folder)
    (folder / "answers-00001.jsonl").unlink()
    with pytest.raises(ValueError, match=r"answers-00001\.jsonl is missing. Delete .*answers-00001\.json"):
        run(CONFIG, data, target, folder)
    (folder / "answers-00001.json").unlink()
    (folder / "answers-00000.stats.json").unlink()
    (folder / "answers-00002.stats.json").write_text("{")
    written = []
    write = module.write_answers
    monkeypatch.setattr(module, "write_answers", lambda *args: written.append(args[1]) or write(*args))
    run(CONFIG, data, target, folder)
    assert written == [1]
    assert contents(folder) == before
    (folder / "answers-00001.json").unlink()
    target.fast_linears = False
    with pytest.raises(ValueError, match="another run: linears"):
        run(CONFIG, data, target, folder)


def test_answers_are_verified_as_labels_are(target, data, tmp_path, capsys):
    folder = tmp_path / "answers"
    run(CONFIG, data, target, folder)
    name = target.identity.name if Path(target.identity.name).exists() else None
    verify_command(VerifyOptions(directory=folder, target=name))
    assert "shards are whole" in capsys.readouterr().out
    path = folder / "answers-00001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(SystemExit, match="1"):
        verify_command(VerifyOptions(directory=folder))
    assert "answers-00001.jsonl was truncated or altered" in capsys.readouterr().err


def test_a_folder_of_another_run_is_an_error_with_every_difference(target, data, tmp_path, tiny_target_dir):
    folder = tmp_path / "answers"
    run(CONFIG, data, target, folder)
    other = load(tiny_target_dir)
    other.identity = replace(target.identity, name="other", weights_sha256="0" * 64, tokenizer_sha256="1" * 64)
    other.tokenizer.chat_template += " "
    other_config = DistillConfig(engine="decoder", shard_examples=3, temperature=0.5, top_k=9, max_new_tokens=25, seed=1)
    other_data = write_conversations(tmp_path / "more.jsonl", 9)
    other_data.max_length = 110
    with pytest.raises(ValueError, match="another run") as error:
        run(other_config, other_data, other, folder)
    for field in (
        "target.name_or_path (was",
        "the target has other weights",
        "the target has another tokenizer",
        "the chat template changed (data.chat_template",
        "max_tokens (was 120, is 110)",
        "data.path (was",
        "sampling.temperature (was 1.0, is 0.5)",
        "sampling.top_k (was None, is 9)",
        "sampling.max_new_tokens (was 24, is 25)",
        "sampling.seed (was 0, is 1)",
    ):
        assert field in str(error.value)
    with pytest.raises(ValueError, match=r"distill\.shard_examples"):
        run(DistillConfig(engine="decoder", shard_examples=4, temperature=1.0, max_new_tokens=24), data, target, folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        run(CONFIG, data, target, folder)


def test_a_tokenizer_without_a_chat_template_is_an_error_with_the_remedy(target, data, tmp_path):
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"set data\.chat_template"):
        run(CONFIG, data, target, tmp_path / "answers")
    assert not (tmp_path / "answers").exists()


class Forgetful:
    """Engine that answers only every second request."""

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        for request in requests[::2]:
            yield Answer(id=request.id, tokens=torch.tensor([40, 3]), cut=False)


class Mute:
    """Engine that generates only the stop token."""

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        for request in requests:
            yield Answer(id=request.id, tokens=torch.tensor([3]), cut=False)


def test_a_request_without_an_answer_is_an_error(target: HFTarget, data: DataConfig) -> None:
    conversations, _ = load_conversations(data)
    limits, template = Limits(max_new_tokens=9, max_tokens=99), ChatTemplate(target.tokenizer)
    with tqdm(disable=True) as progress, pytest.raises(RuntimeError, match="Forgetful left 4 requests unanswered"):
        answer_conversations(
            [
                Dialogue(one, target.tokenizer, template=template, limits=limits, stop_ids=STOPS, seed=0)
                for one in conversations
            ],
            Forgetful(),
            progress,
        )


def test_a_run_with_only_empty_answers_is_an_error_with_the_reasons(target, data, tmp_path, monkeypatch):
    @contextmanager
    def open_mute(*args: Any) -> Iterator[Mute]:
        yield Mute()

    monkeypatch.setattr(module, "open_engine", open_mute)
    with pytest.raises(ValueError, match="answers to 8 conversations can be used.*empty answer"):
        run(CONFIG, data, target, tmp_path / "answers")


def test_several_processes_write_the_same_bytes_as_one(data, target, tiny_target_dir, tmp_path):
    targets = [load(tiny_target_dir) for _ in range(2)]
    examples = results_of_two(lambda one: regenerate(CONFIG, data, targets[one.process_index], tmp_path / "two", one))
    one = examples_sha256(run(CONFIG, data, target, tmp_path / "one"))
    assert [examples_sha256(examples[rank]) for rank in range(2)] == [one, one]
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
