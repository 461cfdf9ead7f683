"""The labelling stage: it resumes to equal bytes, and never mixes two runs."""

import json
import logging
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from outrider.data.answers import AnswerFinder
from outrider.data.config import DataConfig
from outrider.data.conversations import Conversation, Turn
from outrider.data.examples import encode_conversations
from outrider.data.files import read_json
from outrider.data.manifest import Manifest
from outrider.data.shards import read_shard, verify_shards
from outrider.data.types import UNKNOWN, Example
from outrider.distill.config import DistillConfig
from outrider.distill.label import run as run_module
from outrider.distill.label.run import MAX_CHARACTERS, distill, length_batches, preview
from outrider.models.llm import linears
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

CONFIG = DistillConfig(horizon=4, features="last_hidden", shard_examples=3, batch_tokens=128)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return write_conversations(tmp_path / "chats.jsonl", 8)


def write_conversations(path: Path, count: int) -> DataConfig:
    """Write `count` conversations of different lengths."""
    rng = random.Random(0)
    records = []
    for index in range(count):
        question, answer = (" ".join(str(rng.randrange(100)) for _ in range(rng.randint(2, 20))) for _ in range(2))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append({"id": f"chat-{index}", "messages": messages})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source="messages", path=str(path), max_length=60)


def run(config: DistillConfig, data: DataConfig, target: HFTarget, output_dir: Path) -> Manifest:
    return distill(config, data, target, output_dir, Accelerator(cpu=True))


def contents(directory: Path) -> dict[str, bytes]:
    """Read all files that must be equal in every run: all but statistics of time."""
    paths = sorted(path for path in directory.iterdir() if "stats" not in path.name)
    return {path.name: path.read_bytes() for path in paths}


def test_shards_hold_every_example_in_order_with_labels_for_assistant_turns(target, data, tmp_path):
    manifest = run(CONFIG, data, target, tmp_path / "distill")
    assert manifest.complete
    assert [len(shard.ids) for shard in manifest.shards] == [3, 3, 2]
    verify_shards(tmp_path / "distill", manifest)
    examples = [example for shard in manifest.shards for example in read_shard(tmp_path / "distill", shard)]
    assert [example.example.id for example in examples] == [id for shard in manifest.shards for id in shard.ids]
    assert len(examples) == 8
    num_labels = num_agreeing = 0
    for example in examples:
        input_ids, wanted = example.example.input_ids, example.example.wanted
        labelled = example.continuations[:, 0] != UNKNOWN
        assert torch.equal(labelled, wanted)
        assert example.hidden_states is not None
        assert example.hidden_states.values.dtype == torch.bfloat16
        logits = target.model(input_ids[None]).logits[0]
        assert torch.equal(example.continuations[wanted, 0], logits.argmax(-1)[wanted])
        hidden_states = target.hidden_states(input_ids[None])[0][0]
        torch.testing.assert_close(example.hidden_states.values.float(), hidden_states, atol=0.02, rtol=0.02)
        num_labels += int(wanted.sum())
        num_agreeing += int((example.continuations[:-1, 0] == input_ids[1:])[wanted[:-1]].sum())
    statistics = read_json(tmp_path / "distill" / "stats.json")
    assert statistics["num_positions"] == manifest.num_labels == num_labels > 50
    assert statistics["agreement"] == pytest.approx(num_agreeing / num_labels)
    assert statistics["num_text_tokens"] == manifest.num_tokens
    assert statistics["positions_per_process_second"] > 0


def test_a_complete_folder_is_not_changed(target, data, tmp_path, monkeypatch, caplog):
    first = run(CONFIG, data, target, tmp_path / "distill")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "distill").iterdir()}
    monkeypatch.setattr(run_module, "label_continuations", lambda *args, **kwargs: pytest.fail("labelled again"))
    with caplog.at_level(logging.INFO, logger="outrider"):
        assert run(CONFIG, data, target, tmp_path / "distill") == first
    assert "already complete" in caplog.text
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "distill").iterdir()} == before


def test_only_a_deleted_shard_is_recomputed(target, data, tmp_path, monkeypatch):
    folder = tmp_path / "distill"
    run(CONFIG, data, target, folder)
    before = contents(folder)
    (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing. Delete it and shard-00001\.json"):
        run(CONFIG, data, target, folder)
    (folder / "shard-00001.json").unlink()
    written = []
    write_shard = run_module.write_shard
    monkeypatch.setattr(run_module, "write_shard", lambda *args: written.append(args[1]) or write_shard(*args))
    run(CONFIG, data, target, folder)
    assert written == [1]
    assert contents(folder) == before


def test_a_shard_is_written_while_the_next_one_is_labelled_and_never_two(target, data, tmp_path, monkeypatch):
    events: list[str] = []
    labelled_second = threading.Event()
    write_shard, label_shard = run_module.write_shard, run_module.label_shard

    def slow_write(directory: Path, index: int, *args: Any) -> None:
        assert index or labelled_second.wait(30), "the next shard isn't labelled meanwhile"
        write_shard(directory, index, *args)
        events.append(f"written {index}")

    def label(*args: Any) -> Any:
        result = label_shard(*args)
        events.append("labelled")
        if events == ["labelled"] * 2:
            labelled_second.set()
        return result

    monkeypatch.setattr(run_module, "write_shard", slow_write)
    monkeypatch.setattr(run_module, "label_shard", label)
    manifest = run(CONFIG, data, target, tmp_path / "distill")
    assert events[:3] == ["labelled", "labelled", "written 0"], "at most one shard waits for the disk"
    assert sorted(events[3:]) == ["labelled", "written 1", "written 2"]
    verify_shards(tmp_path / "distill", manifest)


def test_an_error_of_writing_ends_the_run_and_an_error_of_labelling_keeps_the_shard_before(target, data, tmp_path, monkeypatch):
    expected = run(CONFIG, data, target, tmp_path / "whole")
    folder, label_batch = tmp_path / "distill", run_module._label_batch
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_shard", fail_to_write)
        with pytest.raises(OSError, match="no space left"):
            run(CONFIG, data, target, folder)
    assert not list(folder.glob("shard-*[0-9].json"))

    def interrupted(config: DistillConfig, target: HFTarget, examples: list[Example], served: Any) -> Any:
        if any(example.id in expected.shards[1].ids for example in examples):
            raise KeyboardInterrupt
        return label_batch(config, target, examples, served)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_label_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(CONFIG, data, target, folder)
    assert [path.name for path in folder.glob("shard-*[0-9].json")] == ["shard-00000.json"]
    assert run(CONFIG, data, target, folder) == expected
    assert contents(folder) == contents(tmp_path / "whole")


def fail_to_write(*args: Any) -> None:
    raise OSError("no space left")


def test_a_folder_of_another_run_is_an_error_with_every_difference(target, data, tmp_path, tiny_target_dir):
    folder = tmp_path / "distill"
    run(CONFIG, data, target, folder)
    other = load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))
    other.identity = replace(target.identity, name="other", weights_sha256="0" * 64)
    other_config = DistillConfig(horizon=3, features="none", shard_examples=3)
    other_data = write_conversations(tmp_path / "more.jsonl", 9)
    with pytest.raises(ValueError, match="another run") as error:
        run(other_config, other_data, other, folder)
    fields = (
        "target.name_or_path (was",
        "other weights",
        "horizon (was 4, is 3)",
        "features (was 'last_hidden', is 'none')",
        "data.path (was ",
    )
    for field in fields:
        assert field in str(error.value)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        run(CONFIG, data, target, folder)


@pytest.mark.parametrize("branches", [True, False])
def test_texts_beyond_the_context_window_are_refused(branches: bool, target: HFTarget, data: DataConfig, tmp_path: Path):
    """Rotary embeddings would give labels there, without an error."""
    config = replace(CONFIG, branches=branches)
    longest = target.context_length - (CONFIG.horizon - 2 if branches else 0)
    for length in (longest, longest + 1):
        ids = torch.arange(length) % target.vocab_size
        examples = [Example(id="long", input_ids=ids, loss_mask=torch.arange(length) >= length - 4)]
        if length == longest:
            distill(config, data, target, tmp_path, Accelerator(cpu=True), examples=examples)
            continue
        with pytest.raises(ValueError, match="lower data.max_length by at least 1"):
            distill(config, data, target, tmp_path, Accelerator(cpu=True), examples=examples)


def test_length_batches_visit_every_text_once_within_the_budget() -> None:
    assert list(length_batches([2, 5, 4, 1], 8)) == [[1], [2, 0], [3]]
    lengths = [random.Random(0).randint(1, 30) for _ in range(50)] + [99]
    batches = list(length_batches(lengths, 60))
    assert sorted(index for batch in batches for index in batch) == list(range(51))
    assert batches[0] == [50]
    assert all(len(batch) * max(lengths[index] for index in batch) <= 60 for batch in batches[1:])


class ThreadAccelerator(Accelerator):
    """Accelerator of a thread that imitates one of several processes."""

    def __init__(self, process_index: int, barrier: threading.Barrier) -> None:
        self._process_index, self._barrier = process_index, barrier

    process_index = property(lambda self: self._process_index)
    num_processes = property(lambda self: self._barrier.parties)
    is_main_process = property(lambda self: self._process_index == 0)

    def wait_for_everyone(self) -> None:
        self._barrier.wait(timeout=60)


def results_of_two(work: Callable[[Accelerator], Any]) -> dict[int, Any]:
    """Do the work in two threads that imitate processes; return the results by process."""
    barrier, results = threading.Barrier(2), dict[int, Any]()

    def play(accelerator: Accelerator) -> None:
        results[accelerator.process_index] = work(accelerator)

    accelerators = [ThreadAccelerator(rank, barrier) for rank in range(2)]
    threads = [threading.Thread(target=play, args=(one,), name=f"process {one.process_index}") for one in accelerators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_several_processes_write_the_same_bytes_as_one(data, target, tiny_target_dir, tmp_path, monkeypatch):
    """The first of them chooses how all compute linear layers; a resumed run takes its choice."""
    choosers = set[str]()
    monkeypatch.setattr(linears, "MIN_ELEMENTS", 1)
    packed = linears.Times((9, 9, 9), (9, 9, 9), (1, 1, 1))
    monkeypatch.setattr(linears, "timed", lambda *_: choosers.add(threading.current_thread().name) or packed)
    targets = [load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu")) for _ in range(2)]
    manifests = results_of_two(lambda one: distill(CONFIG, data, targets[one.process_index], tmp_path / "two", one))
    assert choosers == {"process 0"}
    assert "packed from 1 rows on" in str(read_json(tmp_path / "two" / "linears.json"))
    one = run(CONFIG, data, target, tmp_path / "one")
    assert manifests == {0: one, 1: one}
    before = contents(tmp_path / "two")
    assert before == contents(tmp_path / "one")
    for path in (tmp_path / "two").glob("*00001*"):
        path.unlink()
    monkeypatch.setattr(linears, "timed", lambda *_: pytest.fail("a resumed run chose how it computes linear layers"))
    run(CONFIG, data, target, tmp_path / "two")
    assert contents(tmp_path / "two") == before
    assert not [module for module in target.model.modules() if "forward" in vars(module)], "training computes as always"
    for damaged in ("[1]", '{"8x8 float32": []}', "{"):
        (tmp_path / "two" / "linears.json").write_text(damaged)
        for path in (tmp_path / "two").glob("*00001*"):
            path.unlink()
        with pytest.raises(ValueError, match=r"linears\.json"):
            run(CONFIG, data, target, tmp_path / "two")


def test_another_configuration_of_the_same_weights_is_another_target(tiny_target_dir, data, tmp_path):
    folder, copy = tmp_path / "distill", tmp_path / "copy"
    shutil.copytree(tiny_target_dir, copy)
    load = partial(TargetConfig, device="cpu")
    run(CONFIG, data, load_target(load(name_or_path=str(tiny_target_dir))), folder)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0", "dtype": "bfloat16"}))
    # This config describes the same model.
    run(CONFIG, data, load_target(load(name_or_path=str(copy), dtype="float32")), folder)
    with pytest.raises(ValueError, match=r"target_dtype \(was 'torch\.float32', is 'torch\.bfloat16'\)"):
        run(CONFIG, data, load_target(load(name_or_path=str(copy), dtype="bfloat16")), folder)
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"the target has another config\.json; target\.name_or_path \(was"):
        run(CONFIG, data, load_target(load(name_or_path=str(copy), dtype="float32")), folder)
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    with pytest.raises(ValueError, match=r"the target has another config\.json; target\.name_or_path \(was"):
        run(CONFIG, data, load_target(load(name_or_path=str(copy), dtype="float32")), folder)


def conversation(*texts: str) -> Conversation:
    turns = tuple(Turn(role="assistant" if index % 2 else "user", content=text) for index, text in enumerate(texts))
    return Conversation(id="a", turns=turns)


def example(tokenizer: PreTrainedTokenizerFast, *texts: str) -> Example:
    return encode_conversations([conversation(*texts)], AnswerFinder(tokenizer, [3]), 1000)[0][0]


def test_the_answer_is_marked_and_white_space_is_visible(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    shown = preview(example(tiny_tokenizer, "Hi\tyou", " one\ntwo"), tiny_tokenizer)
    assert shown == "<|user|>Hi\u2192you<|assistant|>[[ one\u21b5\ntwo<|end|>]]"
    assert "\x1b" not in preview(example(tiny_tokenizer, "\x1b[31mred", "b"), tiny_tokenizer), "it would reach the terminal"


def test_long_parts_and_many_turns_are_shortened(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    shown = preview(example(tiny_tokenizer, *["x" * 300] * 2, *["y", "z"] * 4), tiny_tokenizer)
    assert len(shown) < 4 * MAX_CHARACTERS
    assert shown.endswith("... and 4 more parts")
    shown = preview(example(tiny_tokenizer, "x" * (MAX_CHARACTERS + 22), "b"), tiny_tokenizer)
    assert "x" * (MAX_CHARACTERS + 22) in shown, "a cut would save nothing"


@pytest.mark.parametrize(("max_length", "level"), [(100, "INFO"), (30, "WARNING")])
def test_the_tokens_that_are_cut_off_are_counted(tiny_tokenizer, caplog, max_length, level):
    caplog.set_level(logging.INFO)
    conversations = [conversation("a", "b" * 50), conversation("a", "b" * 3)]
    whole = [
        len(example.input_ids) for example in encode_conversations(conversations, AnswerFinder(tiny_tokenizer, [3]), 1000)[0]
    ]
    caplog.clear()
    encode_conversations(conversations, AnswerFinder(tiny_tokenizer, [3]), max_length)
    lost = sum(max(0, length - max_length) for length in whole)
    (record,) = caplog.records
    assert record.levelname == level
    assert f"{int(lost > 0)} of 2 examples are cut at data.max_length {max_length}" in record.getMessage()
    assert f"{100 * lost / sum(whole):.1f} %" in record.getMessage()
