"""Other data are named by the options that changed, and an older folder still opens."""

from dataclasses import replace
from pathlib import Path

from outrider.data.config import DataConfig, DataSource
from outrider.data.fields import name_digests
from outrider.data.sources import PromptOverlap
from outrider.data.store import (
    TEMPLATE,
    describe_change,
    describe_data,
    describe_target_change,
    describe_template_change,
)

from ..tiny_models import IDENTITY


def test_a_changed_option_is_named_with_both_values(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    data = DataConfig(source="messages", path=str(file), limit=20)
    before = describe_data(data, "template")
    assert describe_change(before, describe_data(replace(data, limit=30), "template")) == "data.limit was 20 and is 30"
    assert describe_change(before, describe_data(replace(data, limit=None), "template")) == "data.limit was 20 and is null"
    file.write_text("{} ")
    text = describe_change(before, describe_data(replace(data, seed=1), "other"))
    assert [part.split(" was ")[0].split(": ")[0] for part in text.split("; ")] == [
        "data.seed",
        f"data.path {file}",
        "data.chat_template changed (it is the one of the target's tokenizer as before, and its sha256",
    ]


def test_a_changed_template_is_named_by_its_option() -> None:
    data = DataConfig(source="stdlib", split="distill")
    before = describe_data(data, "a")
    after = describe_data(replace(data, chat_template="own.jinja"), "b")
    assert describe_change(before, after) == (
        "data.chat_template changed (it was the one of the target's tokenizer and is 'own.jinja')"
    )
    edited = describe_change(after, {**after, TEMPLATE: "0" * 64})
    assert edited.startswith("data.chat_template changed (it is 'own.jinja' as before, and its sha256 was ")
    assert "000000000000..." in edited
    assert describe_template_change(None, after).startswith("data.chat_template changed (it is 'own.jinja'")


def test_braces_in_a_name_stay_in_the_message(tmp_path: Path) -> None:
    file = tmp_path / "{chats}.jsonl"
    file.write_text("{}")
    data = DataConfig(source="messages", path=str(file), chat_template="{0}.jinja")
    before = describe_data(data, "a")
    file.write_text("{} ")
    text = describe_change(before, describe_data(replace(data, chat_template="{x}.jinja"), "b"))
    assert text.startswith(f"data.path {file}: its conversations changed, sha256 ")
    assert text.endswith("data.chat_template changed (it was '{0}.jinja' and is '{x}.jinja')")


def test_another_target_is_named_by_its_option() -> None:
    before = replace(
        IDENTITY, name="a", weights_sha256="1", config_sha256="2", tokenizer_sha256="3", hidden_size=4, vocab_size=5
    )
    changes = {"target.weights_sha256": "x", "target.tokenizer_sha256": "y", "horizon": "horizon (was 3, is 4)"}
    texts = describe_target_change(changes, before, before)
    assert list(texts.values()) == ["target.name_or_path a: its weights and its tokenizer changed", "horizon (was 3, is 4)"]
    other = describe_target_change(changes, before, replace(before, name="b"))
    assert other["target.name_or_path"] == "target.name_or_path was 'a' and is 'b', with other weights and tokenizer"
    revised = describe_target_change(changes, before, replace(before, revision="c"))
    assert revised["target.name_or_path"].startswith("target.revision was null and is 'c'")
    assert describe_target_change({"horizon": "x"}, before, before) == {"horizon": "x"}


def test_suites_are_compared_where_both_runs_left_their_prompts_out() -> None:
    data = DataConfig(source="stdlib", split="distill")
    overlap = PromptOverlap([], 13)
    overlap.suites["mt_bench"] = "abc"
    before = describe_data(data, "", overlap)
    assert "eval.suites changed" in describe_change(before, describe_data(data, "", PromptOverlap([], 13)))
    assert "no option" in describe_change(before, describe_data(data, ""))


def test_a_folder_without_facts_is_another_data_set_without_a_digest() -> None:
    assert "options weren't recorded" in describe_change(None, describe_data(DataConfig(source="stdlib", split="distill"), ""))


def test_digests_are_named_by_what_they_are_of() -> None:
    changes = {"suites.a": "suites.a (was 1, is 2)", "suites.b": "x", "seed": "seed (was 0, is 1)", "target.sha": "y"}
    words = {"suites.": "the prompts of {name}", "target.sha": "the target"}
    texts = ["the prompts of a", "the prompts of b", "seed (was 0, is 1)", "the target"]
    assert name_digests(changes, words) == texts


def test_a_changed_file_of_several_is_noticed(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "words"}')
    (tmp_path / "c.txt").write_text("words")
    sources = [
        DataSource(source="text", path=str(tmp_path / "*.jsonl")),
        DataSource(source="text", path=str(tmp_path / "c.txt")),
    ]
    for data in (DataConfig(sources=sources), DataConfig(source="text", path=str(tmp_path / "[ab].jsonl"))):
        before = describe_data(data, "")
        (tmp_path / "b.jsonl").write_text('{"text": "others"}')
        assert "its conversations changed, sha256" in describe_change(before, describe_data(data, ""))
        (tmp_path / "b.jsonl").write_text('{"text": "words"}')
