"""Conversations that the target begins: prompts, filters, several turns, resuming, and the plan's sample."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tokenizers import decoders

from outrider.data.chat import ChatTemplate, UnboundedTemplateError
from outrider.data.config import DataConfig, DataSource
from outrider.data.files import read_json
from outrider.data.sources import load_conversations
from outrider.distill.config import DistillConfig
from outrider.distill.regenerate import self_written
from outrider.distill.regenerate.answers import answer_store
from outrider.distill.regenerate.engine import Answer, Limits, Request
from outrider.distill.regenerate.self_written import sample_conversations, write_conversations
from outrider.models.llm.config import TargetConfig
from outrider.models.llm.hf_target import HFTarget
from outrider.models.llm.loading import load_target

STOP, UNENDED = 3, "..."
CONFIG = DistillConfig(engine="decoder", shard_examples=2, max_new_tokens=40)
DATA = DataConfig(source="self", count=6, max_length=400)
ASKED = [
    "How do whales sleep at sea?",
    "how do whales sleep at sea",
    "Why?",
    f"Where does this long road lead{UNENDED}",
    "Name three rivers of Asia.",
    "Tell me a joke about cats.",
]


@pytest.fixture
def target(tiny_target_dir: Path) -> HFTarget:
    target = load_target(TargetConfig(name_or_path=str(tiny_target_dir), device="cpu"))
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = [STOP]
    return target


class Scripted:
    """Engine that writes the n-th text for conversation n, and keeps what it was asked."""

    def __init__(self, target: HFTarget, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = target.tokenizer, texts
        self.prompts: dict[str, str] = {}
        self.options: list[tuple[float, int]] = []

    @contextmanager
    def open(self, config: DistillConfig, target: HFTarget, limits: Limits, *drafter: Any) -> Iterator["Scripted"]:
        self.options.append((config.temperature, limits.max_new_tokens))
        yield self

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        for request in requests:
            self.prompts[request.id] = str(self.tokenizer.decode(request.prompt_ids))
            text = self.texts[int(request.id.partition("#")[0].rpartition(":")[2])]
            cut = text.endswith(UNENDED)
            tokens = self.tokenizer(text.removesuffix(UNENDED), add_special_tokens=False).input_ids
            yield Answer(id=request.id, tokens=torch.tensor(tokens if cut else [*tokens, STOP]), cut=cut)


@pytest.fixture
def engine(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted(target, ASKED)
    monkeypatch.setattr(self_written, "open_engine", scripted.open)
    return scripted


def write(data: DataConfig, target: HFTarget, folder: Path, config: DistillConfig = CONFIG) -> DataConfig:
    return write_conversations(config, data, target, folder, Accelerator(cpu=True))


def questions_of(data: DataConfig) -> list[str]:
    conversations, dropped = load_conversations(data, unanswered=True)
    assert not dropped
    return [conversation.turns[0].content for conversation in conversations]


def test_usable_questions_become_messages_and_the_rest_is_counted(target, engine, tmp_path, caplog):
    written = write(DATA, target, tmp_path / "questions")
    assert (written.source, written.count, written.max_length) == ("messages", None, 400)
    assert questions_of(written) == [ASKED[0], *ASKED[4:]]
    opening = str(target.tokenizer.apply_chat_template([{"role": "user", "content": "%"}], tokenize=False)).partition("%")[0]
    assert set(engine.prompts.values()) == {opening}
    assert engine.options == [(0.8, self_written.QUESTION_TOKENS)]
    statistics = read_json(tmp_path / "questions" / "0" / "stats.json")
    assert isinstance(statistics, dict)
    assert (statistics["num_begun"], statistics["num_kept"], sum(statistics["dropped"].values())) == (6, 3, 3)
    # An interrupted run keeps its shards: here all that is missing is one of three.
    first = Path(str(written.path)).read_bytes()
    answer_store(tmp_path / "questions" / "0").path(1, ".json").unlink()
    engine.prompts.clear()
    write(DATA, target, tmp_path / "questions")
    assert sorted(engine.prompts) == ["self:0:2#0", "self:0:3#0"]
    assert Path(str(written.path)).read_bytes() == first
    Path(str(written.path)).write_bytes(first[1:])
    write(DATA, target, tmp_path / "questions")
    assert Path(str(written.path)).read_bytes() == first
    assert "was altered, and is written again" in caplog.text
    for changed in (replace(DATA, count=7), replace(DATA, prefix="Wie"), replace(DATA, question_temperature=1.0)):
        with pytest.raises(ValueError, match="shards of another run"):
            write(changed, target, tmp_path / "questions")
        with pytest.raises(ValueError, match="shards of another run"):
            sample_conversations(CONFIG, changed, target, tmp_path / "questions", tmp_path)


def test_the_target_samples_with_seeds_of_its_own(target: HFTarget, tmp_path: Path) -> None:
    config = replace(CONFIG, max_new_tokens=8)
    opening = self_written.Opening(target)
    source = self_written.SelfSource(config, DATA, DATA, 0, target)
    with self_written.ExitStack() as stack:
        requests = [request for item in source.items if (request := source.begin(item).next_request())]
        engine = source.open(stack)
        texts = [[answer.tokens.tolist() for answer in engine.answer(requests[:2])] for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert opening.end


def test_several_turns_alternate_and_a_prefix_begins_each_question(target: HFTarget, engine: Scripted, tmp_path: Path) -> None:
    engine.texts = [" do whales sleep at sea?", " Ñandú Фыва вапр", " do rivers meet the sea?"]
    target.tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    data = DataConfig(sources=[DataSource(source="self", count=3, turns=2, prefix="How ")], max_length=400)
    written = write(data, target, tmp_path / "questions")
    records = [json.loads(line) for line in Path(str(written.sources[0].path)).read_text().splitlines()]
    assert [record["id"] for record in records] == ["self:0:0", "self:0:2"]
    assert [turn["role"] for turn in records[0]["messages"]] == ["user", "assistant", "user"]
    assert [turn["content"] for turn in records[0]["messages"][::2]] == ["How do whales sleep at sea?"] * 2
    assert engine.options == [(0.8, self_written.QUESTION_TOKENS), (0.0, 40)]
    assert all(engine.prompts[f"self:0:0#{turn}"].endswith("How") is (turn != 1) for turn in range(3))
    assert records[0]["messages"][1]["content"] in engine.prompts["self:0:0#2"]


def test_a_question_that_repeats_one_of_another_source_is_left_out(target, engine, tmp_path):
    engine.texts = ["How do whales sleep at sea?", "Name three rivers of Asia.", "Tell me a joke about cats."]
    data = DataConfig(sources=[DataSource(source="self", count=2), DataSource(source="self", count=3)], max_length=400)
    written = write(data, target, tmp_path / "questions")
    assert questions_of(written) == engine.texts
    statistics = read_json(tmp_path / "questions" / "1" / "stats.json")
    assert isinstance(statistics, dict)
    assert (statistics["num_kept"], statistics["dropped"]) == (1, {self_written.REPEATED: 2})
    _, planned = sample_conversations(CONFIG, data, target, tmp_path / "others", tmp_path)
    assert [sources.num_kept for sources in planned] == [2, 1]


def test_a_prefix_with_a_mark_is_refused(target: HFTarget) -> None:
    for mark in ("<|user|>", target.tokenizer.eos_token, self_written.Opening(target).end):
        data = DataConfig(sources=[DataSource(source="self", count=3, prefix=f"How {mark}")])
        with pytest.raises(ValueError, match=re.escape(f"data.prefix is 'How {mark}', and '{mark}' is a special token")):
            self_written.require_openings(data, target)
    self_written.require_openings(DATA, target)


def test_conversations_that_all_lack_room_for_an_answer_keep_their_questions(target, engine, tmp_path):
    room = len(target.tokenizer(f"<|user|>{ASKED[0]}<|assistant|>").input_ids)
    written = write(DataConfig(source="self", count=1, turns=32, max_length=room), target, tmp_path / "questions")
    assert questions_of(written) == [ASKED[0]]


def test_a_template_with_todays_date_and_no_stop_behind_a_question(target: HFTarget, engine: Scripted, tmp_path: Path) -> None:
    date = "{{ strftime_now('%H:%M:%S.%f') }}"
    target.tokenizer.chat_template = f"{date} ## Asks: {{{{ messages[0].content }}}}\n## Answers: "
    engine.texts = ["How do ## work in *md*?\n## Answers: " + "so " * 99 + UNENDED]
    for _ in range(2):
        written = write(replace(DATA, count=1), target, tmp_path / "questions")
        assert questions_of(written) == ["How do ## work in *md*?"]


@pytest.mark.parametrize("texts", [["Why?"] * 6, [f"What now then{UNENDED}"] * 6])
def test_a_target_that_cannot_ask_is_an_error(texts: list[str], target: HFTarget, engine: Scripted, tmp_path: Path) -> None:
    engine.texts = texts
    with pytest.raises(ValueError, match=r"none of 6 conversations .* question"):
        write(DATA, target, tmp_path / "questions")


ASKS = "{{ messages[0].content }}"
UNFIT = [f"{ASKS}<|end|>", f"<|user|>{ASKS}", "{{ 1 / 0 }}", f"<|user|>{ASKS} {ASKS}<|end|>", "<|user|>Q<|end|>"]


@pytest.mark.parametrize("template", UNFIT)
def test_a_template_without_marks_is_an_error(template: str, target: HFTarget, tmp_path: Path) -> None:
    target.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="data.source is self, and the chat template"):
        write(DATA, target, tmp_path / "questions")


def test_a_template_without_bounds_ends_the_run(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take its time for each conversation."""

    def fail(*args: object) -> str:
        raise UnboundedTemplateError("it takes more than 8 seconds")

    source = self_written.SelfSource(CONFIG, DATA, DATA, 0, target)
    monkeypatch.setattr(ChatTemplate, "prompt", fail)
    with pytest.raises(UnboundedTemplateError):
        source.begin(source.items[0]).next_request()


def test_a_plan_repeats_a_sample_and_writes_nothing(target: HFTarget, engine: Scripted, tmp_path: Path) -> None:
    data = replace(DATA, count=60)
    engine.texts = ASKED * 10
    planned, (sources,) = sample_conversations(
        replace(CONFIG, decode_batch_size=6), data, target, tmp_path / "questions", tmp_path
    )
    assert len(questions_of(planned)) == 30
    assert (sources.num_missing, sources.num_sampled, sources.num_kept) == (60, 6, 3)
    assert not (tmp_path / "questions").exists()
    write(DATA, target, tmp_path / "questions")
    planned, sources_left = sample_conversations(CONFIG, DATA, target, tmp_path / "questions", tmp_path)
    assert len(questions_of(planned)) == 3
    assert not sources_left
