"""Lessons that shards and runs remember, and the rounds that list them."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.config import DataConfig
from outrider.data.files import read_json
from outrider.distill.config import DistillConfig
from outrider.distill.regenerate import rounds as rounds_module
from outrider.distill.regenerate import run as module
from outrider.distill.regenerate.answers import answer_store
from outrider.distill.regenerate.engine import Answer, Limits, Request
from outrider.distill.regenerate.lengths import buckets as buckets_module
from outrider.distill.regenerate.lengths import lessons as lessons_module
from outrider.distill.regenerate.lengths.lessons import LessonRecord, plan_rounds, read_lessons, write_lessons
from outrider.distill.regenerate.run import regenerate
from outrider.models.llm.hf_target import HFTarget

from ..label.test_run import ThreadAccelerator
from .test_run import contents, load, run, write_conversations

CONFIG = DistillConfig(
    mode="regenerate", engine="batch", shard_examples=1, temperature=1.0, max_new_tokens=8, kv_budget_gib=2e-4, horizon=3
)
NUM_SHARDS = 6
"""Shards of one conversation each, in rounds of 1, 1, 2 and 2."""


@pytest.fixture(autouse=True, scope="module")
def small_rounds() -> Iterator[None]:
    """Make rounds of few shards, and a predictor that learns from few answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lessons_module, "FIRST_ROUND", 1)
        patch.setattr(buckets_module, "LEARN_FIRST", 4)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_conversations(tmp_path_factory.mktemp("data") / "chats.jsonl", NUM_SHARDS)


@pytest.fixture(scope="module")
def finished(tiny_target_dir: Path, data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "answers"
    run(CONFIG, data, load(tiny_target_dir), folder)
    return folder


@pytest.fixture
def whole(finished: Path, tmp_path: Path) -> Path:
    """Copy an uninterrupted run."""
    return Path(shutil.copytree(finished, tmp_path / "whole"))


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    return load(tiny_target_dir)


def schedules(folder: Path) -> list[dict[str, Any]]:
    """Read the counts of each shard's schedule."""
    shards = [read_json(path)["schedule"] for path in sorted(folder.glob("answers-*.stats.json"))]
    return [{name: value for name, value in shard.items() if "seconds" not in name} for shard in shards]


def remove_shard(folder: Path, index: int) -> None:
    for path in folder.glob(f"answers-{index:05d}*"):
        path.unlink()


def make_record(prompt: int, num_tokens: int, *, cut: bool = False) -> LessonRecord:
    return LessonRecord(prompt_ids=[5] * prompt, num_known_tokens=None, num_tokens=num_tokens, cut=cut)


def test_rounds_double() -> None:
    assert plan_rounds(9) == [range(1), range(1, 2), range(2, 4), range(4, 8), range(8, 9)]
    assert plan_rounds(3) == [range(1), range(1, 2), range(2, 3)]
    assert plan_rounds(0) == []


def test_a_cut_answer_is_complete_only_if_it_fills_todays_room() -> None:
    limits = Limits(max_new_tokens=24, max_tokens=60)
    records = [make_record(10, 24, cut=True), make_record(10, 12, cut=True), make_record(10, 12), make_record(10, 99)]
    lessons = [lesson for record in records for lesson in record.lessons(limits)]
    assert [(lesson.num_tokens, lesson.is_complete) for lesson in lessons] == [(24, True), (12, False), (12, True), (24, True)]
    assert make_record(60, 5).lessons(limits) == []  # such a prompt leaves no room


def test_only_the_latest_lessons_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons_module, "MOST_LESSONS", 5)
    monkeypatch.setattr(rounds_module, "MOST_LESSONS", 5)
    names = ["earlier.lessons.jsonl", *(f"answers-{index:05d}.lessons.jsonl" for index in range(4))]
    for index, name in enumerate(names):
        write_lessons(tmp_path / name, [make_record(index, 1 + number) for number in range(3)])
    files = rounds_module.latest_files(tmp_path, before=3)
    assert [path.name for path in files] == names[2:4]
    assert [(len(record.prompt_ids), record.num_tokens) for record in read_lessons(files)] == [
        (2, 2),
        (2, 3),
        *((3, n) for n in (1, 2, 3)),
    ]
    assert [path.name for path in rounds_module.latest_files(tmp_path, before=1)] == names[:2]


def test_a_lesson_is_the_answers_length_and_what_predictors_read() -> None:
    request = Request(id="a", prompt_ids=torch.tensor([4, 5]), seed=1, num_known_tokens=7)
    record = LessonRecord.of(request, Answer(id="a", tokens=torch.tensor([8, 9, 3]), cut=False))
    assert record == LessonRecord(prompt_ids=[4, 5], num_known_tokens=7, num_tokens=3, cut=False)


def test_every_round_lists_and_uses_the_lessons_of_the_rounds_before_it(whole: Path) -> None:
    listed = {known.first_shard: [file.file for file in known.lessons] for known in answer_store(whole).load().rounds}
    names = [f"answers-{index:05d}.lessons.jsonl" for index in range(NUM_SHARDS)]
    assert listed == {first: names[:first] for first in (0, 1, 2, 4)}
    counts = schedules(whole)
    lessons = [read_lessons([whole / name]) for name in names]
    assert [len(shard) for shard in lessons] == [shard["num_answers"] for shard in counts]
    assert sum(record.num_tokens for shard in lessons for record in shard) == sum(shard["num_tokens"] for shard in counts)
    # A shard alone has too few answers to predict from.
    assert counts[0]["num_predicted"] == 0
    assert [shard["num_predicted"] for shard in counts[4:]] == [shard["num_answers"] for shard in counts[4:]]


@pytest.mark.parametrize("num_written", [0, 2, 3, 5], ids=lambda number: f"after {number} shards")
def test_an_interrupted_run_resumes_to_the_same_bytes_and_schedules(
    num_written: int, whole: Path, target: HFTarget, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.write_answers

    def kill(folder: Path, index: int, *args: Any) -> Any:
        if index == num_written:
            raise KeyboardInterrupt
        return write(folder, index, *args)

    monkeypatch.setattr(module, "write_answers", kill)
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, data, target, tmp_path / "resumed")
    monkeypatch.setattr(module, "write_answers", write)
    run(CONFIG, data, target, tmp_path / "resumed")
    assert contents(tmp_path / "resumed") == contents(whole)
    assert schedules(tmp_path / "resumed") == schedules(whole)


def test_shards_of_different_rounds_are_recomputed_with_the_lessons_of_their_round(
    whole: Path, target: HFTarget, data: DataConfig
) -> None:
    before, counts = contents(whole), schedules(whole)
    for index in (1, 2, 5):
        remove_shard(whole, index)
    run(CONFIG, data, target, whole)
    assert contents(whole) == before
    assert schedules(whole) == counts


# The filters of warnings, which `LightPredictor` sets, belong to a process, and here threads share them.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_two_processes_write_the_lessons_and_schedules_of_one(
    whole: Path, data: DataConfig, tiny_target_dir: Path, tmp_path: Path
) -> None:
    barrier = threading.Barrier(2, timeout=60)
    targets = [load(tiny_target_dir) for _ in range(2)]

    def play(rank: int) -> None:
        regenerate(CONFIG, data, targets[rank], tmp_path / "two", ThreadAccelerator(rank, barrier))

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(tmp_path / "two") == contents(whole)
    assert schedules(tmp_path / "two") == schedules(whole)


def test_altered_lessons_are_an_error_and_missing_ones_a_warning(
    whole: Path, target: HFTarget, data: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    remove_shard(whole, 5)
    path = whole / "answers-00002.lessons.jsonl"
    path.write_text(path.read_text().replace('"cut": true', '"cut": false', 1))
    with pytest.raises(ValueError, match=r"answers-00002\.lessons\.jsonl was altered.*Restore it, or delete it"):
        run(CONFIG, data, target, whole)
    path.unlink()
    run(CONFIG, data, target, whole)
    assert "lessons of the round from shard 4 are gone: answers-00002.lessons.jsonl" in caplog.text
    manifest = answer_store(whole).load()
    assert manifest.complete
    assert [len(known.lessons) for known in manifest.rounds] == [0, 1, 2, 3]


def test_a_folder_of_an_earlier_version_has_no_rounds_and_resumes(whole: Path, target: HFTarget, data: DataConfig) -> None:
    manifest = read_json(whole / "manifest.json")
    del manifest["rounds"]
    (whole / "manifest.json").write_text(json.dumps(manifest))
    remove_shard(whole, 4)
    run(CONFIG, data, target, whole)
    assert [known.first_shard for known in answer_store(whole).load().rounds] == [4]


def test_a_run_begins_with_the_lessons_of_an_earlier_one(
    whole: Path, target: HFTarget, data: DataConfig, tmp_path: Path
) -> None:
    config = replace(CONFIG, lessons=str(whole))
    run(config, data, target, tmp_path / "second")
    assert all(shard["num_predicted"] == shard["num_answers"] for shard in schedules(tmp_path / "second"))
    first, *_ = answer_store(tmp_path / "second").load().rounds
    assert [file.file for file in first.lessons] == ["earlier.lessons.jsonl"]
    copied = read_lessons([tmp_path / "second" / "earlier.lessons.jsonl"])
    assert copied == read_lessons(sorted(whole.glob("*.lessons.jsonl")))
    # The copy is used after the earlier run is gone.
    before, counts = contents(tmp_path / "second"), schedules(tmp_path / "second")
    remove_shard(tmp_path / "second", 1)
    whole.rename(tmp_path / "moved")
    run(config, data, target, tmp_path / "second")
    assert contents(tmp_path / "second") == before
    assert schedules(tmp_path / "second") == counts


def test_lessons_that_cannot_be_read_are_an_error_before_any_work(target: HFTarget, data: DataConfig, tmp_path: Path) -> None:
    run(replace(CONFIG, engine="decoder", kv_budget_gib=4.0), data, target, tmp_path / "decoder")
    assert not list((tmp_path / "decoder").glob("*.lessons.jsonl"))
    config = replace(CONFIG, lessons=str(tmp_path / "decoder"))
    with pytest.raises(ValueError, match="has no lessons"):
        run(config, data, target, tmp_path / "second")
    target.identity = replace(target.identity, tokenizer_sha256="1" * 64)
    with pytest.raises(ValueError, match="has another tokenizer"):
        run(config, data, target, tmp_path / "second")
    with pytest.raises(ValueError, match="does not exist"):
        run(replace(CONFIG, lessons=str(tmp_path / "nowhere")), data, target, tmp_path / "second")
    assert not (tmp_path / "second").exists()
