"""A target in slices over two processes, against the whole target."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from outrider.cli.samples import REPEATS
from outrider.data.config import DataConfig
from outrider.data.shards import label_store, read_shard
from outrider.data.types import TargetReads
from outrider.distill.regenerate.answers import answer_store, read_answers
from outrider.models.llm import tensor_parallel
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.loading import load_target

from ...distill.regenerate.test_run import write_conversations
from ...forks import result_of
from .launched_tensor_parallel import in_two_processes, make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_conversations(tmp_path_factory.mktemp("data") / "chats.jsonl", 8)


@pytest.fixture(scope="module")
def launched(tiny_target_dir: Path, data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("slices")
    assert result_of(in_two_processes, tiny_target_dir, data, output, ACCELERATE_USE_CPU="true") == [0, 0]
    return output


def test_each_process_holds_its_slice_of_the_layers(launched: Path) -> None:
    reports = [json.loads((launched / f"report-{rank}.json").read_text()) for rank in range(2)]
    assert [2 * report["slice"] for report in reports] == [report["whole"] for report in reports]
    assert reports[0]["whole"] > 10_000


def test_answers_and_labels_are_those_of_the_whole_target(launched, data, tiny_target_dir, tmp_path):
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))
    make(target, data, tmp_path, Accelerator(cpu=True))
    reads = TargetReads(hidden_states=True)
    for folder in (launched, launched / "batch"):
        ours, theirs = (answer_store(directory / "answers").load() for directory in (folder, tmp_path))
        assert len(ours.shards) == 3
        assert ours.complete
        for mine, other in zip(ours.shards, theirs.shards, strict=True):
            assert read_answers(folder / "answers", mine) == read_answers(tmp_path / "answers", other)
        labels, others = (label_store(directory / "distill").load() for directory in (folder, tmp_path))
        assert labels.complete
        assert labels.num_labels > 50
        for one, two in zip(labels.shards, others.shards, strict=True):
            pairs = zip(read_shard(folder / "distill", one, reads), read_shard(tmp_path / "distill", two, reads), strict=True)
            for mine, other in pairs:
                assert torch.equal(mine.continuations, other.continuations)
                torch.testing.assert_close(mine.hidden_states.decode(), other.hidden_states.decode(), rtol=0.02, atol=0.02)


def test_the_estimate_is_measured_by_the_clock_of_the_main_process(launched: Path) -> None:
    for rank in range(2):
        report = json.loads((launched / f"report-{rank}.json").read_text())
        assert report["texts"] > 4
        assert report["sampled_tokens"] == REPEATS * 128, "the main process's clock decides for both"


def with_processes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "PartialState", lambda: SimpleNamespace(num_processes=count, process_index=0))


@pytest.mark.parametrize(
    ("processes", "message"),
    [(1, "there is one; launch several"), (3, "num_attention_heads of 4 and num_key_value_heads of 2 and intermediate_size")],
)
def test_a_launch_that_cannot_slice_the_target_is_an_error_before_loading(processes, message, tiny_target_dir, monkeypatch):
    with_processes(processes, monkeypatch)
    with pytest.raises(ValueError, match=message):
        load_target(TargetConfig(name_or_path=str(tiny_target_dir), tensor_parallel=True))


def test_a_model_without_a_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_processes(2, monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neo"}))
    with pytest.raises(ValueError, match="no plan to slice models of type gpt_neo"):
        tensor_parallel.make_sharding(TargetConfig(name_or_path=str(tmp_path), tensor_parallel=True))


@pytest.mark.parametrize("other", [{"compiled": True}, {"device": "cpu"}, {"quantization": {"method": "torchao"}}])
def test_options_that_conflict_with_tensor_parallel_are_an_error(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel doesn't work together with {next(iter(other))}"):
        TargetConfig(name_or_path="here", tensor_parallel=True, **other)
