import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet

from outrider.data import hub
from outrider.data.config import DataConfig, DataSource
from outrider.data.conversations import Conversation, Turn
from outrider.data.sources import PromptOverlap, load_conversations
from outrider.data.stdlib import Cuts, code_conversations
from outrider.data.suites import Prompt, PromptSet, load_suite

QUESTION, ANSWER = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}


def sharegpt(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"conversations": list(turns), **more}


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path: Path | str, source: str = "sharegpt", **options: Any):
    return load_conversations(DataConfig(source=source, path=str(path), **options))


def as_json(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(records, indent=2))
    return path


def as_json_lines_called_json(path: Path, records: list[Any]) -> Path:
    return write_jsonl(path.with_suffix(".json"), records)


def as_jsonl_with_byte_order_mark_and_blank_lines(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("\ufeff\n" + "\n\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def as_gzipped_lines(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress(write_jsonl(path.with_suffix(""), records).read_bytes()))
    return path


def as_gzipped_json(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".json.gz")
    path.write_bytes(gzip.compress(json.dumps(records).encode()))
    return path


def as_parquet(path: Path, records: list[Any]) -> Path:
    path = path.with_suffix(".parquet")
    parquet.write_table(pa.Table.from_pylist(records), path)
    return path


WRITERS = [
    as_json,
    as_json_lines_called_json,
    as_jsonl_with_byte_order_mark_and_blank_lines,
    as_gzipped_lines,
    as_gzipped_json,
    as_parquet,
]


@pytest.mark.parametrize("write", WRITERS)
def test_every_kind_of_file_gives_the_same_conversations(write: Callable[[Path, list[Any]], Path], tmp_path: Path) -> None:
    records = [sharegpt(QUESTION, ANSWER, id="a"), sharegpt({"from": "system", "value": "Be brief."}, QUESTION, ANSWER, id="b")]
    conversations, dropped = load(write(tmp_path / "data", records))
    assert [conversation.id for conversation in conversations] == ["a", "b"]
    assert [turn.role for turn in conversations[1].turns] == ["system", "user", "assistant"]
    assert [turn.content for turn in conversations[0].turns] == ["Why?", "Because."]
    assert not dropped


def test_drops_are_counted_by_reason(tmp_path: Path) -> None:
    """A data set that silently loses half of its conversations trains a bad drafter."""
    records = [
        sharegpt(QUESTION, ANSWER),
        sharegpt(),
        sharegpt(QUESTION),
        sharegpt(QUESTION, {"from": "gpt", "value": "  "}),
        sharegpt(ANSWER, QUESTION, ANSWER),
        sharegpt(QUESTION, {"from": "robot", "value": "Beep."}),
        sharegpt(QUESTION, {"from": "gpt"}),
        sharegpt(QUESTION, "Because."),
        {"messages": []},
        ["no", "object"],
        sharegpt({"from": "system", "value": ""}, QUESTION, ANSWER),
        sharegpt({"from": "system", "value": "x"}, ANSWER),
        sharegpt(QUESTION, {"from": "gpt", "value": "hi \ud83d"}),
    ]
    conversations, dropped = load(write_jsonl(tmp_path / "mixed.jsonl", [{}, *records]))
    assert [conversation.id for conversation in conversations] == ["mixed.jsonl:1", "mixed.jsonl:5", "mixed.jsonl:11"]
    assert all([turn.role for turn in conversation.turns] == ["user", "assistant"] for conversation in conversations)
    assert dropped == {
        "no turns": 1,
        "no assistant turn": 1,
        "empty turn": 1,
        "no user turn": 1,
        "unknown role 'robot'": 1,
        "turn without a text ('content' or 'value')": 1,
        "turn that is not an object": 1,
        "record without a list 'conversations'": 2,
        "record is not an object": 1,
        "text with half a surrogate pair, which isn't valid Unicode": 1,
    }
    assert dropped.total() + len(conversations) == len(records) + 1


def test_ids_are_unique_and_stable_if_the_source_repeats_its_ids(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [sharegpt(QUESTION, ANSWER, id=id) for id in ("x", "x", 7, None, "x")])
    write_jsonl(tmp_path / "b.jsonl", [sharegpt(QUESTION, ANSWER, prompt_id="p")])
    ids = [conversation.id for conversation in load(path)[0]]
    assert ids == ["x", "x@a.jsonl:1", "7", "a.jsonl:3", "x@a.jsonl:4"]
    assert load(tmp_path / "b.jsonl")[0][0].id == "p"


def test_files_of_one_name_in_two_folders_have_different_ids(tmp_path: Path) -> None:
    """Answers and labels are kept by id, so that one conversation would take the other's place."""
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    for day in ("mon", "tue", "wed"):
        (tmp_path / day / "src").mkdir(parents=True)
        write_jsonl(tmp_path / day / "log.jsonl", [{"messages": messages}])
        (tmp_path / day / "src" / "a.txt").write_text("line\n" * 500)
    logs = [DataSource(source="openai", path=str(tmp_path / day / "log.jsonl")) for day in ("mon", "tue", "wed")]
    texts = [DataSource(source="text", path=str(tmp_path / day / "src")) for day in ("mon", "tue", "wed")]
    stdlib = [DataSource(source="stdlib", split="distill") for _ in range(2)]
    logged, pieces, code = ([one.id for one in load_conversations(DataConfig(sources=it))[0]] for it in (logs, texts, stdlib))
    assert logged == ["log.jsonl:0", "log.jsonl:0@1", "log.jsonl:0@2"]
    assert pieces[0] == "src/a.txt:1"
    for ids in (pieces, code):
        assert len(set(ids)) == len(ids) > 1


def test_the_limit_draws_by_seed_and_keeps_the_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [sharegpt(QUESTION, ANSWER) for _ in range(50)])
    draws = [[int(conversation.id.split(":")[1]) for conversation in load(path, limit=5, seed=seed)[0]] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] == sorted(draws[0])
    assert draws[0] != draws[2]
    assert len(set(draws[0])) == 5
    assert len(load(path, limit=99)[0]) == 50


def test_a_data_set_of_another_form_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [sharegpt(QUESTION, ANSWER)] * 3)
    with pytest.raises(
        ValueError,
        match=r"usable as 'messages'; dropped: 3 x .*'messages'.*data.source=sharegpt",
    ):
        load(path, "messages")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "a.jsonl holds no record"),
        ("a.json", b"[]", "a.json holds no record"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n', "a.jsonl, line 2, column .*not JSON.*one JSON object per line.*cut"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12], "a.jsonl.gz is not a complete gzip file"),
        ("a.parquet", b"PAR1 nonsense", "a.parquet is not a complete Parquet file"),
        ("a.csv", b"a,b\n", "a.csv: unknown kind of data file '.csv'; use one of .json, .jsonl"),
    ],
)
def test_an_empty_or_malformed_file_is_named_with_its_line(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        load(path)


@pytest.mark.parametrize("path", ["missing.jsonl", "/no/where", "./org/name", "a/b/c"])
def test_a_mistyped_path_is_not_requested_from_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match=f"the data path '{path}' does not exist"):
        load(path)


@pytest.mark.parametrize("name", ["org/chats", "hf:org/chats"])
def test_split_subset_and_revision_are_passed_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: object, **options: object) -> list[Any]:
        calls.append((args, options))
        return [sharegpt(QUESTION, ANSWER)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    conversations, _ = load(name, split="train_sft", subset="en", revision="abc")
    assert calls == [(("org/chats", "en"), {"split": "train_sft", "revision": "abc"})]
    assert [conversation.id for conversation in conversations] == ["chats:0"]


def test_one_file_of_a_hub_data_set_is_read_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of ShareGPT have columns of mixed types, which `datasets` rejects."""
    path = write_jsonl(tmp_path / "v4.json", [sharegpt(QUESTION, ANSWER, id="a"), sharegpt(QUESTION, ANSWER, id=1)])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **options: str(path))
    assert [conversation.id for conversation in load("org/chats", file="v4.json")[0]] == ["a", "1"]


def test_an_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_reasons", {})  # other tests of this process may have given the Hub up
    with pytest.raises(ValueError, match=r"data.path is 'org/none': split 'train' .*HF_HUB_OFFLINE is set.*data.path=FILE"):
        load("org/none")
    with pytest.raises(ValueError, match=r"data.path is 'org/none': the file 'a.json' .*HF_HUB_OFFLINE is set"):
        load("org/none", file="a.json")
    with pytest.raises(ValueError, match=r"data.sources has 'org/none': .*path: FILE"):
        load_conversations(DataConfig(sources=[DataSource(source="sharegpt", path="org/none")]))


LINES = "".join(f"line {index} of a text\n" for index in range(600))


def test_a_directory_of_text_and_code_is_cut_at_line_ends(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "book.txt").write_text(LINES)
    (root / "sub" / "code.py").write_text(LINES)
    (root / ".git" / "config").write_text(LINES)
    (root / "image.png").write_bytes(b"\x89PNG\xff")
    (root / "short.md").write_text("one line\n")
    options = {"prompt_chars": [50, 100]}
    conversations, dropped = load(root, "text", **options)
    assert conversations == load(root, "text", **options)[0]
    assert {conversation.id.split(":")[0] for conversation in conversations} == {"corpus/book.txt", "corpus/sub/code.py"}
    assert dropped == {"file is not UTF-8 text": 1, "text too short to be cut into a prompt and an answer": 1}
    tasks = {conversation.turns[0].content.split("\n")[0] for conversation in conversations}
    assert tasks == {"Continue this text.", "Continue this code."}
    book = [conversation for conversation in conversations if "book" in conversation.id]
    whole = "".join(turn.content.removeprefix("Continue this text.\n\n") for piece in book for turn in piece.turns)
    assert LINES.startswith(whole)
    assert len(whole) > 0.8 * len(LINES)


def test_text_comes_from_one_file_or_from_records_too(tmp_path: Path) -> None:
    options = {"prompt_chars": [50, 100]}
    (tmp_path / "a.py").write_text(LINES)
    assert len(load(tmp_path / "a.py", "text", **options)[0]) > 1
    records = write_jsonl(tmp_path / "a.jsonl", [{"text": LINES}, {"content": LINES}, {"body": LINES}])
    conversations, dropped = load(records, "text", **options)
    assert {conversation.id.rsplit(":", 1)[0] for conversation in conversations} == {"a.jsonl:0", "a.jsonl:1"}
    assert dropped == {"record without a text 'text' or 'content'": 1}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no file"):
        load(tmp_path / "empty", "text")


def test_the_standard_library_is_a_source() -> None:
    conversations, dropped = load_conversations(DataConfig(source="stdlib", split="distill", limit=20))
    assert len(conversations) == 20
    of_split = {conversation.id for conversation in code_conversations("distill", Cuts(seed=0))}
    assert of_split.issuperset(conversation.id for conversation in conversations)
    assert not dropped


def suite(*turns: str, name: str = "exam") -> PromptSet:
    prompts = tuple(Prompt(id=str(index), category="any", turns=(turn,)) for index, turn in enumerate(turns))
    return PromptSet(name=name, revision="0", prompts=prompts)


def conversation(*questions: str, system: str | None = None) -> Conversation:
    turns = [Turn(role="system", content=system)] if system else []
    for question in questions:
        turns += [Turn(role="user", content=question), Turn(role="assistant", content="one two three four five")]
    return Conversation(id=questions[0], turns=tuple(turns))


EXAM = suite("Tell me: how many legs, in all, have two spiders?", "Who are you?")


@pytest.mark.parametrize(
    ("questions", "suite_name"),
    [
        # case and punctuation don't matter
        (("tell me how many legs in all have two spiders",), "exam"),
        (("Please answer. How many legs, in ALL... have an ant?",), "exam"),  # five words in a row
        (("how many legs in total have two spiders",), None),  # four at most
        (("Hello", "Say it again: how many legs in all?"), "exam"),  # a later turn
        (("who are you",), "exam"),  # shorter than five words: only an equal prompt counts
        (("who are you to say so, and why?",), None),
        (("",), None),
        (("请问:两只蜘蛛一共有几条腿?",), "exam"),  # a character of a script without spaces is a word
        (("两只猫有几条腿",), None),
        (("one two three four five",), None),  # answers don't count
    ],
)
def test_five_words_in_a_row_are_found(questions: tuple[str, ...], suite_name: str | None) -> None:
    exam = suite(*(turn for prompt in EXAM.prompts for turn in prompt.turns), "one two three four six", "两只蜘蛛一共有几条腿")
    assert PromptOverlap([exam], 5).suite_of(conversation(*questions)) == suite_name


def test_a_system_prompt_counts() -> None:
    hidden = conversation("Answer it", system="how many legs in all have two spiders")
    assert PromptOverlap([EXAM], 5).suite_of(hidden) == "exam"


def test_decontamination_changes_no_other_sampled_conversation(tmp_path: Path) -> None:
    records = [[{"role": "user", "content": f"question number {i}"}, {"role": "assistant", "content": "a"}] for i in range(40)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    config = DataConfig(source="messages", path=str(path), limit=20)
    drawn, _ = load_conversations(config)
    question = drawn[3].turns[0].content
    kept, dropped = load_conversations(config, PromptOverlap([suite(question)], 13))
    assert kept == [conversation for conversation in drawn if conversation != drawn[3]]
    assert dropped == {"prompt that exam asks too (13 words in a row)": 1}
    with pytest.raises(ValueError, match=r"every prompt.*overlaps with the evaluation.*eval\.suites"):
        load_conversations(config, PromptOverlap([suite(*(conversation.turns[0].content for conversation in drawn))], 13))


@pytest.mark.slow
def test_answers_to_the_evaluations_prompts_are_no_training_data(shared_data: Path) -> None:
    chat = str(shared_data / "chat" / "alpaca_eval_outputs.jsonl.gz")
    suites = {
        name: load_suite(name, str(shared_data / name / file))
        for name, file in (("alpaca_eval", "alpaca_eval.jsonl"), ("mt_bench", "question.jsonl"))
    }
    config = DataConfig(source="sharegpt", path=chat, limit=2000)
    with pytest.raises(ValueError, match="every prompt"):
        load_conversations(config, PromptOverlap([suites["alpaca_eval"]], 13))
    kept, dropped = load_conversations(config, PromptOverlap([suites["mt_bench"]], 13))
    assert 1900 < len(kept) < 2000
    assert len(kept) + dropped.total() == 2000
